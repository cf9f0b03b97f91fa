# SPDX-License-Identifier: Apache-2.0
"""Part 6, prefill and generation of a model with a billion parameters, by several tools in the same windows.

The model is built from a configuration with random weights, so the text is meaningless and the energy is that
of the shape.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

from pytest_llenergy.devices.nvml import Session

from .machine import ROOT
from .part import Notebook, main
from .random_weights import SIZES, make_config
from .stand_in import StandInSteps
from .work import lease_board

BUDGET_S = 60.0

#: Sequences, tokens of a prompt, and new tokens.
BATCHES, PROMPT, NEW_TOKENS = (1, 8, 64), 256, 32

#: Windows of each phase and batch, and the shortest time of a prefill's window (repeated as needed).
REPEATS, PREFILL_S = 5, 0.25

#: Idle time between windows, and the range of the random time that is added to it (seconds).
REST_S, RANDOM_REST_S = 0.4, 0.1

Work = Callable[[], int]


def body(notebook: Notebook) -> None:
    """Measure J/token of prefill and generation for each batch with every tool at once."""
    with lease_board(notebook) as uuid:
        works = _make_dry_works() if notebook.dry else _make_works(notebook)
        tools = make_tools(notebook, uuid)
        # Tools that read in the background need time for their first readings.
        time.sleep(1.0)
        rows: list[list[str | float | int | None]] = []
        random = Random(1)
        for (phase, batch), work in works.items():
            if notebook.left_s < 12.0:
                notebook.find(f"{phase}, batch {batch}: out of time")
                continue
            work()
            rows += _measure(notebook, phase, batch, work, tools, random)
        for tool in tools:
            tool.close()
    notebook.table(
        "J/token of a model with a billion parameters, bfloat16",
        ["phase", "batch", "tool", "windows", "J/token", "u of a window %", "spread %", "seconds"],
        rows,
        f"Prompts of {PROMPT} tokens, {NEW_TOKENS} new tokens; prefill by input token, generate (with its "
        "prefill) by output token. "
        "All tools measure the same windows, ours the innermost; u is stated by ours alone.",
    )


def make_tools(notebook: Notebook, uuid: str) -> list[Any]:
    """Return the available tools, outermost window first; record a finding for each missing one."""
    folder = str(ROOT / "benchmarks" / "plugin" / "accuracy")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from accuracy_tools import CodeCarbon, OurWindow, PowerPolling

    made: list[Any] = []
    for name, make in (
        ("CodeCarbon", CodeCarbon),
        ("Zeus", lambda: _start_zeus(uuid)),
        ("power every 100 ms", lambda: PowerPolling(uuid)),
    ):
        try:
            made.append(make())
        except ImportError as error:
            notebook.find(f"{name}: its package is not installed ({error})")
        except Exception as error:
            # A tool that fails to start here is a finding about it; the others are still compared.
            notebook.find(f"{name}: {type(error).__name__}: {error}")
    return [*made, OurWindow(uuid)]


def _start_zeus(uuid: str) -> Any:
    """Return Zeus, which takes ``CUDA_VISIBLE_DEVICES`` for indices alone."""
    from accuracy_tools import Zeus

    session = Session()
    nvml: Any = session.module
    index = nvml.nvmlDeviceGetIndex(session.open_board(uuid).handle)
    session.close()
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": str(index)}):
        return Zeus(approximate=False)


def _measure(
    notebook: Notebook, phase: str, batch: int, work: Work, tools: list[Any], random: Random
) -> list[list[str | float | int | None]]:
    per_token: dict[str, list[float]] = {tool.name: [] for tool in tools}
    shares: dict[str, list[float]] = {tool.name: [] for tool in tools}
    seconds = []
    for _ in range(REPEATS):
        time.sleep(REST_S + random.random() * RANDOM_REST_S)
        for tool in tools:
            tool.begin()
        begin_s = time.monotonic()
        tokens = work()
        seconds.append(time.monotonic() - begin_s)
        asks = [tool.end() for tool in reversed(tools)]
        time.sleep(REST_S)
        for tool, ask in zip(tools, reversed(asks), strict=True):
            answer = ask()
            if answer.energy_j is not None:
                per_token[tool.name].append(answer.energy_j / tokens)
                if answer.u_j is not None and answer.energy_j:
                    shares[tool.name].append(answer.u_j / answer.energy_j)
    notebook.data[f"{phase}, batch {batch}"] = per_token
    rows: list[list[str | float | int | None]] = []
    for name, values in per_token.items():
        mean = fmean(values) if values else None
        spread = None
        if mean and len(values) > 1:
            spread = 100 * math.sqrt(sum((one - mean) ** 2 for one in values) / (len(values) - 1)) / mean
        u = 100 * fmean(shares[name]) if shares[name] else None
        rows.append([phase, batch, name, len(values), mean, u, spread, fmean(seconds)])
    return rows


def _make_works(notebook: Notebook) -> dict[tuple[str, int], Work]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(make_config("1b"), dtype=torch.bfloat16).eval()
    parameters = sum(one.numel() for one in model.parameters())
    notebook.find(
        f"model: {parameters / 1e9:.3g} billion parameters, transformers {_version()}, {SIZES['1b']}"
    )
    works: dict[tuple[str, int], Work] = {}
    for batch in BATCHES:
        prompts = torch.randint(10, 1000, (batch, PROMPT), device="cuda:0")

        def prefill(prompts: Any = prompts, times: int = 1) -> int:
            with torch.inference_mode():
                for _ in range(times):
                    model(prompts, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            return int(prompts.numel()) * times

        prefill()
        begin_s = time.monotonic()
        prefill(times=5)
        times = max(1, math.ceil(5 * PREFILL_S / (time.monotonic() - begin_s)))

        def generate(prompts: Any = prompts) -> int:
            with torch.inference_mode():
                model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                )
            torch.cuda.synchronize()
            return int(prompts.shape[0]) * NEW_TOKENS

        # mypy cannot infer the defaults, which bind this batch and not the last one.
        works["prefill", batch] = lambda prefill=prefill, times=times: prefill(times=times)  # type: ignore[misc]
        works["generate", batch] = generate
    return works


def _make_dry_works() -> dict[tuple[str, int], Work]:
    steps = StandInSteps()

    def work() -> int:
        steps.run(50)
        return 50

    return {("generate", 1): work}


def _version() -> str:
    import transformers

    return str(transformers.__version__)


if __name__ == "__main__":
    sys.exit(main("generation", body, BUDGET_S))
