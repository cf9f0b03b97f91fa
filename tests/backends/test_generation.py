# SPDX-License-Identifier: Apache-2.0
"""Token and phase truth: prompts and outputs whose lengths are counted by hand.

The random model has one token a byte and adds none, so the length of an ASCII prompt is its token count.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends import openvino
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.convert import local_directory
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.model import ModelSource, resolve
from pytest_llenergy.backends.transformers import spec as transformers
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import task_workload

Read = Callable[..., dict[str, Any]]

PROMPTS = ["abc", "hello world", "x"]


class Engine:
    """A backend in real ranks."""

    def __init__(self, spec: BackendSpec, model: ModelSource, options: dict[str, Any], n: int = 1) -> None:
        self.pool = RankPool(timeout_s=300)
        plan = plan_processes(spec.capabilities, None, Lease(devices=("cpu",) * n), [0, 1], 1)
        try:
            self.group, self.info = self.pool.loaded(plan, Load.of(spec, model, options))
        except BaseException:
            # The fixture has nothing yet that it could close.
            self.pool.close()
            raise

    def generate(self, prompts: list[str], **params: Any) -> tuple[Generation, RoundTimeline]:
        workload = task_workload(self.group, prompts, GenerationParams.of(params), 300)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    engine = Engine(transformers.SPEC, resolve("random:llama-tiny"), {"dtype": "float32"})
    yield engine
    engine.pool.close()


@pytest.fixture(scope="module")
def smollm() -> Iterator[Engine]:
    engine = Engine(openvino.SPEC, resolve(None), {})
    yield engine
    engine.pool.close()


def counts(generation: Generation) -> list[tuple[int, int]]:
    return [(request.input_tokens, request.output_tokens) for request in generation.requests]


class TestTransformers:
    def test_lengths_are_those_counted_by_hand(self, tiny: Engine) -> None:
        generation, _ = tiny.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
        assert counts(generation) == [(3, 5), (11, 5), (1, 5)]
        assert [len(ids) for ids in generation.token_ids] == [5, 5, 5]
        assert generation.output_tokens == 15

    def test_a_padded_batch_gives_what_each_prompt_gives_alone(self, tiny: Engine) -> None:
        batch, _ = tiny.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        alone = [tiny.generate([prompt], max_new_tokens=8, ignore_eos=True)[0] for prompt in PROMPTS]
        assert batch.token_ids == [each.token_ids[0] for each in alone]
        assert len({tuple(ids) for ids in batch.token_ids}) == 3, "equal outputs would prove nothing"

    def test_a_sequence_that_ends_early_counts_what_it_made(self, tiny: Engine) -> None:
        """Padding after the end is not output, nor is it the end token of another prompt."""
        free, _ = tiny.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        stop = free.token_ids[0][2]
        expected = [
            ids[: ids.index(stop) + 1] if stop in ids else ids for ids in (list(x) for x in free.token_ids)
        ]
        generation, timeline = tiny.generate(
            PROMPTS, max_new_tokens=8, stop_token_ids=[stop], ignore_eos=True
        )
        assert generation.token_ids == expected
        assert len(expected[0]) < 8
        assert max(len(ids) for ids in expected) == 8
        assert [out for _, out in counts(generation)] == [len(ids) for ids in expected]
        early, late = timeline.requests[0], max(timeline.requests, key=lambda r: r.output_tokens)
        assert early.last_token_ns is not None
        assert late.last_token_ns is not None
        assert early.last_token_ns < late.last_token_ns

    def test_ignoring_the_end_of_sequence_ignores_the_models_own(self, tiny: Engine, tmp_path: Path) -> None:
        """generate() fills an end that a call leaves open from the model's defaults, and pads silently."""
        free, _ = tiny.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        end = free.token_ids[0][2]
        model = tmp_path / "ends-soon"
        shutil.copytree(local_directory(resolve("random:llama-tiny")), model)
        defaults = model / "generation_config.json"
        defaults.write_text(
            json.dumps({**json.loads(defaults.read_text()), "eos_token_id": end, "repetition_penalty": 9.0})
        )
        engine = Engine(transformers.SPEC, resolve(str(model)), {"dtype": "float32"})
        try:
            ignored, _ = engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
            heeded, _ = engine.generate(PROMPTS, max_new_tokens=8)
        finally:
            engine.pool.close()
        assert ignored.token_ids == free.token_ids
        assert heeded.token_ids[0] == free.token_ids[0][: free.token_ids[0].index(end) + 1]

    def test_phases_and_stamps_lie_in_their_order(self, tiny: Engine) -> None:
        _, timeline = tiny.generate(PROMPTS, max_new_tokens=6, ignore_eos=True)
        ((_, border_ns),) = timeline.borders_ns
        assert timeline.start_ns < border_ns < timeline.end_ns
        assert all(request.first_token_ns == border_ns for request in timeline.requests)
        last = timeline.requests[0].last_token_ns
        assert last is not None
        assert border_ns < last <= timeline.end_ns

    def test_each_iteration_of_a_round_counts_its_own_tokens(self, tiny: Engine) -> None:
        params = GenerationParams.of({"max_new_tokens": 5, "ignore_eos": True})
        workload = task_workload(tiny.group, PROMPTS, params, 300)
        workload.ready()
        workload.work(3)
        timeline = workload.timeline()
        assert timeline.iterations == len(timeline.borders_ns) == 3
        assert [request.output_tokens for request in timeline.requests] == [5] * 9
        assert [request.input_tokens for request in timeline.requests] == [3, 11, 1] * 3
        assert Generation.merge(workload.results()).output_tokens == 15

    def test_a_prompt_that_the_model_has_no_positions_for_is_refused(self) -> None:
        """Left to itself transformers goes on beyond them. It has 4096."""
        engine = Engine(transformers.SPEC, resolve("random:llama-tiny"), {})
        try:
            assert engine.generate(["a" * 4095], max_new_tokens=1)[0].output_tokens == 1
            with pytest.raises(BackendError, match="4098 tokens; the model has room for 4096"):
                engine.generate(["a" * 4096], max_new_tokens=2)
        finally:
            engine.pool.close()

    def test_static_cache_and_eager_attention_give_the_same_tokens(self, tiny: Engine) -> None:
        dynamic, _ = tiny.generate(["hello"], max_new_tokens=6, ignore_eos=True)
        static, _ = tiny.generate(["hello"], max_new_tokens=6, ignore_eos=True, cache="static")
        assert static.token_ids == dynamic.token_ids
        eager = Engine(
            transformers.SPEC,
            resolve("random:llama-tiny"),
            {"dtype": "float32", "attn_implementation": "eager"},
        )
        try:
            assert eager.info.options["attn_implementation"] == "eager"
            assert (
                eager.generate(["hello"], max_new_tokens=6, ignore_eos=True)[0].token_ids == dynamic.token_ids
            )
        finally:
            eager.pool.close()

    def test_sampling_repeats_with_its_seed(self, tiny: Engine) -> None:
        def sample(seed: int) -> list[list[int]]:
            return tiny.generate(["abc"], max_new_tokens=12, ignore_eos=True, do_sample=True, seed=seed)[
                0
            ].token_ids

        assert sample(1) == sample(1)
        assert sample(1) != sample(2)

    def test_two_ranks_share_the_batch(self, tiny: Engine) -> None:
        pair = Engine(transformers.SPEC, resolve("random:llama-tiny"), {"dtype": "float32"}, n=2)
        try:
            both, timeline = pair.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
        finally:
            pair.pool.close()
        single, _ = tiny.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
        assert both.token_ids == single.token_ids
        assert [len(rank.requests) for rank in timeline.ranks] == [2, 1]

    def test_what_was_loaded_is_described(self, tiny: Engine) -> None:
        assert (tiny.info.model, tiny.info.dtype) == ("random:llama-tiny", "float32")
        assert tiny.info.options["attn_implementation"] == "sdpa"
        assert tiny.info.load_s is not None

    def test_a_dtype_that_is_none_is_refused(self) -> None:
        with pytest.raises(
            BackendError, match=r"dtype is 'float33', needs one of auto, float32, bfloat16, float16"
        ):
            Engine(transformers.SPEC, resolve("random:llama-tiny"), {"dtype": "float33"})

    def test_a_directory_that_holds_no_model_is_one_line(self, tmp_path: Any) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelError, match=f"model {tmp_path.name}: ") as caught:
            Engine(transformers.SPEC, resolve(str(tmp_path)), {})
        assert "\n" not in str(caught.value)


class TestOpenVino:
    """SmolLM2: "hello world" is the two tokens 28120 and 905, "The capital of France is a" six words."""

    def test_lengths_are_those_counted_by_hand(self, smollm: Engine) -> None:
        prompts = ["hello world", "The capital of France is a"]
        generation, _ = smollm.generate(prompts, max_new_tokens=5, ignore_eos=True)
        assert counts(generation) == [(2, 5), (6, 5)]
        alone = [smollm.generate([prompt], max_new_tokens=5, ignore_eos=True)[0] for prompt in prompts]
        assert generation.token_ids == [each.token_ids[0] for each in alone]

    def test_a_sequence_that_ends_early_counts_what_it_made(self, smollm: Engine) -> None:
        prompts = ["hello world", "The capital of France is a"]
        free, _ = smollm.generate(prompts, max_new_tokens=8, ignore_eos=True)
        stop = next(token for token in free.token_ids[0][1:] if token not in free.token_ids[1])
        expected = [len(free.token_ids[0][: free.token_ids[0].index(stop) + 1]), 8]
        generation, timeline = smollm.generate(
            prompts, max_new_tokens=8, stop_token_ids=[stop], ignore_eos=True
        )
        assert [out for _, out in counts(generation)] == expected
        assert timeline.requests[0].last_token_ns < timeline.requests[1].last_token_ns  # type: ignore[operator]

    def test_the_end_of_sequence_is_heeded_or_ignored(self, smollm: Engine) -> None:
        """The chat model answers in a few tokens and ends; made to go on, it says the same first."""
        question = "What is the capital of France? Answer in one word."
        chat = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"]
        heeded, _ = smollm.generate(chat, max_new_tokens=30)
        ignored, _ = smollm.generate(chat, max_new_tokens=30, ignore_eos=True)
        ids = heeded.token_ids[0]
        assert len(ids) < 30
        assert ids[-1] == 2
        assert "Paris" in heeded.texts[0]
        assert counts(ignored)[0][1] == 30
        assert ignored.token_ids[0][: len(ids)] == ids
        third = ids[2]
        stopped, _ = smollm.generate(chat, max_new_tokens=30, ignore_eos=True, stop_token_ids=[third])
        assert stopped.token_ids[0] == ids[: ids.index(third) + 1]

    def test_the_engines_clock_is_ours(self, smollm: Engine) -> None:
        _, timeline = smollm.generate(["hello world"], max_new_tokens=5, ignore_eos=True)
        ((_, border_ns),) = timeline.borders_ns
        assert timeline.start_ns < border_ns < timeline.end_ns

    def test_no_prefix_is_kept_from_round_to_round(self, smollm: Engine) -> None:
        """With the engine's default a repeated prompt would be nearly free."""
        prompt = ["one two three four five six seven eight nine ten " * 20]
        prefills = []
        for _ in range(4):
            _, timeline = smollm.generate(prompt, max_new_tokens=2, ignore_eos=True)
            ((start_ns, border_ns),) = timeline.borders_ns
            prefills.append(border_ns - start_ns)
        assert smollm.info.options["prefix_caching"] is False
        assert min(prefills[1:]) > prefills[0] / 4

    def test_what_was_loaded_is_described(self, smollm: Engine) -> None:
        assert (smollm.info.model, smollm.info.dtype) == ("SmolLM2-135M-Instruct.Q4_1.gguf", "q4_1")


def test_the_record_holds_what_was_generated(quick: pytest.Pytester, read_report: Read) -> None:
    """From a test file to energy.json: counts, phases that fill the round, latencies, settings."""
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize("n", [2])
        def test_it(energy, backend, n):
            run = energy(backend.generate, ["abc", "hello world"][:n], max_new_tokens=32, ignore_eos=True)
            assert run.result.output_tokens == 64
            assert run.energy_per_output_token_j == pytest.approx(run.energy_j / 64)
            assert run.output_tokens_per_s > 1
        """
    )
    args = ["--energy-report", "--energy-model=random:llama-tiny", "--energy-backend=transformers"]
    result = quick.runpytest(*args)
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["params"] == {"backend": "transformers", "n": 2}
    assert record["backend"]["generation"] == {
        "max_new_tokens": 32,
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "seed": 0,
        "ignore_eos": True,
        "stop_token_ids": "",
        "cache": "dynamic",
    }
    for round_ in record["rounds"]:
        assert round_["tokens"] == {"input": 14, "output": 64}
        assert round_["requests"] == 2
        prefill, decode = round_["phases"]
        assert (prefill["name"], decode["name"]) == ("prefill", "decode")
        assert abs(prefill["duration_s"] + decode["duration_s"] - round_["duration_s"]) < 1e-8
        assert prefill["duration_s"] == pytest.approx(round_["time_to_first_token_s"], abs=1e-6)
        # Thirty-one gaps lie between thirty-two tokens.
        assert round_["inter_token_latency_s"] * 31 <= decode["duration_s"]
        assert round_["inter_token_latency_s"] * 31 == pytest.approx(decode["duration_s"], rel=0.2)
        # The meter of ten watts ticks at every reading, so the longer phase is always resolved.
        assert decode["energy_j"] is not None
        truth = 10 * decode["duration_s"]
        assert decode["energy_j"] == pytest.approx(truth, abs=4 * decode["energy_u_j"] + 0.01)
        if prefill["energy_j"] is not None:
            assert prefill["energy_j"] + decode["energy_j"] == pytest.approx(round_["energy_j"])
    for name in ("energy_j", "energy_per_request_j", "net_energy_j", "mean_power_w", "peak_memory_bytes"):
        assert record["metrics"][name]["value"] is not None
    assert json.dumps(record)
