# SPDX-License-Identifier: Apache-2.0
"""Joules per token against tokens per second: energy that was saved by being slow shows here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pytest_llenergy.model.record import Record
from pytest_llenergy.report.html.cases import PER_TOKEN, Case
from pytest_llenergy.report.html.forest import COLOUR_OF
from pytest_llenergy.report.html.plot import Key, Plot
from pytest_llenergy.report.html.svg import COLOURS, Sheet, titled
from pytest_llenergy.report.verdicts import value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 300

#: An axis is logarithmic whose values differ by this factor.
FAR = 5.0


def figures_of(record: Record | None) -> tuple[float, float] | None:
    """Tokens per second and joules per token, where a test has both."""
    if record is None:
        return None
    speed, energy = record.metrics.get("output_tokens_per_s"), record.metrics.get(PER_TOKEN)
    if speed is None or energy is None or not speed.value or not energy.value or energy.value < 0:
        return None
    return speed.value, energy.value


def exchange(sheet: Sheet, cases: Sequence[Case], name: str) -> Plot | None:
    """Every test that counts tokens, its base joined to its head; ``None`` where none does."""
    pairs = [
        (case, figures_of(case.records.get("base")), figures_of(case.records.get("head"))) for case in cases
    ]
    pairs = [each for each in pairs if each[1] is not None or each[2] is not None]
    if not pairs:
        return None
    drawn, axes = sheet.figure(HEIGHT)
    tips: dict[str, list[str]] = {"from": [], "to": []}
    old, new = [], []
    for case, before, after in pairs:
        colour = COLOURS[COLOUR_OF.get(case.state, "unchanged" if case.comparisons else "head")]
        if before is not None:
            old.append((*before, colour))
            tips["from"].append(_told(case, "base", before))
        if after is not None:
            new.append((*after, colour))
            tips["to"].append(_told(case, "head" if before else "", after))
        if before is not None and after is not None:
            axes.plot([before[0], after[0]], [before[1], after[1]], color=colour, linewidth=1.2, zorder=2)
    if old:
        axes.scatter(
            [each[0] for each in old],
            [each[1] for each in old],
            s=34,
            facecolors=COLOURS["page"],
            edgecolors=[each[2] for each in old],
            gid="from",
            zorder=3,
        )
    if new:
        axes.scatter(
            [each[0] for each in new],
            [each[1] for each in new],
            s=34,
            c=[each[2] for each in new],
            gid="to",
            zorder=4,
        )
    both = [*old, *new]
    _scale(axes, "x", [each[0] for each in both])
    _scale(axes, "y", [each[1] for each in both])
    titled(axes, "tokens/s", "J/token")
    keys = [Key("ring muted", "base"), Key("dot muted", "head")] if old else []
    caption = "Down is thriftier, right is faster." + (
        " A line joins the two sides of a test." if old else ""
    )
    return Plot(
        sheet.inline(drawn, name, "Joules per token against tokens per second", tips),
        "Energy against speed",
        caption,
        keys,
    )


def _scale(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Linear with round numbers, or logarithmic where values are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = min(values), max(values)
    if high / low > FAR:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    else:
        room = max(0.1 * (high - low), 0.02 * high)
        axes.set(**{f"{which}lim": (low - room, high + room)})
        axes.locator_params(axis=which, nbins=5)


def _told(case: Case, side: str, found: tuple[float, float]) -> str:
    of = f", {side}" if side else ""
    return f"{case.id}{of}: {value(found[0], 'token/s')}, {value(found[1], 'J/token')}"
