# SPDX-License-Identifier: Apache-2.0
"""llama.cpp in real ranks, on SmolLM2 and on the random model written as GGUF."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.llama_cpp import SPEC, BatchReply, LlamaCppBackend
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError, ModelError

from .loaded_ranks import PROMPTS, SMOLLM_CHAT, SMOLLM_PROMPTS, LoadedRanks, counts

pytest.importorskip("xllamacpp", reason=SPEC.install)


@pytest.fixture(scope="module")
def smollm() -> Iterator[LoadedRanks]:
    with LoadedRanks(SPEC, model=None) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def loaded() -> Iterator[LlamaCppBackend]:
    """A backend in this process."""
    backend = LlamaCppBackend()
    backend.load(resolve_model(None), {}, RankContext())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model as GGUF, with 32-bit weights."""
    file = tmp_path_factory.mktemp("gguf") / "llama-tiny.F32.gguf"
    # A subprocess, to keep its imports out of pytest's process.
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.backends.tiny_gguf", file], check=True, cwd=root)
    return file


class TestTokens:
    def test_greedy_tokens_match_transformers(self, tiny_gguf: Path) -> None:
        with LoadedRanks(SPEC, str(tiny_gguf)) as ranks:
            made, _ = ranks.generate(PROMPTS, max_new_tokens=12)
        with LoadedRanks(dtype="float32") as reference:
            expected, _ = reference.generate(PROMPTS, max_new_tokens=12)
        assert counts(made) == counts(expected) == [(3, 12), (11, 12), (1, 12)]
        assert made.token_ids == expected.token_ids

    def test_bytes_that_are_not_text_are_counted(self, tiny_gguf: Path) -> None:
        """A byte that is not valid UTF-8 has no text."""
        backend = LlamaCppBackend()
        actual = backend.load(resolve_model(str(tiny_gguf)), {}, RankContext())
        try:
            params = GenerationParams.parse(
                {"max_new_tokens": 40, "ignore_eos": True, "do_sample": True, "top_k": 259}
            )
            job = backend.prepare(["abc"], params)
            made = job.result(job.run())
        finally:
            backend.close()
        assert actual.dtype == "float32"
        assert counts(made) == [(3, 40)]
        assert len(made.token_ids[0]) == 40

    def test_the_end_of_sequence_is_respected_or_ignored(self, smollm: LoadedRanks) -> None:
        """The chat model answers in a few tokens; with ignore_eos it says the same first."""
        prompts = [SMOLLM_CHAT, SMOLLM_PROMPTS[0]]
        heeded, timeline = smollm.generate(prompts, max_new_tokens=20, ignore_eos=False)
        ignored, _ = smollm.generate([SMOLLM_CHAT], max_new_tokens=20)
        ids = heeded.token_ids[0]
        assert len(ids) < 20
        assert ids[-1] == 2
        assert "Paris" in heeded.texts[0]
        assert counts(heeded) == [(21, len(ids)), (2, 20)]
        assert timeline.requests[0].last_token_ns < timeline.requests[1].last_token_ns  # type: ignore[operator]
        assert counts(ignored) == [(21, 20)]
        assert ignored.token_ids[0][: len(ids) - 1] == ids[:-1]
        assert 2 not in ignored.token_ids[0], "it may not be chosen at all"


class TestTimes:
    def test_prefill_ends_within_the_round(self, smollm: LoadedRanks) -> None:
        _, timeline = smollm.generate(SMOLLM_PROMPTS, max_new_tokens=5)
        ((_, border_ns),) = timeline.borders_ns
        assert timeline.start_ns < border_ns < timeline.end_ns
        for request in timeline.requests:
            assert request.first_token_ns is not None
            assert request.last_token_ns is not None
            assert timeline.start_ns < request.first_token_ns < request.last_token_ns <= timeline.end_ns
            assert request.token_ns == ()

    def test_durations_longer_than_the_round_are_discarded(self) -> None:
        actual = [{"timings": {"prompt_ms": 2.0, "predicted_ms": 1.0}}]
        assert BatchReply(actual, sent_ns=1_000_000, received_ns=5_000_000).start_ns() == 2_000_000
        assert BatchReply(actual, sent_ns=1_000_000, received_ns=3_500_000).start_ns() is None


class TestProcess:
    def test_no_port_is_open_and_the_socket_is_private(self, smollm: LoadedRanks) -> None:
        smollm.generate(SMOLLM_PROMPTS, max_new_tokens=1)
        rank = psutil.Process(smollm.group.ranks[0].pid)
        assert [each for each in rank.net_connections("inet") if each.status == psutil.CONN_LISTEN] == []
        (path,) = {each.laddr for each in rank.net_connections("unix") if str(each.laddr).endswith("s.sock")}
        assert Path(str(path)).parent.stat().st_mode & 0o777 == 0o700

    def test_a_batch_of_another_size_gets_the_capacity_it_needs(self, loaded: LlamaCppBackend) -> None:
        first = loaded.prepare(SMOLLM_PROMPTS[:1], GenerationParams(max_new_tokens=2))
        again = loaded.prepare(SMOLLM_PROMPTS[1:], GenerationParams(max_new_tokens=3))
        assert again.server is first.server, "the same capacity"
        larger = loaded.prepare(SMOLLM_PROMPTS, GenerationParams(max_new_tokens=300, ignore_eos=True))
        assert (larger.server.capacity.prompts, larger.server.capacity.tokens) == (2, 512)

    def test_the_socket_is_in_the_scratch_directory_of_the_rank(self) -> None:
        # Not tmp_path, which can be too long for a socket.
        with tempfile.TemporaryDirectory(prefix="rank-") as scratch:
            backend = LlamaCppBackend()
            backend.load(resolve_model(None), {}, RankContext(scratch=scratch))
            try:
                assert len(list(Path(scratch).glob("*/s.sock"))) == 1
            finally:
                backend.close()
            assert not list(Path(scratch).iterdir())


class TestRefusals:
    def test_a_refusal_leaves_the_backend_usable(self, loaded: LlamaCppBackend) -> None:
        with pytest.raises(BackendError):
            loaded.prepare(["abc"], GenerationParams(max_new_tokens=9000))
        job = loaded.prepare(SMOLLM_PROMPTS, GenerationParams(max_new_tokens=2, ignore_eos=True))
        assert counts(job.result(job.run())) == [(2, 2), (6, 2)]

    @pytest.mark.parametrize(
        ("length", "reason"),
        [(1_000_000, "failed to read key-value pairs"), (50_000_000, "is not within the file bounds")],
    )
    def test_a_damaged_file_gives_one_line_with_llama_cpps_reason(
        self, tmp_path: Path, length: int, reason: str
    ) -> None:
        whole = Path(resolve_model(None).location)
        with whole.open("rb") as file:
            (tmp_path / "broken.gguf").write_bytes(file.read(length))
        with pytest.raises(ModelError, match=r"model broken\.gguf: llama-cpp cannot load it \(") as caught:
            LoadedRanks(SPEC, str(tmp_path / "broken.gguf"))
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_an_inconsistent_answer_is_refused(self, loaded: LlamaCppBackend) -> None:
        job = loaded.prepare(SMOLLM_PROMPTS[:1], GenerationParams(max_new_tokens=2))
        outcome = job.run()
        outcome.sequences[0]["timings"]["cache_n"] = 1
        with pytest.raises(BackendError, match="from a cache 1, truncated False"):
            job.result(outcome)
