# SPDX-License-Identifier: Apache-2.0
"""Gates on the maximum load: one result of each search, or only one of its bounds, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec
import pytest

from pytest_llenergy.ab.join import SideSessions
from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import Estimator, compare_reports, estimate_once
from pytest_llenergy.compare.gate import exit_code, suggest_remedy
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.record.load_curve import MaxLoad
from pytest_llenergy.record.record import Flag, Record
from pytest_llenergy.record.report import Report

from ..backends.servers.start import queueing
from ..conftest import TEN_WATTS
from .runs import LEVEL, record_of, report_of, round_of

NAME = "max_load_requests_per_s"
ENOUGH, TOO_MUCH = "even 20 request/s holds", "even 10 request/s does not hold"


#: Rounds of the full measurement of a maximum that takes longer than the budget of a test.
DEFAULT_ROUNDS = 3


def searched(
    low: float | None, high: float | None, reason: str | None = None, *, u: float = 0.1, **of_rounds: Any
) -> Record:
    """A record whose search ended between two rates."""
    found = MaxLoad(at_least_requests_per_s=low, below_requests_per_s=high, reason=reason)
    if low is not None and high is not None:
        found = MaxLoad(
            requests_per_s=low, u_requests_per_s=u, at_least_requests_per_s=low, below_requests_per_s=high
        )
    joules = LEVEL[: of_rounds.pop("count", DEFAULT_ROUNDS)]
    return record_of(rounds=[round_of(each, max_load=found, **of_rounds) for each in joules])


def compared(
    base: Report, head: Report, absolute: float = 0.0, estimator: Estimator = estimate_once
) -> ComparedReports:
    criterion = Criterion(NAME, Rule(threshold=0.05, threshold_absolute=absolute), gated=True)
    return compare_reports(base, head, ("base", "head"), [criterion], estimator=estimator)


def one(base: Record, head: Record, **how: Any) -> Comparison:
    (found,) = compared(report_of(base), report_of(head), **how).comparisons
    return found


@pytest.mark.parametrize("count", [1, DEFAULT_ROUNDS, 6])
@pytest.mark.parametrize(
    ("low", "high", "verdict", "code"),
    [(17, 17.4, "regressed", 1), (20, 20.4, "unchanged", 0), (19.2, 19.6, "inconclusive", 0)],
)
def test_one_search_on_each_side_decides_whatever_its_number_of_rounds(
    low: float, high: float, verdict: str, code: int, count: int
) -> None:
    result = compared(report_of(searched(20, 20.4)), report_of(searched(low, high, count=count)))
    (found,) = result.comparisons
    assert (found.verdict, exit_code(result)) == (verdict, code)
    assert (found.n_base, found.n_head, found.noise) == (1, 1, None)
    assert found.ratio == pytest.approx(low / 20)
    # The uncertainties of both searches, and 1.5 % of each session.
    width = 1.645 * math.hypot(0.1, 0.1, 0.015 * 20, 0.015 * low) / 20
    assert found.low == pytest.approx(low / 20 - width, rel=1e-4)
    assert found.high == pytest.approx(low / 20 + width, rel=1e-4)
    back = one(searched(low, high), searched(20, 20.4))
    assert back.verdict == ("improved" if verdict == "regressed" else "unchanged")


def test_a_search_beside_other_work_decides_nothing() -> None:
    busy = Flag(name="contended", severity="note", detail="other processes used 2 cores")
    sides = searched(20, 20.4), searched(10, 10.2, flags=[busy])
    found = one(*[msgspec.structs.replace(each, devices=["cpu"], meters=[]) for each in sides])
    assert found.verdict == "inconclusive"
    assert found.reason.startswith(
        "regressed by itself, but others used the CPU during 3 of 3 rounds of head (llenergy ab"
    )
    assert suggest_remedy([found]) == "a quieter machine can decide"


def in_sessions(*lows: float) -> list[Record]:
    return [searched(each, each * 1.02, u=each * 0.2) for each in lows]


@pytest.mark.parametrize(("change", "verdict"), [(0.85, "regressed"), (1.0, "unchanged"), (1.2, "improved")])
def test_sessions_of_ab_are_the_sample(change: float, verdict: str) -> None:
    """Their scatter shows how uncertain a search is, and it differs from what a single one states."""
    lows = (20.0, 20.2, 19.9, 20.1, 20.0, 19.8, 20.0, 20.1)
    base, head = joined(*in_sessions(*lows)), joined(*in_sessions(*[each * change for each in lows]))
    (found,) = compared(base, head).comparisons
    assert (found.verdict, found.n_base, found.n_head) == (verdict, 8, 8)


def test_searches_of_sessions_that_scatter_are_not_as_certain_as_their_rounds_are_many() -> None:
    base, head = (7.81, 8.88, 9.31, 4.30, 7.40), (9.31, 9.0, 7.81, 8.1, 8.88)
    (found,) = compared(joined(*in_sessions(*base)), joined(*in_sessions(*head))).comparisons
    assert (found.verdict, found.n_base) == ("inconclusive", 5)
    assert found.low is not None
    assert found.low < 0.9 < 1.4 < (found.high or 0.0)


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [((20, 20.2), (16, 16.1), "regressed"), ((20, 20.2), (14, 18), "inconclusive")],
)
def test_two_or_three_sessions_decide_if_they_agree(
    base: Sequence[float], head: Sequence[float], verdict: str
) -> None:
    sides = [joined(*[searched(each, each * 1.02) for each in lows]) for lows in (base, head)]
    (found,) = compared(sides[0], sides[1]).comparisons
    assert (found.verdict, found.n_base, found.n_head) == (verdict, 2, 2)


@pytest.mark.parametrize(
    ("base", "head", "verdict", "reason"),
    [
        (
            searched(20, None, ENOUGH),
            searched(10, 11),
            "invalid",
            f"base has no {NAME}: 3 of 3 rounds: {ENOUGH}",
        ),
        (
            searched(20, 21),
            searched(None, 10, TOO_MUCH),
            "invalid",
            f"head has no {NAME}: 3 of 3 rounds: {TOO_MUCH}",
        ),
        (record_of(), record_of(), "no value", "the test has no energy.max_load"),
    ],
)
def test_a_search_without_a_maximum_says_why_and_fails_the_gate(
    base: Record, head: Record, verdict: str, reason: str
) -> None:
    result = compared(report_of(base), report_of(head))
    (found,) = result.comparisons
    assert (found.verdict, found.reason, exit_code(result)) == (verdict, reason, 5)


def joined(*records: Record) -> Report:
    side = SideSessions()
    for number, record in enumerate(records, 1):
        side.add(number, report_of(record))
    return side.join()


def test_one_session_without_a_maximum_voids_its_side() -> None:
    """The median of the other sessions would be unchanged."""
    good, none = searched(48.2, 50), searched(None, 30, TOO_MUCH)
    result = compared(joined(*[good] * 6), joined(good, good, good, none, good, good))
    (found,) = result.comparisons
    assert (found.verdict, exit_code(result)) == ("invalid", 5)
    assert found.reason == f"head has no {NAME}: 3 of 18 rounds: {TOO_MUCH}"
    assert compared(joined(good, good), joined(good, good)).comparisons[0].verdict == "unchanged"


@pytest.mark.slow
def test_a_server_that_collapses_fails_its_gate(pytester: pytest.Pytester) -> None:
    pytest.importorskip("aiohttp")
    # Like work on a GPU alone, the search is not held back by what else this machine does.
    pytester.makeconftest(TEN_WATTS.replace("cpu:ten", "gpu:ten"))
    pytester.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            energy.max_load(
                backend.serve, ["abc"], slo=slo(ttft=0.3, attainment=0.9), max_new_tokens=3,
                between=(4, 80), tolerance=0.5, num_requests=32)
        """
    )
    # The same command on both sides: another one is another workload.
    program = Path(pytester.path / "serve.sh")
    command = f"--energy-server=sh {program} {{port}}"
    for name, service in (("base.json", 0.1), ("head.json", 0.2)):
        server = queueing(slots=4, service=service)
        program.write_text(f"exec {server.replace(quote('{port}'), '$1')}\n")
        arguments = [
            "--energy-backend=server",
            command,
            "--energy-meter=ten-watts",
            f"--energy-report={name}",
        ]
        gate = [] if name == "base.json" else ["--energy-compare=base.json", f"--energy-fail-on={NAME}:5%"]
        result = pytester.runpytest(*arguments, *gate)
        assert result.ret == (1 if gate else 0)
    result.stdout.re_match_lines([rf"energy_gate: {NAME} regressed, .*: -\d+\.\d%, at least -\d+\.\d%"])
    assert main(["compare", "base.json", "head.json", f"--fail-on={NAME}:5%"]) == 1
