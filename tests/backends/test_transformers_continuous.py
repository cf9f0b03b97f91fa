# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers: the tokens of static batches, with a timestamp each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError

from .loaded_ranks import PROMPTS, LoadedRanks, counts

Read = Callable[..., dict[str, Any]]


def count_tokens() -> list[int]:
    """Return the tokens that pass the model in three iterations of a round with a prompt of 600 tokens."""
    from pytest_llenergy.backends.base import RankContext
    from pytest_llenergy.backends.models import resolve_model
    from pytest_llenergy.backends.transformers.backend import TransformersBackend

    backend = TransformersBackend()
    backend.load(resolve_model("random:llama-tiny"), {"batching": "continuous"}, RankContext())
    job = backend.prepare(["a" * 600], GenerationParams(max_new_tokens=4, ignore_eos=True))
    seen: list[int] = []
    embeddings: Any = backend._model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    sums = []
    for _ in range(3):
        seen.clear()
        job.result(job.run())
        sums.append(sum(seen))
    backend.close()
    return sums


@pytest.fixture(scope="module")
def static() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def continuous() -> Iterator[LoadedRanks]:
    with LoadedRanks(batching="continuous", dtype="float32") as ranks:
        yield ranks


def test_tokens_match_a_static_batch(static: LoadedRanks, continuous: LoadedRanks) -> None:
    expected, _ = static.generate(PROMPTS)
    generation, _ = continuous.generate(PROMPTS)
    assert generation.token_ids == expected.token_ids
    assert generation.texts == expected.texts
    assert len({tuple(ids) for ids in generation.token_ids}) == 3, "equal outputs would prove nothing"
    assert counts(generation) == [(3, 8), (11, 8), (1, 8)]


@pytest.mark.slow
def test_eager_attention_gives_the_same_tokens(static: LoadedRanks) -> None:
    expected, _ = static.generate(PROMPTS)
    with LoadedRanks(batching="continuous", attention="eager", dtype="float32") as eager:
        first, _ = eager.generate(PROMPTS)
        again, _ = eager.generate(PROMPTS)
    assert first.token_ids == again.token_ids == expected.token_ids


def test_a_request_that_ends_early_counts_its_own_tokens(
    static: LoadedRanks, continuous: LoadedRanks
) -> None:
    free, _ = static.generate(PROMPTS)
    stop = [free.token_ids[0][2]]
    expected, _ = static.generate(PROMPTS, stop_token_ids=stop)
    generation, _ = continuous.generate(PROMPTS, stop_token_ids=stop)
    assert generation.token_ids == expected.token_ids
    assert len(generation.token_ids[0]) < 8
    assert max(each.output_tokens for each in generation.requests) == 8
    early, late = generation.requests[0], max(generation.requests, key=lambda each: each.output_tokens)
    assert early.token_ns[-1] < late.token_ns[-1]


def test_each_token_has_a_timestamp_within_its_round(continuous: LoadedRanks) -> None:
    _, timeline = continuous.generate(PROMPTS)
    for request in timeline.requests:
        assert request.start_ns is not None
        assert timeline.start_ns <= request.start_ns < request.token_ns[0]
        assert list(request.token_ns) == sorted(request.token_ns)
        assert request.token_ns[-1] <= timeline.end_ns
        assert len(request.token_ns) == request.output_tokens
        assert (request.first_token_ns, request.last_token_ns) == (request.token_ns[0], request.token_ns[-1])


def test_all_requests_run_at_once(continuous: LoadedRanks) -> None:
    _, timeline = continuous.generate(PROMPTS)
    first = max(request.token_ns[0] for request in timeline.requests)
    assert first < min(request.token_ns[-1] for request in timeline.requests)


@pytest.mark.slow
def test_with_one_block_requests_wait_for_each_other(static: LoadedRanks) -> None:
    expected, _ = static.generate(PROMPTS)
    with LoadedRanks(batching="continuous", num_blocks=1, max_batch_tokens=5, dtype="float32") as ranks:
        assert (ranks.info.options["num_blocks"], ranks.info.options["max_batch_tokens"]) == (1, 5)
        generation, timeline = ranks.generate(PROMPTS)
    assert generation.token_ids == expected.token_ids
    one, two, three = timeline.requests
    assert one.token_ns[-1] <= two.token_ns[0] < two.token_ns[-1] <= three.token_ns[0]


def test_a_repeated_prompt_is_prefilled_again(static: LoadedRanks) -> None:
    """Two blocks of the prompt are full: with transformers' default sharing they would cost nothing again."""
    ((first, second, third),) = static.call(count_tokens)
    assert first == second == third
    assert first >= 603


def test_no_thread_is_left_after_a_round(continuous: LoadedRanks) -> None:
    def threads() -> list[str]:
        import threading

        return [thread.name for thread in threading.enumerate()]

    continuous.generate(PROMPTS)
    (names,) = continuous.call(threads)
    assert [name for name in names if "generation" in name] == []


@pytest.mark.slow
def test_a_request_larger_than_the_cache_is_refused() -> None:
    message = "transformers: num_blocks is 1, but the longest request needs 2 blocks of 256 tokens"
    with (
        LoadedRanks(batching="continuous", num_blocks=1, dtype="float32") as ranks,
        pytest.raises(BackendError, match=message),
    ):
        ranks.generate(["abc"], max_new_tokens=300)


@pytest.mark.slow
def test_the_record_holds_the_batching_options(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        def test_it(energy, backend):
            continuous = backend.with_options(batching="continuous", dtype="float32")
            run = energy(continuous.generate, ["abc", "hello world"], max_new_tokens=16, ignore_eos=True)
            assert run.result.output_tokens == 32
            assert 0 < run.time_to_first_token_s < run.duration_s
            assert run.inter_token_latency_s > 0
        """
    )
    quick.runpytest(
        "--energy-report", "--energy-model=random:llama-tiny", "--energy-backend=transformers"
    ).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    options = record["backend"]["options"]
    assert {name: options[name] for name in ("batching", "page_size", "allow_block_sharing")} == {
        "batching": "continuous",
        "page_size": 256,
        "allow_block_sharing": False,
    }
    assert options["num_blocks"] == "what the batch needs"
    assert all(round_["tokens"] == {"input": 14, "output": 32} for round_ in record["rounds"])
