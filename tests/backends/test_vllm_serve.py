# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` for real, on the CPU, as a server: started, counted, loaded, its prefix cache told, chats.

Needs the environment that ``LLENERGY_TEST_VLLM_PYTHON`` names, see ``tox -e vllm``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.tasks import ServedLoad, ServeParams
from pytest_llenergy.backends.traffic import Request, synthetic
from pytest_llenergy.record.timeline import Timeline

from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

pytest.importorskip("aiohttp")

PYTHON = os.environ.get("LLENERGY_TEST_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LLENERGY_TEST_VLLM_PYTHON names no Python with vLLM")

TIMEOUT_S = 280.0

#: A gibibyte of cache, no compilation, and no statistics for the maker.
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def vllm_serve(*more: str) -> str:
    """Return the command."""
    program = str(Path(__file__).parent / "servers" / "vllm_cli.py")
    fixed = ("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--enable-prompt-tokens-details")
    settings = [f"{name}={value}" for name, value in VARIABLES.items()]
    words = [
        "env",
        *settings,
        PYTHON,
        program,
        "serve",
        "{model}",
        "--host={host}",
        "--port={port}",
        *fixed,
        *more,
    ]
    return shlex.join(words)


def serve(ranks: LoadedRanks, prompts: list[str], **params: Any) -> tuple[ServedLoad, Timeline]:
    workload = ranks.prepare(prompts, ServeParams.parse({"ignore_eos": True, **params}))
    timeline = workload.run_round()
    return ServedLoad.merge(workload.results()), timeline


@pytest.fixture(scope="module")
def plain() -> Iterator[LoadedRanks]:
    """A server without its prefix cache."""
    command = vllm_serve("--no-enable-prefix-caching")
    with LoadedRanks(server.SPEC, TINY, command=command, timeout_s=TIMEOUT_S) as ranks:
        yield ranks
        pids = [pid for rank in ranks.group.ranks for pid in rank.workers]
        ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_tokens_are_those_of_transformers(plain: LoadedRanks) -> None:
    made, timeline = plain.generate(PROMPTS)
    with LoadedRanks(dtype="float32") as reference:
        expected, _ = reference.generate(PROMPTS)
    assert counts(made) == [(3, 8), (11, 8), (1, 8)]
    assert made.token_ids == expected.token_ids
    ((start_ns, border_ns),) = timeline.borders_ns
    assert timeline.start_ns == start_ns < border_ns < timeline.end_ns
    assert all(len(request.token_ns) == 8 for request in made.requests)


def test_open_and_closed_loops_serve_every_request(plain: LoadedRanks) -> None:
    for asked in ({"request_rate": 20.0}, {"concurrency": 2}):
        made, timeline = serve(plain, PROMPTS[:2], max_new_tokens=6, num_requests=6, **asked)
        assert [each.input_tokens for each in made.requests] == [3, 11] * 3
        assert made.output_tokens == 36
        assert all(len(each.token_ns) == 6 for each in made.requests)
        assert timeline.served


def names(timeline: Timeline) -> list[str]:
    return [flag.name for flag in timeline.flags]


@pytest.fixture(scope="module")
def chats() -> Iterator[ServerBackend]:
    """A server with its prefix cache, in this process, so that texts can be read."""
    backend = ServerBackend()
    model = resolve_model(str(pretrained_path(resolve_model(None))))
    backend.load(model, {"command": vllm_serve(), "timeout_s": TIMEOUT_S}, RankContext())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(pretrained_path(resolve_model(None)))


def chat(backend: ServerBackend, inputs: Sequence[str | Request], **params: Any) -> ServedLoad:
    asked = {"concurrency": 1, "num_requests": len(inputs), "endpoint": "chat", "ignore_eos": True}
    job = backend.prepare_serve(inputs, ServeParams.parse({**asked, "prefix_cache": True, **params}))
    job.before_round()
    return job.result(job.run())


def templated(tokenizer: Any, *messages: tuple[str, str]) -> str:
    said = [{"role": role, "content": text} for role, text in messages]
    text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return text


class TestChat:
    """The chat endpoint with a real model, whose chat template Hugging Face applies as well."""

    def test_prompts_are_those_of_the_chat_template(self, chats: ServerBackend, tokenizer: Any) -> None:
        told = [("system", "Answer in one sentence."), ("user", "Name three rivers of Europe. " * 40)]
        first = Request(history=tuple(told[:1]), prompt=told[1][1], output_tokens=12)
        more = [*told, ("assistant", "Rhine."), ("user", "Which of them is the longest?")]
        second = Request(history=tuple(more[:-1]), prompt=more[-1][1], output_tokens=5)
        texts = [templated(tokenizer, *told), templated(tokenizer, *more)]
        made = chat(chats, [first, second])
        assert [each.input_tokens for each in made.requests] == [
            len(tokenizer.encode(text)) for text in texts
        ]
        assert [each.output_tokens for each in made.requests] == [12, 5]
        # vLLM keeps whole blocks of tokens, and both begin alike.
        assert (made.requests[1].cached_tokens or 0) >= 128
        # The completions endpoint answers the same text with the same tokens.
        plain = chat(chats, texts, endpoint="completions", max_new_tokens=12)
        assert plain.token_ids[0] == made.token_ids[0]
        assert plain.token_ids[1][:5] == made.token_ids[1]
        assert made.texts[0] == tokenizer.decode(made.token_ids[0])

    def test_prompts_of_given_lengths_include_the_template(
        self, chats: ServerBackend, tokenizer: Any
    ) -> None:
        traffic = synthetic(count=4, input_tokens=60, input_stdev=15, output_tokens=4, seed=3)
        params = ServeParams.parse({"concurrency": 2, "num_requests": 4, "endpoint": "chat"})
        job = chats.prepare_serve(traffic, params)
        texts = [templated(tokenizer, ("user", each.prompt)) for each in job.requests]
        asked = [each.input_tokens for each in traffic]
        assert [len(tokenizer.encode(text)) for text in texts] == asked
        assert len(set(asked)) > 1
        made = job.result(job.run())
        assert sorted(each.input_tokens for each in made.requests) == sorted(map(int, filter(None, asked)))
