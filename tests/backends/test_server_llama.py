# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server with the default model: counts, repeated prompts, open and closed loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.tasks import ServedLoad, ServeParams
from pytest_llenergy.backends.traffic import synthetic
from pytest_llenergy.record.timeline import Timeline

from .loaded_ranks import SMOLLM_CHAT, SMOLLM_PROMPTS, LoadedRanks
from .servers.start import llama

pytest.importorskip("aiohttp")
pytest.importorskip("xllamacpp", reason="no module xllamacpp: pip install xllamacpp")


@pytest.fixture(scope="module")
def smollm() -> Iterator[LoadedRanks]:
    with LoadedRanks(server.SPEC, model=None, command=llama()) as ranks:
        yield ranks


def serve(ranks: LoadedRanks, prompts: list[str], **params: Any) -> tuple[ServedLoad, Timeline]:
    workload = ranks.prepare(prompts, ServeParams.parse(params))
    timeline = workload.run_round()
    return ServedLoad.merge(workload.results()), timeline


def test_the_end_of_sequence_is_respected_or_ignored(smollm: LoadedRanks) -> None:
    heeded, timeline = smollm.generate([SMOLLM_CHAT], max_new_tokens=30, ignore_eos=False)
    ignored, _ = smollm.generate([SMOLLM_CHAT], max_new_tokens=30)
    assert "Paris" in heeded.texts[0]
    assert heeded.output_tokens < 30
    assert ignored.output_tokens == 30
    # The end token has no text, but arrived all the same.
    (request,) = timeline.requests
    assert len(request.token_ns) == heeded.output_tokens


def test_a_repeated_prompt_is_computed_again(smollm: LoadedRanks) -> None:
    """By default the server would compute only the last token; it reports cached tokens."""
    prompt = ["one two three four five six seven eight nine ten " * 4]
    asked = {"max_new_tokens": 1, "concurrency": 1, "num_requests": 1}
    for keeps, hit in ((False, False), (False, False), (True, True)):
        made, timeline = serve(smollm, prompt, prefix_cache=keeps, **asked)
        assert not any("cache" in flag.name for flag in timeline.flags)
        assert made.cached_tokens is not None
        assert (made.cached_tokens > 0) is hit


def test_cpu_time_of_the_server_counts_in_the_round(smollm: LoadedRanks) -> None:
    """Almost all of the work is the server's; the client alone would have next to none."""
    _, timeline = smollm.generate(SMOLLM_PROMPTS, max_new_tokens=30)
    assert timeline.cpu_time_s > 0.1
    assert smollm.group.ranks[0].workers != []


@pytest.fixture(scope="module")
def in_process() -> Iterator[ServerBackend]:
    """The backend in this process, so that its texts can be read."""
    backend = ServerBackend()
    backend.load(resolve_model(None), {"command": llama(), "timeout_s": 120}, RankContext())
    yield backend
    backend.close()


class TestTraffic:
    """Prompts of exact lengths on a real tokenizer, chat template and prefix cache."""

    @pytest.mark.parametrize("endpoint", ["completions", "chat"])
    @pytest.mark.slow
    def test_prompts_are_exact_by_another_implementation_of_the_tokenizer(
        self, in_process: ServerBackend, endpoint: str
    ) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained_path(resolve_model(None)))
        traffic = synthetic(count=6, input_tokens=90, input_stdev=20, shared_prefix=0.5, output_tokens=2)
        params = ServeParams.parse({"concurrency": 2, "num_requests": 6, "endpoint": endpoint})
        job = in_process.prepare_serve(traffic, params)
        ids = []
        for each in job.requests:
            text = each.prompt
            if endpoint == "chat":
                message = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids.append(tokenizer.encode(text))
        asked = [each.input_tokens for each in traffic]
        assert [len(row) for row in ids] == asked
        assert len(set(asked)) > 3
        # The shared half has the whole template, of which six tokens are at the end.
        shared = 39 if endpoint == "chat" else 45
        assert len({tuple(row[:shared]) for row in ids}) == 1
        assert len({tuple(row[:50]) for row in ids}) > 1
        made = job.result(job.run())
        assert sorted(each.input_tokens for each in made.requests) == sorted(map(int, filter(None, asked)))

    @pytest.mark.slow
    def test_shared_prefixes_are_cache_hits_and_rounds_do_not_hit_each_other(
        self, in_process: ServerBackend
    ) -> None:
        traffic = synthetic(count=4, input_tokens=120, shared_prefix=0.75, output_tokens=2)
        params = ServeParams.parse({"concurrency": 1, "num_requests": 4, "prefix_cache": True})
        job = in_process.prepare_serve(traffic, params)
        # Otherwise by the time of day, and now and then two texts begin alike.
        job._run = 1000
        for _ in range(2):
            made = job.result(job.run())
            first, *others = (each.cached_tokens for each in made.requests)
            assert first is not None
            assert first < 20
            # One slot keeps the last prompt, whose first three quarters are those of the next.
            assert all(each is not None and 85 <= each <= 100 for each in others), (first, others)
