# SPDX-License-Identifier: Apache-2.0
"""Gates against a baseline, in real runs of pytest: what fails, when, and that nothing passes in silence."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import pytest_llenergy.gating  # what inner runs use is imported once
import pytest_llenergy.report.collect
import pytest_llenergy.report.comment
import pytest_llenergy.report.terminal
import pytest_llenergy.report.verdicts
import pytest_llenergy.runs  # noqa: F401
from pytest_llenergy.cli import main
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.measure.experiment import Experiment, RoundPlan
from pytest_llenergy.measure.metrics import summarise
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.model.record import Round
from pytest_llenergy.model.report import json_schema

from .conftest import TEN_WATTS
from .model.reports import RECORD
from .nvml_sim import Board, World
from .nvml_sim.fixtures import Give

Read = Callable[..., dict[str, Any]]

#: The meter of the suite, whose watts and kind a run is told by its environment.
TOLD_WATTS = (
    TEN_WATTS.replace("10 * time", "float(os.environ['WATTS']) * time")
    .replace('"measured"', "os.environ['KIND']")
    .replace("poll_period_s = 0.01", "poll_period_s = 0.003")
)

ONE = """
import time, pytest
def test_a(energy):
    energy(time.sleep, 0.05)
"""

#: With a mark, or with another test.
MARKED = ONE.replace("def test_a", "@pytest.mark.{}\ndef test_a")
TWO = ONE + ONE.replace("test_a", "test_b")

#: Runs a test that failed once more, with ten watts.
RERUNS = """
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for item.execution_count in (1, 2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = item.execution_count == 1 and any(report.failed for report in reports)
        for report in reports:
            if again and report.failed:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
        if not again:
            break
        os.environ["WATTS"] = "10"
        item._initrequest()
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""

COMPARE = "--energy-compare=base.json"
FAIL = "--energy-fail-on=mean_power_w:3%"


def told(workload: Workload, plan: RoundPlan, selection: Selection, lease: Lease) -> Experiment:
    """What a measurement would have told of a device that draws the watts of the environment."""
    selection.close()
    joules = [float(os.environ["WATTS"]) * 2.0 * each for each in (1, 1.002, 0.997, 1.001, 0.998, 1.002)]
    rounds = [
        Round(start_s=0.0, duration_s=2.0, energy_j=each, energy_u_j=0.001, energy_u_absolute_j=0.1)
        for each in joules[: plan.rounds]
    ]
    kind = os.environ["KIND"]
    meters = [msgspec.structs.replace(RECORD.meters[0], domain="cpu:ten", kind=kind)]
    assert RECORD.procedure is not None
    return Experiment(rounds, summarise(rounds, None), meters, 0.1, RECORD.procedure, [])


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytester with a few short rounds a test, and a meter whose watts are told."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("WATTS", "10")
    monkeypatch.setenv("KIND", "measured")
    pytester.makeini(
        "[pytest]\nenergy_rounds = 6\nenergy_warmup = 0\nenergy_gap = 0.05\nenergy_budget = 0.1\n"
        "energy_target = 50%\n"
    )
    pytester.makeconftest("import os\n" + TOLD_WATTS)
    return pytester


@pytest.fixture
def quick_suite(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The same without the seconds that measuring takes: what the rounds tell is given."""
    monkeypatch.setattr("pytest_llenergy.runs.measure", told)
    return suite


@pytest.fixture
def base(quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """With one test and its baseline of ten watts; from here on there are eleven."""
    quick_suite.makepyfile(test_some=ONE)
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=1)
    monkeypatch.setenv("WATTS", "11")
    return quick_suite


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    report = json.loads(Path(name).read_text())
    change(report)
    Path(name).write_text(json.dumps(report))


def with_b(report: dict[str, Any]) -> None:
    """Give a report of ``test_a`` the same of ``test_b``."""
    (record,) = report["records"]
    report["records"].append({**record, "id": record["id"].replace("test_a", "test_b")})


def usage_error(pytester: pytest.Pytester, *args: str) -> str:
    pytester.makepyfile(test_some="raise SystemExit('collected')")
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.stderr.lines if line.startswith("ERROR: ")]
    return line.removeprefix("ERROR: ")


class TestRegressed:
    def test_it_fails_in_its_call_phase_in_the_process_that_has_measured_it(
        self, suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, read_report: Read
    ) -> None:
        suite.makepyfile(test_some=TWO)
        suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
        monkeypatch.setenv("WATTS", "13")
        self.fails(suite, read_report, 1, "-k", "test_a")
        self.fails(suite, read_report, 2, "-n2")

    def fails(self, suite: pytest.Pytester, read_report: Read, count: int, *extra: str) -> None:
        result = suite.runpytest(COMPARE, FAIL, "--energy-report", "--junitxml=junit.xml", *extra)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert result.parseoutcomes()["failed"] == count
        result.stdout.fnmatch_lines(
            [
                "*energy_gate: mean_power_w regressed, * -> * W: *%, surely more than *%*",
                "*= energy, compared with base.json =*",
                "regressed *test_a* W *+*% *",
                f"{count} regressed; noise *",
            ]
        )
        report = read_report()
        jsonschema.validate(report, json_schema())
        assert report["baseline"]["side"]["origin"] == "base.json"
        for record in report["records"]:
            assert (record["status"], record["failed_gate"]) == ("failed", True)
            (found,) = record["comparisons"]
            assert (found["id"], found["verdict"], found["gated"]) == (record["id"], "regressed", True)
            assert 1.01 < found["low"] <= found["ratio"] <= found["high"]
        root = ElementTree.parse("junit.xml").getroot()
        messages = [each.get("message", "") for each in root.iter("failure")]
        assert len(messages) == count
        assert all(each.startswith("Failed: energy_gate: mean_power_w regressed") for each in messages)
        properties = {each.get("name"): each.get("value") for each in root.iter("property")}
        assert properties["llenergy.mean_power_w.verdict"] == "regressed"

    def test_what_it_says(self, base: pytest.Pytester) -> None:
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: mean_power_w regressed, 10 -> 11.01 W: 10.0%, surely more than 9.8%",
                "regressed  test_a    10  11.01 W  +10.0%  +9.8% … +10.2%   3.2%",
                "1 regressed; noise 0.*% median, 0.*% at most",
            ]
        )

    def test_x_stops_and_lf_runs_it_again(self, base: pytest.Pytester) -> None:
        edit("base.json", with_b)
        base.makepyfile(test_some=TWO)
        base.makeini(Path("tox.ini").read_text())
        assert base.runpytest(COMPARE, FAIL, "-x").parseoutcomes() == {"failed": 1}
        again = base.runpytest(COMPARE, FAIL, "--lf", "-x")
        assert again.parseoutcomes() == {"failed": 1}
        again.stdout.fnmatch_lines(["run-last-failure: rerun previous 1 failure*"])

    def test_an_expected_failure_is_one(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some=MARKED.format("xfail(strict=True)"))
        base.runpytest(COMPARE, FAIL).assert_outcomes(xfailed=1)

    def test_a_rerun_measures_and_judges_anew(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, read_report: Read
    ) -> None:
        """As pytest-rerunfailures does it: again within one protocol, with a count on the test."""
        conftest = Path("conftest.py")
        conftest.write_text(conftest.read_text() + RERUNS)
        result = base.runpytest(COMPARE, FAIL, "--energy-report")
        result.assert_outcomes(passed=1)
        records = read_report()["records"]
        assert [(each["attempt"], each["status"]) for each in records] == [(1, "failed"), (2, "measured")]
        verdicts = [each["comparisons"][0]["verdict"] for each in records]
        assert verdicts == ["regressed", "unchanged"]
        result.stdout.fnmatch_lines(["1 unchanged; *"])

    def test_without_a_gate_it_is_shown(self, base: pytest.Pytester) -> None:
        result = base.runpytest(COMPARE)
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["*= energy, compared with base.json =*", "*test_a*"])

    @pytest.mark.parametrize(("absolute", "failed"), [("2W", 0), ("500mW", 1)])
    def test_an_absolute_part_must_be_reached_as_well(
        self, base: pytest.Pytester, absolute: str, failed: int
    ) -> None:
        base.runpytest(COMPARE, f"{FAIL}+{absolute}").assert_outcomes(passed=1 - failed, failed=failed)

    def test_the_run_that_failed_by_its_gate_can_be_compared_afterwards(
        self, base: pytest.Pytester, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base.runpytest(COMPARE, FAIL, "--energy-report=head.json").assert_outcomes(failed=1)
        capsys.readouterr()
        assert main(["compare", "base.json", "head.json", "--metric=mean_power_w"]) == 1
        assert "1 regressed" in capsys.readouterr().out


class TestMark:
    def test_a_threshold_of_its_own_goes_before_that_of_all(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='mean_power_w', threshold='25%')"
        base.makepyfile(test_some=MARKED.format(mark))
        base.runpytest(COMPARE, FAIL).assert_outcomes(passed=1)

    def test_a_budget_and_a_threshold_are_both_held(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='mean_power_w', budget='1 W', threshold='3%')"
        base.makepyfile(test_some=MARKED.format(mark))
        result = base.runpytest(COMPARE)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: mean_power_w is * W, over the budget of 1 W",
                "energy_gate: mean_power_w regressed, *",
            ]
        )

    def test_without_a_baseline_it_says_that_it_did_nothing(
        self, quick_suite: pytest.Pytester, read_report: Read
    ) -> None:
        quick_suite.makepyfile(test_some=MARKED.format("energy_gate(threshold='3%')"))
        result = quick_suite.runpytest("--energy-report", "-q")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["not gated: 1 test, no baseline was given (--energy-compare)"])
        (found,) = read_report()["records"][0]["comparisons"]
        assert (found["verdict"], found["reason"]) == ("new", "no baseline was given (--energy-compare)")

    def test_a_metric_that_the_test_does_not_have_fails_it(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='output_tokens_per_s', threshold='3%')"
        base.makepyfile(test_some=MARKED.format(mark))
        result = base.runpytest(COMPARE)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: output_tokens_per_s could not be judged, invalid: base has no "
                "output_tokens_per_s: the workload counts no tokens"
            ]
        )


class TestNoSilentPass:
    def test_a_new_and_a_removed_test_are_told_and_fail_nothing(
        self, base: pytest.Pytester, read_report: Read
    ) -> None:
        edit("base.json", with_b)
        base.makepyfile(test_some=TWO.replace("test_b", "test_c"))
        result = base.runpytest(COMPARE, "--energy-fail-on=mean_power_w:40%", "--energy-report")
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(
            [
                "new: test_some.py::test_c: not in the baseline",
                "1 new, 1 unchanged; *",
                "in base.json and not in this run: test_b",
            ]
        )
        assert read_report()["baseline"]["absent"] == ["test_some.py::test_b"]

    def test_where_all_are_new_nothing_was_gated_and_the_run_fails(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some="", test_other=ONE)
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            ["in base.json and not in this run: test_a", "ERROR: nothing was gated: 1 new"]
        )

    @pytest.mark.parametrize("extra", [[], ["-n2"]], ids=["one process", "-n2"])
    def test_where_all_are_skipped_nothing_was_gated(self, base: pytest.Pytester, extra: list[str]) -> None:
        base.makepyfile(test_some=ONE.replace("energy(time", "pytest.skip('no GPU'); energy(time"))
        result = base.runpytest(COMPARE, FAIL, "-q", *extra)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["ERROR: nothing was gated: 1 skipped"])

    def test_where_nothing_is_measured_nothing_was_gated(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some="def test_a(): pass")
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["ERROR: nothing was gated: no test was measured"])

    def test_an_ini_file_may_ask_for_gates_in_runs_of_other_tests(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ini = Path("tox.ini").read_text() + "\nenergy_compare = base.json\n"
        Path("tox.ini").write_text(f"{ini}energy_fail_on =\n    mean_power_w:3%\n    duration_s:900%\n")
        # Its files are found from the root directory.
        monkeypatch.chdir(base.mkdir("elsewhere"))
        base.makepyfile(test_some="def test_a(): pass")
        base.runpytest("..").assert_outcomes(passed=1)
        base.makepyfile(test_some=ONE)
        base.runpytest("..").assert_outcomes(failed=1)

    def test_another_device_fails_with_what_differs(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["environment"]["host"].update(cpu_model="Another CPU"))
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: mean_power_w could not be judged, not comparable: other devices (cpu.model: "
                "Another CPU -> *)"
            ]
        )

    def test_an_estimate_is_not_held_against_a_measurement(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KIND", "estimated")
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        told = (
            "energy_gate: mean_power_w could not be judged, not comparable: base is measured, "
            "head is estimated"
        )
        result.stdout.fnmatch_lines([told])

    @pytest.mark.parametrize("value", [0.0, None])
    def test_a_baseline_of_nothing(self, base: pytest.Pytester, value: float | None) -> None:
        def nothing(report: dict[str, Any]) -> None:
            for each in report["records"][0]["rounds"]:
                each.update(energy_j=value, reason="the counter stood still")

        edit("base.json", nothing)
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["energy_gate: mean_power_w could not be judged, invalid: base has *"])

    @pytest.mark.parametrize("word", ["warn", "pass", "fail"])
    def test_too_few_rounds_are_inconclusive(self, base: pytest.Pytester, word: str) -> None:
        result = base.runpytest(COMPARE, FAIL, "--energy-rounds=2", f"--energy-inconclusive={word}")
        result.assert_outcomes(passed=word != "fail", failed=word == "fail")
        result.stdout.fnmatch_lines(["inconclusive: test_some.py::test_a: * a verdict needs 4 a side"])
        warning = "inconclusive: 1 of 1; more rounds (--energy-rounds) can tell, *"
        if word == "warn":
            result.stdout.fnmatch_lines([warning])
        else:
            result.stdout.no_fnmatch_line(warning)
        if word == "fail":
            told = "energy_gate: mean_power_w is inconclusive (--energy-inconclusive=fail): *4 a side"
            result.stdout.fnmatch_lines([told])

    def test_windows_and_interrupted_runs_are_told(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["run"].update(complete=False))
        window = "def test_w(energy_meter):\n    with energy_meter('x'):\n        time.sleep(0.1)\n"
        base.makepyfile(test_some="import time\n" + window)
        result = base.runpytest(COMPARE, "-q")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            [
                "base.json is of a run that did not come to its end: what it had not measured is missing",
                "not compared: 1 test with windows of energy_meter only",
            ]
        )

    def test_the_last_attempt_of_the_baseline_counts(self, base: pytest.Pytester) -> None:
        def rerun(report: dict[str, Any]) -> None:
            later = {**report["records"][0], "attempt": 2, "status": "failed", "reason": "flaky"}
            better = {**report["records"][0], "id": "test_some.py::test_z"}
            report["records"] = [later, *report["records"], better]

        edit("base.json", rerun)
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(["*could not be judged, invalid: base is failed (flaky)"])


class TestUsage:
    """Told before anything is measured, in one line, with exit code 4."""

    def test_a_gate_needs_a_baseline(self, suite: pytest.Pytester) -> None:
        assert usage_error(suite, FAIL) == (
            "--energy-fail-on needs a baseline: add --energy-compare=FILE, or =NAME of --energy-save=NAME"
        )

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (None, "{path}: No such file or directory"),
            ("", "{path}: empty, expected a JSON report of pytest --energy-report"),
            (
                '{"schema_version": 1, "tool"',
                "{path}: not a report of pytest --energy-report (Input data was truncated)",
            ),
            ("[]", "{path}: not a report of pytest --energy-report (Expected `object`, got `array`)"),
            (
                '{"schema_version": 99}',
                "{path}: schema version 99 is newer than 1, the newest this pytest-llenergy reads; "
                "upgrade pytest-llenergy",
            ),
        ],
        ids=["missing", "empty", "truncated", "another", "newer"],
    )
    @pytest.mark.parametrize("extra", [[], ["-n2"]], ids=["one process", "-n2"])
    def test_a_baseline_that_is_none(
        self, suite: pytest.Pytester, content: str | None, told: str, extra: list[str]
    ) -> None:
        if content is not None:
            Path("base.json").write_text(content)
        expected = told.format(path=suite.path / "base.json")
        assert usage_error(suite, COMPARE, *extra) == f"{COMPARE}: {expected}"

    def test_a_baseline_in_which_nothing_was_measured(self, base: pytest.Pytester) -> None:
        def failed(report: dict[str, Any]) -> None:
            for record in report["records"]:
                record["status"] = "failed"

        edit("base.json", failed)
        path = base.path / "base.json"
        told = f"{COMPARE}: {path}: none of its 1 tests was measured; measure a baseline first"
        assert usage_error(base, COMPARE) == told
        edit("base.json", lambda report: report["records"].clear())
        assert usage_error(base, COMPARE) == told.replace("1 tests", "0 tests")

    def test_a_baseline_that_has_a_test_twice(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["records"].append(report["records"][0]))
        assert usage_error(base, COMPARE) == (
            f"{COMPARE}: {base.path}/base.json: test_some.py::test_a is there twice (attempt 1); make one "
            "report a run, or join them with llenergy merge"
        )

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ("mean_power_w", "'mean_power_w' is no METRIC:PERCENT%, such as 'energy_j:3%' or *"),
            ("joules:3%", "unknown metric 'joules'; a gate can compare: energy_j, *"),
            (
                "energy_j:-3%",
                "threshold '-3%' of energy_j is no percentage above zero, such as '3%' or '3%+2J'",
            ),
            ("energy_j:3%+2W", "threshold '3%+2W' of energy_j is no percentage above zero, such as *"),
            (
                "peak_memory_bytes:3%",
                "peak_memory_bytes is one value a test, and rounds are compared; bound it *",
            ),
        ],
    )
    def test_a_threshold_that_is_none(self, base: pytest.Pytester, option: str, told: str) -> None:
        base.makepyfile(test_some="raise SystemExit('collected')")
        result = base.runpytest(COMPARE, f"--energy-fail-on={option}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --energy-fail-on={option}: {told}"])

    def test_one_metric_twice(self, base: pytest.Pytester) -> None:
        told = "--energy-fail-on names mean_power_w twice; keep one of them"
        assert usage_error(base, COMPARE, FAIL, "--energy-fail-on=mean_power_w:5%") == told

    def test_an_unknown_word_and_an_address(self, suite: pytest.Pytester) -> None:
        told = "--energy-inconclusive=ignore: knows three words: warn, fail, pass"
        assert usage_error(suite, "--energy-inconclusive=ignore") == told
        told = "--energy-compare=https://x/base.json: addresses are not read; download the report first"
        assert usage_error(suite, "--energy-compare=https://x/base.json") == told

    def test_the_baseline_is_not_overwritten(self, base: pytest.Pytester) -> None:
        before = Path("base.json").read_bytes()
        told = usage_error(base, COMPARE, "--energy-report=base.json")
        assert told.startswith("--energy-report=")
        assert told.endswith(
            "that --energy-compare reads, and with it what a regression is held against; write to another "
            "name"
        )
        assert Path("base.json").read_bytes() == before


class TestSave:
    def test_a_name_is_saved_and_compared(
        self, quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quick_suite.makepyfile(ONE)
        saved = quick_suite.runpytest("--energy-save=main")
        saved.stdout.fnmatch_lines(["energy report: .llenergy/main.json"])
        assert [each.name for each in (quick_suite.path / ".llenergy").iterdir()] == ["main.json"]
        monkeypatch.setenv("WATTS", "11")
        monkeypatch.chdir(quick_suite.mkdir("elsewhere"))
        result = quick_suite.runpytest("..", "--energy-compare=main", FAIL)
        result.assert_outcomes(failed=1)

    def test_beside_a_report(self, quick_suite: pytest.Pytester) -> None:
        quick_suite.makepyfile(ONE)
        quick_suite.runpytest("--energy-save=main", "--energy-report=energy.json").assert_outcomes(passed=1)
        assert Path("energy.json").read_bytes() == Path(".llenergy/main.json").read_bytes()

    def test_a_name_that_was_never_saved(self, quick_suite: pytest.Pytester) -> None:
        none = usage_error(quick_suite, "--energy-compare=main")
        assert none == (
            "--energy-compare=main: there is no .llenergy/main.json; nothing is saved in "
            f"{quick_suite.path}/.llenergy (--energy-save=main makes it; the name of a file ends in .json)"
        )
        quick_suite.mkdir(".llenergy")
        Path(".llenergy/other.json").touch()
        assert "; saved are: other (" in usage_error(quick_suite, "--energy-compare=main")

    @pytest.mark.parametrize("name", ["a/b", "main.json", "..", ""])
    def test_a_name_that_is_none(self, quick_suite: pytest.Pytester, name: str) -> None:
        told = usage_error(quick_suite, f"--energy-save={name}")
        assert "needs a plain name, such as main" in told or "has no value" in told

    def test_a_baseline_is_not_saved_over_itself(self, quick_suite: pytest.Pytester) -> None:
        quick_suite.makepyfile(test_some=ONE)
        quick_suite.runpytest("--energy-save=main").assert_outcomes(passed=1)
        told = usage_error(quick_suite, "--energy-save=main", "--energy-compare=main")
        assert told.startswith("--energy-save=main would replace the baseline ")


def test_what_the_boards_of_a_test_are_is_in_its_record(
    suite: pytest.Pytester, nvml_children: Give, tmp_path: Path, read_report: Read
) -> None:
    nvml_children(World(tmp_path / "world", [Board(), Board()]))
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy_meter):\n"
        "    with energy_meter('x'):\n        pass\n"
    )
    suite.runpytest_subprocess("--energy-report", "--energy-meter=ten-watts").assert_outcomes(passed=1)
    report = read_report()
    (record,) = report["records"]
    (board,) = record["boards"]
    assert [board["uuid"]] == record["devices"]
    assert board in report["environment"]["gpus"]
    assert board["power_limit_w"] > 0
