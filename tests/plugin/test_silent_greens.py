# SPDX-License-Identifier: Apache-2.0
"""What would let a regression pass: each way is named and, under a gate, ends with a non-zero exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.record import Record, Tokens
from pytest_llenergy.record.report import Report, encode_report

from ..compare.runs import record_of, report_of, round_of, scaled
from .inner import COMPARE, FAIL, ONE, edit

#: The second test of the baseline, which needs twice the power on the head.
B = ONE.replace("test_a", "test_b")
WINDOW = "import time\ndef test_b(energy_meter):\n    with energy_meter('x'):\n        time.sleep(0.05)\n"
EDITED = "*mean_power_w is not comparable: the benchmark itself changed: llenergy compare *"


#: How a test that is not in the run is named.
MISSING = "in base.json but not compared: test_b (not in this run)"


def lost(why: str, remedy: str = "measure them or deselect them") -> str:
    return f"ERROR: 1 test of base.json not compared: test_b ({why}); {remedy}"


@pytest.fixture
def two(quick_suite: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester with a baseline of two tests, the first of which always passes its gate."""
    quick_suite.makepyfile(test_a=ONE, test_b=B)
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    return quick_suite


@pytest.mark.parametrize(
    ("code", "options", "status", "line"),
    [
        (B + "    pytest.skip('later')\n", [FAIL], 1, lost("skipped")),
        (B.replace("def", "@pytest.mark.xfail\ndef") + "    assert 0\n", [FAIL], 1, lost("xfailed")),
        (B.replace("def", "@pytest.mark.skip\ndef"), [FAIL], 1, lost("skipped")),
        (B + "    pytest.skip('later')\n", [FAIL, "--energy-inconclusive=pass"], 1, lost("skipped")),
        ("", [FAIL], 0, MISSING),
        (B, [FAIL, "-k", "test_a"], 0, MISSING),
        ("", [FAIL, "--energy-inconclusive=pass"], 0, MISSING),
        (
            "",
            [FAIL, "--energy-inconclusive=fail"],
            1,
            lost("not in this run", "--energy-inconclusive=warn accepts this"),
        ),
        (
            "def test_b(): pass",
            [FAIL, "--deselect=test_a.py"],
            1,
            "*; nothing was compared",
        ),
        ("", ["-q"], 0, MISSING),
        (WINDOW, [FAIL], 1, "*is invalid: head has only windows of energy_meter and no rounds*"),
        (B.replace("0.05", "0.04"), [FAIL], 1, EDITED),
        (B.replace("def", "@(lambda test: test)\ndef"), [FAIL], 1, EDITED),
        (B.replace("energy(time", "# Sleep.\n    energy( time"), [FAIL], 0, None),
        (
            B,
            ["--energy-fail-on=mean_power_w:3%+1kW"],
            1,
            "*nothing was gated by mean_power_w: the abs*",
        ),
        (
            B,
            ["--energy-fail-on=output_tokens_per_s:3%"],
            1,
            "*nothing was gated by * no test has it (*)",
        ),
    ],
)
def test_a_gate_that_does_not_cover_a_test_says_so(
    two: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    options: list[str],
    status: int,
    line: str | None,
) -> None:
    monkeypatch.setenv("WATTS", "10")
    two.makepyfile(test_b=code)
    result = two.runpytest(COMPARE, *options)
    assert result.ret == status
    if line is None:
        result.stdout.no_fnmatch_line("*not compared*")
    else:
        result.stdout.fnmatch_lines([line])


@pytest.mark.parametrize(
    ("code", "options", "status", "line"),
    [
        ("import pytest\npytest.importorskip('no_such_library')\n", [], 1, lost("its file was skipped")),
        ("", ["--ignore=gpu/test_b.py"], 0, MISSING),
        ("", ["test_a.py"], 0, MISSING),
    ],
)
def test_a_file_that_its_folder_hides_was_skipped(
    quick_suite: pytest.Pytester, code: str, options: list[str], status: int, line: str
) -> None:
    quick_suite.makepyfile(**{"test_a": ONE, "gpu/test_b": B})
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    quick_suite.makepyfile(**{"gpu/conftest": code})
    result = quick_suite.runpytest(COMPARE, FAIL, *options)
    result.stdout.fnmatch_lines([line])
    assert result.ret == status


@pytest.mark.parametrize("option", ["--energy-floor=50%", "--energy-compare=none.json"])
def test_a_gate_that_means_nothing_is_refused(base: pytest.Pytester, option: str) -> None:
    result = base.runpytest(COMPARE, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert option in result.stderr.str()


def test_the_first_benchmarks_pass(base: pytest.Pytester) -> None:
    edit("base.json", lambda report: report["records"].clear())
    result = base.runpytest(COMPARE, FAIL)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["no baseline: 1 new test"])


def test_verdicts_are_shown_quietly_too(base: pytest.Pytester) -> None:
    result = base.runpytest(COMPARE, "-qq")
    assert result.ret == 0
    lines = ["regressed: test_some.py::test_a: +10.0%*", "compared with base.json: 1 regressed"]
    result.stdout.fnmatch_lines(lines)


Compare = Callable[..., tuple[int, str]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Compare two reports on the command line; return the exit code, and all output as one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(base: Report, head: Report, *options: str) -> tuple[int, str]:
        Path("base.json").write_bytes(encode_report(base))
        Path("head.json").write_bytes(encode_report(head))
        status = main(["compare", "base.json", "head.json", *options])
        message = capsys.readouterr()
        return status, " ".join((message.out + message.err).split())

    return run


def tokens(factor: float, joules: float) -> Record:
    rounds = [round_of(each, tokens=Tokens(30, int(16 * factor))) for each in scaled(joules)]
    return record_of(rounds=rounds)


def in_kilojoules() -> Record:
    found = record_of()
    metrics = {
        name: msgspec.structs.replace(each, unit=f"k{each.unit}") for name, each in found.metrics.items()
    }
    return msgspec.structs.replace(record_of(joules=scaled(0.001)), metrics=metrics)


OTHER = record_of("t.py::other", params={})
FAILED = record_of(status="failed", reason="assert 0")
CODE, CHANGED = record_of(source_digest="aa"), record_of(source_digest="bb", joules=scaled(0.4))


class TestCompare:
    @pytest.mark.parametrize(
        ("base", "head", "options", "status", "line"),
        [
            (
                [record_of(), OTHER],
                [record_of()],
                ["--inconclusive=fail"],
                4,
                "fail, 1 of 2 tests removed",
            ),
            ([record_of(), OTHER], [record_of()], [], 0, "warning, 1 of 2 tests removed"),
            ([record_of(), OTHER], [record_of()], ["--inconclusive=pass"], 0, "1 removed"),
            ([OTHER], [record_of()], [], 5, "fail, 1 of 2 tests removed, nothing was compared"),
            ([record_of()], [record_of(status="skipped", reason="no GPU")], [], 5, "was skipped (no GPU)"),
            (
                [record_of()],
                [record_of(status="failed", reason="xfail: later")],
                [],
                5,
                "failed (xfail: later)",
            ),
            (
                [record_of("t.py::a")],
                [record_of("t.py::b", scaled(1.1))],
                [],
                5,
                "fail, 1 of 2 tests removed, nothing was compared",
            ),
            ([CODE], [CHANGED], [], 3, "the benchmark itself changed: llenergy compare --across"),
            ([CODE], [CHANGED], ["--across"], 0, "different workload: the benchmark itself changed"),
            ([record_of()], [CHANGED], [], 0, "1 improved"),
            ([CODE], [record_of()], [], 3, "the benchmark itself changed"),
            ([tokens(1, 1)], [tokens(1.25, 1.2)], [], 3, "output tokens per iteration: 8 -> 10 (+25%)"),
            ([tokens(1, 1)], [tokens(1.25, 1.1)], ["--across"], 0, "(+25%)"),
            ([tokens(10, 1)], [tokens(10.2, 1)], [], 0, "1 unchanged"),
            ([record_of()], [in_kilojoules()], [], 5, "in kJ/token, expected J/token"),
            (
                [record_of()],
                [record_of(joules=scaled(1.2))],
                ["--fail-on=energy_j:3%+1kJ"],
                5,
                "above every value",
            ),
            (
                [record_of()],
                [record_of()],
                ["--metric=energy_j", "--fail-on=end_to_end_latency_s:3%"],
                5,
                "nothing was gated by end_to_end_latency_s: no test has it",
            ),
            ([], [record_of(), OTHER], [], 0, "pass, no baseline: 2 new tests"),
            (
                [FAILED],
                [record_of()],
                [],
                5,
                "fail, 1 test failed or skipped in the baseline, nothing was compared",
            ),
            (
                [FAILED, OTHER],
                [record_of(), OTHER],
                [],
                0,
                "warning, 1 test failed or skipped in the baseline",
            ),
            ([record_of()], [record_of()], ["--floor=12%"], 0, "changes up to 12% do not count"),
        ],
    )
    def test_exit_code_and_line(
        self,
        compare: Compare,
        base: list[Record],
        head: list[Record],
        options: list[str],
        status: int,
        line: str,
    ) -> None:
        found, output = compare(report_of(*base), report_of(*head), *options)
        assert line in output
        assert found == status

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (
                ["--fail-on=energy_j:3%", "--fail-on=energy_j:30%"],
                "energy_j is named twice; keep one of them",
            ),
            (["--floor=50%"], "--floor=50%: needs a share from 0 to 25%"),
            (["--inconclusive=ignore"], "--inconclusive=ignore: must be warn, fail or pass"),
        ],
    )
    def test_options_that_mean_nothing_are_refused(
        self, compare: Compare, options: list[str], line: str
    ) -> None:
        status, output = compare(report_of(record_of()), report_of(record_of()), *options)
        assert line in output
        assert status == 2

    def test_the_same_run_on_both_sides_is_refused(self, compare: Compare) -> None:
        report = report_of(record_of())
        status, output = compare(report, report)
        assert output.startswith("llenergy compare: base.json and head.json are the same run, run-")
        assert status == 2
