# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server with the real model: counts, repeated prompts, a load in both loops.

SmolLM2: "hello world" is two tokens, "The capital of France is a" six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.model import resolve
from pytest_llenergy.backends.served import ServedLoad, ServeParams
from pytest_llenergy.backends.server import spec as server
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.workload import task_workload

from .servers.start import llama
from .test_generation import Engine

pytest.importorskip("aiohttp")
pytest.importorskip("xllamacpp", reason="no module xllamacpp: pip install xllamacpp")

Read = Callable[..., dict[str, Any]]

PROMPTS = ["hello world", "The capital of France is a"]


@pytest.fixture(scope="module")
def smollm() -> Iterator[Engine]:
    engine = Engine(server.SPEC, resolve(None), {"command": llama()})
    yield engine
    engine.pool.close()


def serve(engine: Engine, **params: Any) -> tuple[ServedLoad, RoundTimeline]:
    asked = ServeParams.of({"max_new_tokens": 6, "ignore_eos": True, **params})
    workload = task_workload(engine.group, PROMPTS, asked, 300)
    timeline = workload.run_round()
    return ServedLoad.merge(workload.results()), timeline


def test_lengths_are_those_counted_by_hand(smollm: Engine) -> None:
    made, timeline = smollm.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
    assert [(each.input_tokens, each.output_tokens) for each in made.requests] == [(2, 5), (6, 5)]
    alone = [smollm.generate([prompt], max_new_tokens=5, ignore_eos=True)[0] for prompt in PROMPTS]
    assert made.texts == [each.texts[0] for each in alone]
    assert made.texts[0] != made.texts[1]
    ((start_ns, border_ns),) = timeline.borders_ns
    assert timeline.start_ns == start_ns < border_ns < timeline.end_ns


def test_the_end_of_sequence_is_heeded_or_ignored(smollm: Engine) -> None:
    question = "What is the capital of France? Answer in one word."
    chat = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"]
    heeded, timeline = smollm.generate(chat, max_new_tokens=30)
    ignored, _ = smollm.generate(chat, max_new_tokens=30, ignore_eos=True)
    assert "Paris" in heeded.texts[0]
    assert heeded.output_tokens < 30
    assert ignored.output_tokens == 30
    # The token that ended it has no text, and has come all the same.
    (request,) = timeline.requests
    assert len(request.token_ns) == heeded.output_tokens


def test_a_repeated_prompt_is_computed_again(smollm: Engine) -> None:
    """The server says how many tokens it has not computed; with its own default all but one."""
    prompt = ["one two three four five six seven eight nine ten " * 4]
    asked = {"max_new_tokens": 1, "concurrency": 1, "num_requests": 1}
    for keeps, hit in ((False, False), (False, False), (True, True)):
        params = ServeParams.of({**asked, "prefix_cache": keeps})
        workload = task_workload(smollm.group, prompt, params, 300)
        assert workload.run_round().flags == ()
        cached = ServedLoad.merge(workload.results()).cached_tokens
        assert cached is not None
        assert (cached > 0) is hit


def test_sampling_repeats_with_its_seed(smollm: Engine) -> None:
    def sample(seed: int) -> list[str]:
        return smollm.generate(["hello"], max_new_tokens=12, do_sample=True, seed=seed)[0].texts

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_both_loops_serve_every_request(smollm: Engine) -> None:
    for asked in ({"request_rate": 20.0}, {"concurrency": 2}):
        made, timeline = serve(smollm, num_requests=6, **asked)
        assert [each.input_tokens for each in made.requests] == [2, 6, 2, 6, 2, 6]
        assert made.output_tokens == 36
        assert all(len(each.token_ns) == 6 for each in made.requests)
        assert made.texts[0] == made.texts[2] == made.texts[4]
        assert timeline.served


def test_what_was_loaded_is_described(smollm: Engine) -> None:
    assert smollm.info.model == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm.info.options["server"] == "llama.cpp"
    assert smollm.info.options["api_model"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm.info.options["prefix_cache"] == "asked off in each request"


def test_the_cpu_time_of_the_server_is_that_of_the_round(smollm: Engine) -> None:
    """Nearly all of the work is the server's; the client alone would have next to none."""
    _, timeline = smollm.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)
    assert timeline.cpu_time_s > 0.1
    assert smollm.group.ranks[0].workers != []
