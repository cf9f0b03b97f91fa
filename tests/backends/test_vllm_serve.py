# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` for real, on the CPU, as a server: started, counted, loaded, its prefix cache told.

Needs the environment that ``LLENERGY_TEST_VLLM_PYTHON`` names, see ``tox -e vllm``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends import server
from pytest_llenergy.backends.tasks import ServedLoad, ServeParams
from pytest_llenergy.model.timeline import Timeline

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


def test_the_server_is_described(plain: LoadedRanks) -> None:
    options = plain.info.options
    assert options["server"] == "vLLM"
    assert plain.info.version.startswith("0.")
    assert options["attached"] is False
    assert options["prefix_cache"] == "as configured by the server"


def test_tokens_are_those_of_transformers(plain: LoadedRanks) -> None:
    made, timeline = plain.generate(PROMPTS)
    with LoadedRanks(dtype="float32") as reference:
        expected, _ = reference.generate(PROMPTS)
    assert counts(made) == [(3, 8), (11, 8), (1, 8)]
    assert made.token_ids == expected.token_ids
    ((start_ns, border_ns),) = timeline.borders_ns
    assert timeline.start_ns == start_ns < border_ns < timeline.end_ns
    assert all(len(request.token_ns) == 8 for request in made.requests)


def test_a_stop_token_ends_a_request(plain: LoadedRanks) -> None:
    free, _ = plain.generate(PROMPTS[:1])
    stop = free.token_ids[0][2]
    stopped, _ = plain.generate(PROMPTS[:1], stop_token_ids=[stop])
    assert stopped.token_ids == [free.token_ids[0][: free.token_ids[0].index(stop) + 1]]


def test_open_and_closed_loops_serve_every_request(plain: LoadedRanks) -> None:
    for asked in ({"request_rate": 20.0}, {"concurrency": 2}):
        made, timeline = serve(plain, PROMPTS[:2], max_new_tokens=6, num_requests=6, **asked)
        assert [each.input_tokens for each in made.requests] == [3, 11] * 3
        assert made.output_tokens == 36
        assert all(len(each.token_ns) == 6 for each in made.requests)
        assert timeline.served


def test_a_repeated_prompt_is_computed_again(plain: LoadedRanks) -> None:
    for _ in range(2):
        made, timeline = serve(plain, ["y" * 300], max_new_tokens=1, concurrency=1, num_requests=1)
        assert made.cached_tokens == 0
        assert timeline.flags == ()


def test_cpu_time_of_the_server_counts_in_the_round(plain: LoadedRanks) -> None:
    """The core of vLLM is a process of its own, below the server that was started."""
    _, timeline = plain.generate(["y" * 300], max_new_tokens=30)
    (rank,) = plain.group.ranks
    family = psutil.Process(rank.workers[0]).children(recursive=True)
    assert family
    assert timeline.cpu_time_s > 0.05


def test_hits_in_the_prefix_cache_are_told(plain: LoadedRanks) -> None:
    """By default vLLM keeps prefixes. Their hits make a round invalid, unless the test allows them."""
    plain.close()
    asked = {"max_new_tokens": 1, "concurrency": 1, "num_requests": 1}
    with LoadedRanks(server.SPEC, TINY, command=vllm_serve(), timeout_s=TIMEOUT_S) as ranks:
        serve(ranks, ["y" * 300], **asked)
        made, timeline = serve(ranks, ["y" * 300], **asked)
        allowed, without = serve(ranks, ["y" * 300], prefix_cache=True, **asked)
        ranks.close()
    assert (made.cached_tokens or 0) >= 128
    assert [(flag.name, flag.severity) for flag in timeline.flags] == [("prefix-cache", "invalid")]
    assert (allowed.cached_tokens or 0) >= 128
    assert without.flags == ()
