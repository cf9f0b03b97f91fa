# SPDX-License-Identifier: Apache-2.0
"""The loads of one test as a table, for the terminal, Markdown and HTML."""

from __future__ import annotations

from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint, describe_max_load
from pytest_llenergy.record.quantity import format_scaled, scale_of
from pytest_llenergy.record.served import REFUSED, SHORT_LOAD

NO_RESULT = "no result"

#: Headings of the table. The first names the rows.
HEADS = (
    "sent/s",
    "n",
    "done/s",
    "per token ± u",
    "TTFT p99 s",
    "TPOT p99 s",
    "E2E p99 s",
    "good",
    "good/s",
    "result",
)


def describe_curve(curve: LoadCurve) -> str:
    """Return a title: what was searched or measured, its result, and the SLO."""
    count = len(curve.points)
    title = (
        describe_max_load(curve) if curve.between is not None else f"{count} load{'s' if count != 1 else ''}"
    )
    return f"{title}; SLO: {curve.slo}" if curve.slo is not None else title


def describe_failure(curve: LoadCurve) -> str | None:
    """Return why the server refused a load, or else why one has no result; ``None`` if all have one."""
    failed = [each for each in curve.points if each.reason and describe_result(each) in (REFUSED, NO_RESULT)]
    first = min(failed, key=lambda point: (not point.refused, point.request_rate), default=None)
    return None if first is None else f"{first.request_rate:.3g} request/s: {first.reason}"


def curve_rows(curve: LoadCurve) -> list[list[str]]:
    """Return the cells of each point, by rate; ``-`` for what is missing.

    The result of a search is ``maximum`` in the row of its full measurement, the last at that rate; ``≥ 20``
    if no rate above it exceeded the SLO.
    """
    energies = (point.energy_per_output_token_j for point in curve.points)
    scale = scale_of("J", *(each for each in energies if each is not None))
    rows = [_row(point, scale) for point in curve.by_rate()]
    found = curve.max_load_requests_per_s
    places = [place for place, point in enumerate(curve.by_rate()) if point.request_rate == found]
    if places:
        is_bracketed = curve.exceeded_at_requests_per_s is not None
        rows[places[-1]][-1] = "maximum" if is_bracketed else f"≥ {found:.3g}"
    return rows


def less_important_heads(curve: LoadCurve) -> frozenset[str]:
    """Return the headings of what an SLO makes less important; none without an SLO.

    These are latencies without a limit, and requests that were answered, good or not.
    """
    slo = curve.slo
    if slo is None:
        return frozenset()
    limits = {"TTFT p99 s": slo.ttft_s, "TPOT p99 s": slo.tpot_s, "E2E p99 s": slo.e2e_s}
    return frozenset({"done/s", *(head for head, limit in limits.items() if limit is None)})


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


def _row(point: LoadPoint, scale: tuple[int, str]) -> list[str]:
    joules, u = point.energy_per_output_token_j, point.energy_per_output_token_u_j
    return [
        f"{point.request_rate:.3g}",
        str(point.rounds or "-"),
        _number(point.requests_per_s),
        format_scaled(joules, u, "J", scale) if joules is not None else "-",
        _number(point.time_to_first_token_p99_s),
        _number(point.time_per_output_token_p99_s),
        _number(point.end_to_end_latency_p99_s),
        f"{point.slo_attainment:.1%}" if point.slo_attainment is not None else "-",
        _number(point.goodput_requests_per_s),
        describe_result(point),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
