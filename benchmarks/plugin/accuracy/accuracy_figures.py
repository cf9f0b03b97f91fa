# SPDX-License-Identifier: Apache-2.0
"""Compute errors from the tools' readings and the truth, and render them as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from accuracy_world import DURATIONS_S, FULL, PART

TOOLS = (
    "pytest-llenergy, rounds",
    "pytest-llenergy, window",
    "Zeus",
    "Zeus, approx_instant_energy",
    "CodeCarbon",
    "power every 100 ms",
)
OURS = TOOLS[:2]

SENSOR_NAMES = {FULL: "samples all the time", PART: "samples 25 of 100 ms"}

Figures = dict[str, Any]
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def compute_errors(entry: Mapping[str, Any]) -> Figures:
    """Return the errors of one tool for one sensor and duration, relative to the truth.

    ``error_of_all`` compares one value for all readings with the truth: the plugin's median over rounds with
    the median truth, otherwise the mean with the mean truth. ``within_2u`` counts the readings whose error is
    at most twice the standard uncertainty stated by the tool.
    """
    readings = entry["readings"]
    with_result = [each for each in readings if each["energy_j"] is not None]
    result: Figures = {"n": len(readings), "with_result": len(with_result)}
    if not with_result:
        return {**result, "reason": readings[0]["reason"]}
    errors = [each["energy_j"] / each["true_j"] - 1 for each in with_result]
    truths_j = [each["true_j"] for each in with_result]
    result |= {
        "mean_error": fmean(map(abs, errors)),
        "max_error": max(map(abs, errors)),
        "bias": fmean(errors),
        "error_of_all": fmean(each["energy_j"] for each in with_result) / fmean(truths_j) - 1,
        "zeros": sum(each["energy_j"] == 0 for each in with_result),
    }
    known = [each for each in with_result if each["u_j"] is not None]
    if known:
        result["within_2u"] = sum(abs(each["energy_j"] - each["true_j"]) <= 2 * each["u_j"] for each in known)
        result["u"] = fmean(each["u_j"] / each["true_j"] for each in known)
    if entry.get("value_j") is not None:
        truth_j = median(truths_j)
        result["error_of_all"] = entry["value_j"] / truth_j - 1
        result["u_of_all"] = entry["value_u_j"] / truth_j if entry["value_u_j"] is not None else None
    return result


def compute_all_errors(results: Mapping[str, Results]) -> dict[str, dict[str, dict[str, Figures]]]:
    """Return the errors by sensor, work (seconds or loop) and tool."""
    return {
        sensor: {
            work: {tool: compute_errors(by_tool[tool]) for tool in TOOLS if tool in by_tool}
            for work, by_tool in by_work.items()
        }
        for sensor, by_work in results.items()
    }


def markdown(found: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> str:
    """Render three tables: single readings, all together, and whether the stated uncertainties hold."""
    repeats = max(each["n"] for by_time in found.values() for by in by_time.values() for each in by.values())
    parts = [
        "Error of a single reading, mean / largest:",
        _table(found, TOOLS, _single),
        f"Error of {repeats} readings together (rounds: median, otherwise mean):",
        _table(found, TOOLS, _of_all),
        "Readings whose truth lies within twice the stated standard uncertainty (its mean), and "
        "the same of the median of the rounds:",
        _table(found, OURS, _within),
    ]
    return "\n\n".join(parts) + "\n"


def loops_markdown(found: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> str:
    """Render the errors of windows in loops: of single readings, of their sum, and whether 2u holds."""
    tools = [tool for tool in TOOLS if tool != OURS[0]]
    titles = [*tools, *(f"{tool}: all together" for tool in tools), "within 2u"]
    lines = [f"| sensor | loop | {' | '.join(titles)} |", f"| --- | --- |{' ---: |' * len(titles)}"]
    for sensor, by_loop in found.items():
        for loop, by_tool in by_loop.items():
            cells = [_single(by_tool[tool]) for tool in tools] + [_of_all(by_tool[tool]) for tool in tools]
            cells.append(_within(by_tool[OURS[1]]))
            lines.append(f"| {SENSOR_NAMES[sensor]} | {loop} | {' | '.join(cells)} |")
    return "Windows in a loop:\n\n" + "\n".join(lines) + "\n"


def _table(
    found: Mapping[str, Mapping[str, Mapping[str, Figures]]],
    tools: Sequence[str],
    cell: Callable[[Figures], str],
) -> str:
    lines = [
        "| sensor | work | " + " | ".join(tools) + " |",
        "| --- | ---: |" + " ---: |" * len(tools),
    ]
    for sensor, by_time in found.items():
        for seconds in (f"{each:g}" for each in DURATIONS_S):
            cells = " | ".join(cell(by_time[seconds][tool]) for tool in tools)
            lines.append(f"| {SENSOR_NAMES[sensor]} | {float(seconds) * 1e3:g} ms | {cells} |")
    return "\n".join(lines)


def percent(share: float, *, sign: bool = False) -> str:
    """Format a share as a percentage with its significant digits."""
    digits = 0 if abs(share) >= 0.1 else 1 if abs(share) >= 0.01 else 2
    return f"{share * 100:{'+' if sign else ''}.{digits}f} %"


def _single(each: Figures) -> str:
    if not each["with_result"]:
        return "no result"
    silent = each["n"] - each["with_result"]
    notes = [f"{silent} without result"] if silent else []
    notes += [f"{each['zeros']} zeros"] if each["zeros"] else []
    text = f"{percent(each['mean_error'])} / {percent(each['max_error'])}"
    return text + (f" ({', '.join(notes)})" if notes else "")


def _of_all(each: Figures) -> str:
    return percent(each["error_of_all"], sign=True) if each["with_result"] else "no result"


def _within(each: Figures) -> str:
    if not each["with_result"]:
        return "no result"
    text = f"{each['within_2u']} of {each['with_result']} (u {percent(each['u'])})"
    if each.get("u_of_all") is not None:
        holds = "within" if abs(each["error_of_all"]) <= 2 * each["u_of_all"] else "not within"
        text += (
            f"; median {percent(each['error_of_all'], sign=True)}, {holds} 2 × {percent(each['u_of_all'])}"
        )
    return text
