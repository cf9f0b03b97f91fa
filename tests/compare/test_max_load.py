# SPDX-License-Identifier: Apache-2.0
"""Gates on the maximum load where a search found only one of its bounds, or nothing."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from shlex import quote

import pytest

from pytest_llenergy.ab.join import SideSessions
from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import exit_code
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.model.comparison import ComparedReports
from pytest_llenergy.model.load_curve import MaxLoad
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report
from pytest_llenergy.report.store import write_report

from ..backends.servers.start import queueing
from .runs import LEVEL, record_of, report_of, round_of

NAME = "max_load_requests_per_s"
ENOUGH, TOO_MUCH = "even 20 request/s holds", "even 10 request/s does not hold"


def searched(low: float | None, high: float | None, reason: str | None = None) -> Record:
    """A record whose search ended between two rates."""
    found = MaxLoad(at_least_requests_per_s=low, below_requests_per_s=high, reason=reason)
    if low is not None and high is not None:
        found = MaxLoad(
            requests_per_s=low, u_requests_per_s=0.1, at_least_requests_per_s=low, below_requests_per_s=high
        )
    return record_of(rounds=[round_of(each, max_load=found) for each in LEVEL])


def compared(base: Report, head: Report, absolute: float = 0.0) -> ComparedReports:
    rule = Rule(threshold=0.05, threshold_absolute=absolute)
    return compare_reports(base, head, ("base", "head"), [Criterion(NAME, rule, gated=True)])


@pytest.mark.parametrize(
    ("base", "head", "verdict", "reason", "code"),
    [
        (
            searched(20, None, ENOUGH),
            searched(None, 10, TOO_MUCH),
            "regressed",
            "base holds 20 request/s, head not even 10",
            1,
        ),
        (
            searched(20, None, ENOUGH),
            searched(10.9, 11.2),
            "regressed",
            "base holds 20 request/s, head not even 11.2",
            1,
        ),
        (
            searched(8, 8.2),
            searched(32, None, ENOUGH),
            "improved",
            "head holds 32 request/s, base not even 8.2",
            0,
        ),
        (
            searched(20, None, ENOUGH),
            searched(30, 31),
            "invalid",
            f"base has no {NAME}: 6 of 6 rounds: {ENOUGH}",
            5,
        ),
        (
            searched(20, 21),
            searched(20, None, ENOUGH),
            "invalid",
            f"head has no {NAME}: 6 of 6 rounds: {ENOUGH}",
            5,
        ),
        (record_of(), record_of(), "no value", "the test has no energy.max_load", 5),
    ],
)
def test_bounds_decide_or_the_search_says_why_not(
    base: Record, head: Record, verdict: str, reason: str, code: int
) -> None:
    result = compared(report_of(base), report_of(head))
    (found,) = result.comparisons
    assert (found.verdict, found.reason, exit_code(result)) == (verdict, reason, code)


def test_bounds_that_differ_by_less_than_the_absolute_threshold_do_not_decide() -> None:
    sides = report_of(searched(20, None, ENOUGH)), report_of(searched(None, 10, TOO_MUCH))
    (found,) = compared(*sides, absolute=15).comparisons
    assert found.verdict == "invalid"


@pytest.mark.parametrize("form", ["text", "markdown", "github", "html"])
def test_a_verdict_by_bounds_is_shown_with_its_reason(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "base.json", tmp_path / "head.json"]
    for path, record in zip(paths, (searched(12.9, None, ENOUGH), searched(None, 8, TOO_MUCH)), strict=True):
        write_report(report_of(record), path)
    page = tmp_path / "page.html"
    output = [f"--format={form}", *(["-o", str(page)] if form == "html" else [])]
    assert main(["compare", *map(str, paths), f"--fail-on={NAME}:5%", *output]) == 1
    shown = page.read_text() if form == "html" else capsys.readouterr().out
    assert "base holds 12.9 request/s, head not even 8" in unescape(" ".join(shown.split()))
    # Neither an estimate nor its legend, for which there is no value.
    assert "**-**" not in shown
    assert "0 + 0" not in shown
    assert "] -," not in shown
    assert "head: base times" not in shown


def joined(*records: Record) -> Report:
    side = SideSessions("base")
    for number, record in enumerate(records, 1):
        side.add(number, [report_of(record)])
    report = side.report({name: parts[0] for name, parts in side.parts.items()}, argv=[])
    assert report is not None
    return report


def test_one_session_without_a_maximum_voids_its_side() -> None:
    """The median of the other sessions would be unchanged."""
    good, none = searched(48.2, 50), searched(None, 30, TOO_MUCH)
    result = compared(joined(*[good] * 6), joined(good, good, good, none, good, good))
    (found,) = result.comparisons
    assert (found.verdict, exit_code(result)) == ("invalid", 5)
    assert found.reason == f"head has no {NAME}: 6 of 36 rounds: {TOO_MUCH}"
    assert compared(joined(good, good), joined(good, good)).comparisons[0].verdict == "unchanged"
    # Every session of the head is below what the base holds.
    (lost,) = compared(joined(good, good), joined(none, searched(31, 32))).comparisons
    assert lost.verdict == "regressed"


@pytest.mark.slow
def test_a_server_that_collapses_fails_its_gate(quick: pytest.Pytester) -> None:
    pytest.importorskip("aiohttp")
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            energy.max_load(
                backend.serve, ["abc"], slo=slo(ttft=0.2, attainment=0.9), max_new_tokens=3,
                between=(20, 30), tolerance=1.0, num_requests=16)
        """
    )
    # The same command on both sides: another one is another workload.
    program = Path(quick.path / "serve.sh")
    command = f"--energy-server-command=sh {program} {{port}}"
    for name, service in (("base.json", 0.01), ("head.json", 0.8)):
        server = queueing(slots=4, service=service)
        program.write_text(f"exec {server.replace(quote('{port}'), '$1')}\n")
        arguments = ["--energy-backend=server", command, f"--energy-report={name}"]
        gate = [] if name == "base.json" else ["--energy-compare=base.json", f"--energy-fail-on={NAME}:5%"]
        result = quick.runpytest(*arguments, *gate)
        assert result.ret == (1 if gate else 0)
    result.stdout.fnmatch_lines(
        [f"*energy_gate: {NAME} regressed: base holds 30 request/s, head not even 20"]
    )
    # The reason stands below the table too.
    result.stdout.fnmatch_lines(["regressed: *", "  base holds 30 request/s, head not even 20"])
    assert main(["compare", "base.json", "head.json", f"--fail-on={NAME}:5%"]) == 1
