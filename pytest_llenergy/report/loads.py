# SPDX-License-Identifier: Apache-2.0
"""The loads of one test as a table, for the terminal, Markdown and HTML."""

from __future__ import annotations

from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint, describe_max_load
from pytest_llenergy.record.quantity import format_scaled, scale_of
from pytest_llenergy.record.served import REFUSED, SHORT_LOAD
from pytest_llenergy.report.text_tables import Column, value_column, with_values

NO_RESULT = "no result"


def load_columns(curve: LoadCurve) -> list[Column[LoadPoint]]:
    """Return the columns of the points of a curve that have values, the most important first."""
    energies = (point.energy_per_output_token_j for point in curve.points)
    scale = scale_of("J", *(each for each in energies if each is not None))
    found = [each for each in curve.points if each.request_rate == curve.max_load_requests_per_s]

    def energy(each: LoadPoint) -> str:
        joules, u = each.energy_per_output_token_j, each.energy_per_output_token_u_j
        return "-" if joules is None else format_scaled(joules, u, "J", scale)

    def result(each: LoadPoint) -> str:
        # The result of a search is its full measurement, the last at that rate.
        if not found or each is not found[-1]:
            return describe_result(each)
        is_bracketed = curve.exceeded_at_requests_per_s is not None
        return "maximum" if is_bracketed else f"≥ {each.request_rate:.3g}"

    columns = [
        value_column("n", "rounds", "d"),
        Column("per token ± u", energy),
        value_column("TTFT p99 s", "time_to_first_token_p99_s"),
        value_column("TPOT p99 s", "time_per_output_token_p99_s"),
        value_column("good", "slo_attainment", ".1%"),
        value_column("good/s", "goodput_requests_per_s"),
        Column("result", result, is_number=False),
        value_column("E2E p99 s", "end_to_end_latency_p99_s"),
        value_column("done/s", "requests_per_s"),
    ]
    return with_values(columns, curve.points)


def describe_curve(curve: LoadCurve) -> str:
    """Return a title: what was searched or measured, its result, and the SLO."""
    count = len(curve.points)
    loads = f"{count} load{'s' if count != 1 else ''}"
    title = describe_max_load(curve) if curve.between is not None else loads
    return f"{title}; SLO: {curve.slo}" if curve.slo is not None else title


def describe_failure(curve: LoadCurve) -> str | None:
    """Return why the server refused a load, or else why one has no result; ``None`` if all have one."""
    failed = [each for each in curve.points if each.reason and describe_result(each) in (REFUSED, NO_RESULT)]
    first = min(failed, key=lambda point: (not point.refused, point.request_rate), default=None)
    return None if first is None else f"{first.request_rate:.3g} request/s: {first.reason}"


def describe_result(point: LoadPoint) -> str:
    """Return whether a load was within the SLO, in a word or two."""
    if point.within_slo is None:
        return SHORT_LOAD if point.short else NO_RESULT
    if point.refused:
        return REFUSED
    if point.saturated:
        return "saturated"
    if point.within_slo and point.slo_attainment is None:
        return "sustained"
    return "within" if point.within_slo else "exceeds"
