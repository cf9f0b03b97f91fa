# SPDX-License-Identifier: Apache-2.0
"""The table of a comparison in a terminal: names are whole, and no digit is lost."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.gate import suggest_remedy
from pytest_llenergy.record.comparison import RULE_VERDICTS, AppliedRule, Comparison, Verdict
from pytest_llenergy.report.verdicts import (
    LEGEND,
    format_sides,
    list_problems,
    render_verdicts,
)

LIMITS = "-73.2% … +870.8%"


def judged(name: str) -> Comparison:
    return Comparison(
        id=f"benchmarks/test_x.py::{name}",
        metric="energy_j",
        unit="J",
        verdict="regressed",
        reason="",
        base=1.735,
        head=1.629,
        ratio=1.504,
        low=0.268,
        high=9.708,
        noise=0.394,
        detectable=0.139,
    )


def lines_of(*names: str, width: int = 80) -> list[str]:
    return render_verdicts(list(map(judged, names)), width, color=False).splitlines()


def test_a_name_that_fits_is_in_the_row() -> None:
    lines = lines_of("test_m")
    assert lines[0].split() == ["test", "verdict", "base", "head", "change", "limits", "detectable"]
    assert [line for line in lines if "test_m" in line and LIMITS in line and "13.9%" in line]


@pytest.mark.parametrize("name", ["test_decode[llama-cpp-4]", "test_" + "long_" * 20 + "end[llama-cpp-4]"])
def test_a_name_that_does_not_fit_is_above_its_row(name: str) -> None:
    lines = lines_of(name, "test_m")
    assert max(map(len, lines)) <= 80
    assert name in "".join(line.strip() for line in lines)
    assert next(line for line in lines if line.endswith("13.9%")).split() == [
        "regressed",
        "1.735",
        "2.609",
        "J",
        "+50.4%",
        *LIMITS.split(),
        "13.9%",
    ]
    assert len([line for line in lines if LIMITS in line]) == 2


def test_metrics_are_named_once_there_are_several() -> None:
    both = [judged("test_m"), msgspec.structs.replace(judged("test_m"), metric="mean_power_w")]
    alone, several = (list_problems(each, "base.json") for each in (both[:1], both))
    assert "energy_j" not in alone[0]
    assert several[0].startswith("regressed: test_x.py::test_m: energy_j, mean_power_w")
    assert len(several) == 2
    for width in (80, 200):
        text = render_verdicts(both, width, color=False)
        assert "test_m: energy_j" in text
        assert "test_m: mean_power_w" in text
    custom = msgspec.structs.replace(judged("test_m"), metric="overlap", unit="1", verdict="invalid")
    assert list_problems([custom], "base.json")[0].startswith("invalid: test_x.py::test_m: overlap")
    assert format_sides(custom) == ("1.735", "2.609")


def test_a_reason_is_said_once_with_its_metrics() -> None:
    first = msgspec.structs.replace(
        judged("test_m"), verdict="inconclusive", reason="between -9% and +28%", notes=["different driver"]
    )
    second = msgspec.structs.replace(first, metric="duration_s", reason="between -2% and +7%")
    third = msgspec.structs.replace(first, metric="mean_power_w")
    lines = [
        "inconclusive: test_x.py::test_m: energy_j, mean_power_w: between -9% and +28%",
        "inconclusive: test_x.py::test_m: duration_s: between -2% and +7%",
    ]
    assert list_problems([first, second, third], "base.json")[:-1] == lines
    shown = render_verdicts([first, second, third], 200, color=False).splitlines()
    assert [f"{line}; different driver" in shown for line in lines] == [True, True]


def test_tests_without_a_metric_share_a_line() -> None:
    found = [
        Comparison(
            id=f"t.py::test_{name}", metric="wer", unit="", verdict="no value", reason="neither side has wer"
        )
        for name in "abc"
    ]
    lines = render_verdicts(found, 80, color=False).splitlines()
    assert lines == ["no value: t.py::test_a and 2 more: wer: neither side has wer", "3 no value"]
    assert list_problems(found, "base.json") == ["compared with base.json: 3 no value"]


def test_detectable_and_noise_are_explained_where_they_are_shown() -> None:
    assert lines_of("test_m")[-3:] == ["1 regressed; noise 39.4% median, 39.4% at most", *LEGEND]
    assert all(len(line) <= 80 for line in LEGEND)
    new = Comparison(id="t.py::test_m", metric="energy_j", unit="J", verdict="new", reason="it is new")
    assert LEGEND[0] not in render_verdicts([new], 80, color=False)


def test_rows_below_their_names_keep_their_colours() -> None:
    text = render_verdicts([judged("test_decode[llama-cpp-4]")], 80, color=True)
    assert re.search(r"\x1b\[1;31m +regressed", text)


@pytest.mark.parametrize("verdict", sorted(RULE_VERDICTS))
def test_what_was_corrected_is_said_with_every_verdict(verdict: Verdict) -> None:
    note = "corrected for the temperature at the start of rounds (+0.5% per K), which reduced the noise"
    found = msgspec.structs.replace(judged("test_m"), verdict=verdict, reason="why", notes=[note])
    reason = "why; " if verdict == "inconclusive" else ""
    lines = render_verdicts([found], 200, color=False).splitlines()
    assert f"{verdict}: test_x.py::test_m: {reason}{note}" in lines
    driver = msgspec.structs.replace(found, notes=["different driver (1 -> 2)"])
    assert ("different driver" in render_verdicts([driver], 200, color=False)) == (verdict != "unchanged")


RULE = AppliedRule(threshold=0.03, threshold_absolute=0.0, floor=0.01, tolerance=0.05, alpha=0.05)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"n_base": 6, "n_head": 12}, "more rounds can decide"),
        ({"n_base": 12, "n_head": 12}, "llenergy ab can decide"),
        ({"n_base": 12, "n_head": 12, "session_spread": None}, "more rounds can decide"),
        ({"reason": "regressed by itself, but others used the CPU"}, "a quieter machine can decide"),
        ({"n_base": 6, "noise": 0.08}, "a quieter machine or more rounds can decide"),
        ({"metric": "wer", "detectable": None}, "a smaller uncertainty of your metric can decide"),
        (
            {"metric": "wer", "reason": "too near zero; add an absolute threshold, such as 5%+2"},
            "an absolute threshold can decide",
        ),
        (
            {"reason": "changes below 20.0% cannot be resolved"},
            "the meters cannot resolve smaller changes",
        ),
    ],
)
def test_the_remedy_for_an_inconclusive_test_depends_on_what_makes_it_so(
    changes: dict[str, Any], remedy: str
) -> None:
    usual = {"verdict": "inconclusive", "rule": RULE, "session_spread": 0.015, "noise": 0.01}
    found = msgspec.structs.replace(judged("test_m"), **{**usual, **changes})
    assert suggest_remedy([found]) == remedy


@pytest.mark.parametrize(
    ("detectable", "shown"), [(0.139, "13.9%"), (9.99, "999.0%"), (2.7e19, ">1000%"), (None, "-")]
)
def test_detectable_change_is_short(detectable: float | None, shown: str) -> None:
    found = msgspec.structs.replace(judged("test_m"), detectable=detectable)
    row = render_verdicts([found], 200, color=False).splitlines()[2]
    assert row.split()[-1] == shown
