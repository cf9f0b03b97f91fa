# SPDX-License-Identifier: Apache-2.0
"""Part 7, inference: a billion random parameters in the backend transformers, in several starts of pytest."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from statistics import fmean

from pytest_llenergy.record.record import Metric, Record

from .part import Notebook, main, need_board, need_cuda, scratch
from .random_weights import write_model
from .session import load_report, note_variables, pytest_command, run_command
from .suite_plugin import MODELS_VARIABLE, UNTIL_VARIABLE

BUDGET_S = 105.0

#: Starts of pytest, each with the same tests.
STARTS, DRY_STARTS = 3, 1

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
    """Run the same tests in several starts of pytest and compare their energies."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch("inference"))
        if not notebook.dry:
            need_cuda()
            need_board()
        models = directory / "models"
        size = "tiny" if notebook.dry else "1b"
        write_model(size, models / size)
        starts = []
        for start in range(1, (DRY_STARTS if notebook.dry else STARTS) + 1):
            report = notebook.file(f"energy-{start}.json")
            more = {
                **note_variables(notebook.file("notes.jsonl")),
                MODELS_VARIABLE: str(models),
                UNTIL_VARIABLE: str(time.monotonic() + notebook.left_s - 5.0),
            }
            options = ["--energy-backend=transformers", f"--energy-report={report}"]
            options += ["--energy-rounds=3", "--energy-budget=2", "--energy-warmup=1"]
            options += ["--energy-lease-timeout=5"]
            name = f"start-{start}"
            done = run_command(
                notebook, name, pytest_command("suite_inference", *options), notebook.left_s - 4, more
            )
            made = load_report(report)
            if made is None:
                notebook.check(f"{name} has written a report", False, done.last)
                continue
            starts.append(list(made.records))
            _report(notebook, name, starts[-1])
    if len(starts) > 1:
        _compare_starts(notebook, starts)


def _compare_starts(notebook: Notebook, starts: list[list[Record]]) -> None:
    """Compare J/token between starts of pytest with the stated uncertainties."""
    rows: list[list[str | float | int | None]] = []
    by_id: dict[str, list[tuple[float, float]]] = {}
    for records in starts:
        for record in records:
            metric = record.metrics.get("energy_per_output_token_j")
            if metric is not None and metric.value is not None:
                by_id.setdefault(record.id, []).append((metric.value, metric.uncertainty or 0.0))
    for test, found in by_id.items():
        mean = fmean(value for value, _ in found)
        spread = max(abs(value / mean - 1) for value, _ in found)
        u = fmean(u for _, u in found) / mean
        values = ", ".join(f"{value:.4g}" for value, _ in found)
        rows.append([test.rpartition("::")[2], len(found), values, 100 * spread, 100 * u])
    notebook.table(
        "J/token in several starts of pytest",
        ["test", "starts", "J/token", "largest deviation from the mean %", "stated u of one start %"],
        rows,
    )


def _report(notebook: Notebook, name: str, records: list[Record]) -> None:
    rows: list[list[str | float | int | None]] = []
    late = 0
    for record in records:
        params = record.params
        cell = [params.get("size"), params.get("batch")]
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
    columns = ["model", "batch", titles[0], "u %", *titles[1:], "peak GiB", "flags, or the reason"]
    notebook.table(
        f"Inference, bfloat16: {name}",
        columns,
        rows,
        f"{late} more were not started: out of time." if late else "",
    )
    measured = [record for record in records if record.counts]
    failed = [record.id for record in records if record.status in ("failed", "crashed", "invalid")]
    notebook.check(
        f"{name}: every batch that was started is measured",
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


if __name__ == "__main__":
    sys.exit(main("inference", body, BUDGET_S))
