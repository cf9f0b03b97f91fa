# SPDX-License-Identifier: Apache-2.0
"""Part 6, inference: transformers with 0.1, 1 and 7 billion random parameters, and the cost of metering."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from pytest_llenergy.record.record import Metric, Record

from . import metering, stand_in
from .part import Notebook, main, need_board, need_cuda, scratch
from .random_weights import SIZES, write_model
from .results import Line
from .session import load_report, note_variables, pytest_command, run_command
from .suite_plugin import MODELS_VARIABLE, UNTIL_VARIABLE

BUDGET_S = 86.0

#: Pairs of spans with and without metering.
PAIRS = 4

#: Smallest acceptable throughput with metering over that without.
MIN_RATIO = 0.99

#: Metrics in the table, with the unit shown there and the factor to it.
SHOWN = (
    ("energy_per_output_token_j", "J/token", 1.0),
    ("prefill_energy_j", "prefill J", 1.0),
    ("decode_energy_j", "decode J", 1.0),
    ("mean_power_w", "W", 1.0),
    ("output_tokens_per_s", "token/s", 1.0),
    ("time_to_first_token_s", "TTFT ms", 1e3),
    ("inter_token_latency_s", "ITL ms", 1e3),
)


def body(notebook: Notebook) -> None:
    """Measure the cost of metering, then as many models, modes and batches as time allows."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch("inference"))
        if notebook.dry:
            with stand_in.board(directory / "board") as uuid:
                _check_metering(notebook, "cpu", uuid, 2)
        else:
            need_cuda()
            _check_metering(notebook, "cuda:0", need_board(), PAIRS)
        models = directory / "models"
        for size in ("tiny",) if notebook.dry else [name for name in SIZES if name != "tiny"]:
            write_model(size, models / size)
        report = notebook.file("energy.json")
        more = {
            **note_variables(notebook.file("notes.jsonl")),
            MODELS_VARIABLE: str(models),
            UNTIL_VARIABLE: str(time.monotonic() + notebook.left_s - 5.0),
        }
        options = ["--energy-backend=transformers", "--energy-isolation=run", f"--energy-report={report}"]
        options += ["--energy-rounds=3", "--energy-budget=2", "--energy-warmup=1", "--energy-lease-timeout=5"]
        done = run_command(
            notebook, "pytest", pytest_command("suite_inference", *options), notebook.left_s - 4, more
        )
        made = load_report(report)
    if made is None:
        notebook.check("pytest has written a report", False, done.last)
        return
    _report(notebook, list(made.records))
    _plot_power(notebook, list(made.records))


def _check_metering(notebook: Notebook, device: str, uuid: str, pairs: int) -> None:
    try:
        found = metering.measure_ratio(notebook, device, uuid, pairs)
    except Exception as error:
        # Record a failed check so that the results so far are kept.
        notebook.check("throughput with metering", False, f"{type(error).__name__}: {error}")
        return
    notebook.data["metered_over_not"] = {"ratio": found.value, "u": found.u, "pairs": found.pairs}
    detail = f"{found.value:.4f} ± {found.u:.4f} of the throughput without ({found.pairs} pairs)"
    low, high = found.value - 2 * found.u, found.value + 2 * found.u
    known = True if low > MIN_RATIO else False if high < MIN_RATIO else None
    notebook.check(f"throughput with metering is above {MIN_RATIO:.1%} of that without", known, detail)


def _report(notebook: Notebook, records: list[Record]) -> None:
    rows: list[list[str | float | int | None]] = []
    late = 0
    for record in records:
        params = record.params
        cell = [params.get("size"), params.get("mode"), params.get("batch")]
        if record.status == "skipped" and "out of time" in (record.reason or ""):
            late += 1
            continue
        if not record.counts:
            reason = (record.reason or record.status).splitlines()
            rows.append([*cell, *([None] * (len(SHOWN) + 2)), reason[-1][:160] if reason else record.status])
            continue
        energy = record.metrics.get("energy_per_output_token_j")
        flags = {flag.name for flag in record.flags} | {
            flag.name for one in record.rounds for flag in one.flags
        }
        shown = [_scaled(record.metrics.get(name), factor) for name, _, factor in SHOWN]
        peak = _scaled(record.metrics.get("peak_memory_bytes"), 2**-30)
        rows.append([*cell, shown[0], _relative(energy), *shown[1:], peak, ", ".join(sorted(flags))])
    titles = [title for _, title, _ in SHOWN]
    columns = ["model", "mode", "batch", titles[0], "u %", *titles[1:], "peak GiB", "flags, or the reason"]
    notebook.table(
        "Inference, bfloat16", columns, rows, f"{late} more were not started: out of time." if late else ""
    )
    measured = [record for record in records if record.counts]
    failed = [record.id for record in records if record.status in ("failed", "crashed", "invalid")]
    notebook.check(
        "every model, mode and batch that was started is measured",
        bool(measured) and not failed,
        f"{len(measured)} measured, {late} not started"
        + (f"; failed: {', '.join(failed)[:400]}" if failed else ""),
    )


def _scaled(metric: Metric | None, factor: float) -> float | None:
    return None if metric is None or metric.value is None else metric.value * factor


def _relative(metric: Metric | None) -> float | None:
    if metric is None or not metric.value or metric.uncertainty is None:
        return None
    return 100 * metric.uncertainty / metric.value


def _plot_power(notebook: Notebook, records: list[Record]) -> None:
    """Plot the power of one generation per model, in the largest batch that was measured."""
    lines: dict[str, Line] = {}
    for record in records:
        if record.power_trace is None or record.params.get("mode") != "sdpa":
            continue
        label = f"{record.params.get('size')}, batch {record.params.get('batch')}"
        for domain in record.power_trace.by_domain.values():
            edges, power = domain.edges_s, domain.power_w
            x, y = list(edges), [*power, power[-1]]
            lines[str(record.params.get("size"))] = Line(label=label, x=x, y=y, style="steps")
    if lines:
        notebook.figure("Power of the median round", "s from its start", "W", list(lines.values()))


if __name__ == "__main__":
    sys.exit(main("inference", body, BUDGET_S))
