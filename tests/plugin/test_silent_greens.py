# SPDX-License-Identifier: Apache-2.0
"""What would let a regression pass: each way is named and, under a gate, ends with a non-zero exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.record import Record, Tokens
from pytest_llenergy.record.report import Report, encode_report

from ..compare.runs import record_of, report_of, round_of, scaled
from .inner import COMPARE, FAIL, MARKED, ONE, RERUNS, TWO, edit, with_b

#: The second test, and what it becomes on the head. Both need twice the power there.
B = ONE.replace("test_a", "test_b")
WINDOW = "\ndef test_b(energy_meter):\n    with energy_meter('x'):\n        time.sleep(0.05)\n"
LOST = "ERROR: 1 test of base.json not compared: test_b ({}); --energy-removed=warn accepts this"


@pytest.fixture
def two(quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester with a baseline of two tests, the first of which always passes its gate."""
    quick_suite.makepyfile(test_a=ONE, test_b=B)
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    return quick_suite


class TestLostByPytest:
    @pytest.mark.parametrize(
        ("code", "options", "why"),
        [
            (B.replace("def test_b", "@pytest.mark.skip('no GPU')\ndef test_b"), (), "skipped"),
            (B + "    pytest.skip('later')\n", (), "skipped"),
            (B.replace("def test_b", "@pytest.mark.xfail\ndef test_b") + "    assert 0\n", (), "xfailed"),
            ("", (), "not in this run"),
            (B.replace("energy(time.", "(time.").replace("(energy)", "()"), (), "not in this run"),
            (B, ("-k", "test_a"), "not in this run"),
            (B, ("--deselect", "test_b.py::test_b"), "not in this run"),
            (B, ("test_a.py",), "not in this run"),
            ("import pytest\npytest.skip('no', allow_module_level=True)", (), "not in this run"),
        ],
        ids=["mark", "measured", "xfail", "deleted", "fixture", "-k", "--deselect", "path", "module"],
    )
    @pytest.mark.parametrize("policy", ["fail", "warn", "pass"])
    def test_a_gate_loses_a_test(
        self, two: pytest.Pytester, code: str, options: tuple[str, ...], why: str, policy: str
    ) -> None:
        two.makepyfile(test_b=code)
        result = two.runpytest(COMPARE, FAIL, f"--energy-removed={policy}", *options)
        assert result.ret == (1 if policy == "fail" else 0)
        lines = {
            "fail": LOST.format(why),
            "warn": f"in base.json but not compared: test_b ({why})",
        }
        for each, line in lines.items():
            (result.stdout.fnmatch_lines if each == policy else result.stdout.no_fnmatch_line)(
                [line] if each == policy else line  # type: ignore[arg-type]
            )

    def test_without_a_gate_it_is_a_warning(self, two: pytest.Pytester) -> None:
        result = two.runpytest(COMPARE, "-q", "-k", "test_a")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["in base.json but not compared: test_b (not in this run)"])

    def test_windows_in_place_of_rounds_fail(self, two: pytest.Pytester) -> None:
        two.makepyfile(test_b="import time\n" + WINDOW)
        result = two.runpytest(COMPARE, FAIL)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["*is invalid: head has only windows of energy_meter and no rounds*"])
        assert two.runpytest(COMPARE, FAIL, "--energy-removed=warn").ret == 0

    def test_a_test_that_its_mark_gated_is_lost(self, quick_suite: pytest.Pytester) -> None:
        marked = MARKED.format("energy_gate(metric='mean_power_w', threshold='3%')")
        quick_suite.makepyfile(test_a=ONE, test_b=marked.replace("test_a", "test_b"))
        quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
        quick_suite.makepyfile(test_b="")
        result = quick_suite.runpytest(COMPARE)
        assert result.ret == 1
        result.stdout.fnmatch_lines([LOST.format("not in this run")])
        quick_suite.makepyfile(test_a="", test_b=marked.replace("test_a", "test_b"))
        assert quick_suite.runpytest(COMPARE).ret == 0, "no gate covered test_a"

    @pytest.mark.parametrize("policy", ["fail", "warn", "pass"])
    def test_a_mark_that_is_gone_is_named(self, quick_suite: pytest.Pytester, policy: str) -> None:
        quick_suite.makepyfile(MARKED.format("energy_gate(metric='mean_power_w', threshold='3%')"))
        quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=1)
        quick_suite.makepyfile(ONE)
        line = "energy_gate of 1 test in base.json is gone: test_a (mean_power_w)"
        result = quick_suite.runpytest(COMPARE, f"--energy-removed={policy}")
        assert result.ret == (1 if policy == "fail" else 0)
        if policy == "pass":
            result.stdout.no_fnmatch_line(f"*{line}*")
        else:
            end = "; --energy-removed=warn accepts this"
            result.stdout.fnmatch_lines([f"ERROR: {line}{end}" if policy == "fail" else line])
        # A gate of all tests replaces it.
        assert quick_suite.runpytest(COMPARE, "--energy-fail-on=mean_power_w:3%").ret == 0

    def test_a_gate_of_an_option_that_is_gone_is_no_error(self, base: pytest.Pytester) -> None:
        base.runpytest(COMPARE, FAIL, "--energy-report=next.json")
        edit("next.json", lambda report: report["records"][0].update(status="measured", failed_gate=False))
        assert base.runpytest("--energy-compare=next.json").ret == 0

    def test_a_test_that_ends_the_run_with_success_fails_a_gate(
        self, two: pytest.Pytester, read_report: Any
    ) -> None:
        code = B.replace("energy(time", "pytest.exit('done', returncode=0); energy(time")
        two.makepyfile(test_b=code)
        result = two.runpytest(COMPARE, FAIL, "--energy-report")
        assert result.ret == 1
        result.stdout.fnmatch_lines([LOST.format("not in this run")])
        assert not read_report()["run"]["complete"]
        assert two.runpytest(COMPARE).ret == 0, "no gate"

    @pytest.mark.clock
    def test_workers_lose_tests_too(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(test_a=ONE, test_b=B)
        suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
        suite.makepyfile(test_b=B.replace("energy(time", "pytest.skip('no GPU'); energy(time"))
        result = suite.runpytest(COMPARE, "--energy-fail-on=mean_power_w:150%", "-n2")
        assert result.ret == 1
        result.stdout.fnmatch_lines([LOST.format("skipped")])

    def test_an_expected_failure_hides_no_regression(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base.makepyfile(test_some=MARKED.format("xfail(strict=True)"))
        result = base.runpytest(COMPARE, FAIL, "--energy-report=next.json")
        result.assert_outcomes(xfailed=1)
        assert result.ret == 1
        result.stdout.fnmatch_lines([LOST.format("xfailed").replace("test_b", "test_a")])
        # In the baseline of the next run, the expected failure is known.
        edit("next.json", with_b)
        monkeypatch.setenv("WATTS", "10")
        edit("next.json", lambda report: report["records"][1].update(status="measured", failed_gate=False))
        base.makepyfile(test_some=MARKED.format("xfail") + "    assert 0\n" + B)
        result = base.runpytest("--energy-compare=next.json", FAIL)
        assert result.ret == 0

    def test_a_rerun_does_not_undo_a_regression(self, base: pytest.Pytester) -> None:
        conftest = Path("conftest.py")
        conftest.write_text(conftest.read_text() + RERUNS)
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(passed=1)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["ERROR: test_a ran again after its gate had failed, * regressed, *"])


class TestRenamedOrEdited:
    def test_a_renamed_test_is_compared(self, base: pytest.Pytester, read_report: Any) -> None:
        base.makepyfile(test_some=ONE.replace("test_a", "test_new"))
        result = base.runpytest(COMPARE, FAIL, "--energy-report")
        assert result.ret == 1
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*regressed: *test_new: renamed from test_some.py::test_a"])
        assert read_report()["baseline"]["absent"] == []

    def test_a_test_that_moved_is_named_with_its_files(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WATTS", "10")
        base.path.joinpath("test_some.py").rename(base.path / "test_moved.py")
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(["test_moved.py::test_a was test_some.py::test_a"])

    def test_deleted_tests_fail_a_gate_of_the_ini_file(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some="def test_other(): pass")
        ini = base.runpytest(COMPARE, "-o", FAIL.removeprefix("--").replace("-", "_"))
        assert ini.ret == 1
        ini.stdout.fnmatch_lines(["ERROR: nothing was gated: no test was measured"])

    def test_a_renamed_test_that_is_unchanged_is_named(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WATTS", "10")
        base.makepyfile(test_some=ONE.replace("test_a", "test_new"))
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["test_new was test_a"])

    @pytest.mark.parametrize(
        ("code", "edited"),
        [
            (ONE.replace("0.05", "0.04"), True),
            (
                "import time\nclass TestIt:\n    def test_a(self, energy):\n        energy(time.sleep, 1)\n",
                None,
            ),
            (
                ONE.replace("energy(time", "# Sleep.\n    energy( time").replace(
                    "def", "@pytest.mark.filterwarnings('error')\ndef"
                ),
                False,
            ),
            (ONE.replace("(energy)", "(energy: object) -> None"), False),
            (ONE.replace("def test_a", "@(lambda test: test)\ndef test_a"), True),
            ("exec('import time\\ndef test_a(energy): energy(time.sleep, 0.01)')", True),
        ],
        ids=["edited", "moved into a class", "comment and mark", "annotations", "decorator", "no source"],
    )
    def test_an_edited_test_is_not_comparable(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, code: str, edited: bool | None
    ) -> None:
        monkeypatch.setenv("WATTS", "10")
        base.makepyfile(test_some=code)
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == (0 if edited is False else 1)
        if edited:
            line = "*mean_power_w is not comparable: the benchmark itself changed: llenergy compare *"
            result.stdout.fnmatch_lines([line])
            assert base.runpytest(COMPARE).ret == 0, "figures without a gate"

    def test_values_of_a_closure_and_the_length_of_a_tensor_are_seen(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WATTS", "10")
        made = "import time\ndef make(n):\n    def test(energy):\n        energy(time.sleep, 0.05 * n)\n"
        made += "    return test\ntest_a = make(1)\n"
        long = "import pytest, time, torch\n@pytest.mark.parametrize('x', [torch.zeros(2000)])\n"
        long += "def test_a(energy, x):\n    energy(time.sleep, 0.05)\n"
        for before, after in (("make(1)", "make(2)"), ("2000", "3000")):
            code = made if before in made else long
            base.makepyfile(test_some=code)
            assert base.runpytest("--energy-report=other.json").ret == 0
            assert base.runpytest("--energy-compare=other.json", FAIL).ret == 0
            base.makepyfile(test_some=code.replace(before, after))
            assert base.runpytest("--energy-compare=other.json", FAIL).ret == 1

    def test_a_mark_that_allows_more_is_named(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mark = "energy_gate(metric='mean_power_w', threshold='150%')"
        base.makepyfile(test_some=MARKED.format(mark))
        line = "looser by a mark energy_gate: test_a (mean_power_w: 150% in place of {})"
        assert base.runpytest(COMPARE, FAIL, "--energy-report=next.json").ret == 0
        base.runpytest(COMPARE, FAIL).stdout.fnmatch_lines([line.format("3%")])
        base.makepyfile(test_some=MARKED.format(mark.replace("150", "200")))
        result = base.runpytest("--energy-compare=next.json")
        result.stdout.fnmatch_lines([line.format("150%").replace("150%", "200%", 1)])

    def test_a_baseline_without_digests_is_compared_as_before(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["records"][0].pop("source_digest"))
        base.makepyfile(test_some=ONE.replace("0.05", "0.04"))
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(["*mean_power_w regressed*"])


class TestQuiet:
    @pytest.mark.parametrize("flag", ["-q", "-qq"])
    def test_verdicts_are_shown(self, base: pytest.Pytester, flag: str) -> None:
        edit("base.json", with_b)
        base.makepyfile(test_some=TWO)
        result = base.runpytest(COMPARE, flag)
        assert result.ret == 0
        result.stdout.fnmatch_lines(
            ["regressed: test_some.py::test_a: +10.0%*", "compared with base.json: 2 regressed"]
        )


class TestVoidGate:
    @pytest.mark.parametrize(
        ("threshold", "line"),
        [
            (
                "mean_power_w:3%+1kW",
                "nothing was gated by mean_power_w: the absolute part of its threshold, *",
            ),
            ("output_tokens_per_s:3%", "nothing was gated by output_tokens_per_s: no test has it (*)"),
        ],
    )
    def test_a_gate_that_no_test_can_fail_fails(
        self, base: pytest.Pytester, threshold: str, line: str
    ) -> None:
        result = base.runpytest(COMPARE, "--energy-fail-on=duration_s:3%", f"--energy-fail-on={threshold}")
        result.assert_outcomes(passed=1)
        assert result.ret == 1
        result.stdout.fnmatch_lines([f"ERROR: {line}"])

    @pytest.mark.parametrize(
        "option", ["--energy-fail-on=mean_power_w:300%", "--energy-floor=50%", "--energy-fail-on=energy_j:0%"]
    )
    def test_a_limit_that_means_nothing_is_refused(self, base: pytest.Pytester, option: str) -> None:
        result = base.runpytest(COMPARE, option)
        assert result.ret == 4
        assert option in result.stderr.str()


class TestFirstBenchmarks:
    def test_a_complete_baseline_without_tests_passes(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["records"].clear())
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["no baseline: 1 new test"])

    def test_a_missing_baseline_is_an_error(self, base: pytest.Pytester) -> None:
        assert base.runpytest("--energy-compare=none.json", FAIL).ret == 4


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
CODE, EDITED = record_of(source_digest="aa"), record_of(source_digest="bb", joules=scaled(0.4))


class TestCompare:
    @pytest.mark.parametrize(
        ("base", "head", "options", "status", "line"),
        [
            (
                [record_of(), OTHER],
                [record_of()],
                [],
                5,
                "1 test of the baseline removed; --removed=warn accepts",
            ),
            (
                [record_of(), OTHER],
                [record_of()],
                ["--removed=warn"],
                0,
                "warning: 1 test of the baseline removed",
            ),
            (
                [record_of(), OTHER],
                [record_of()],
                ["--fail-on=energy_j:5%", "--fail-on=duration_s:5%"],
                5,
                "1 test of the baseline removed",
            ),
            ([record_of(), OTHER], [record_of()], ["--removed=pass"], 0, "1 removed"),
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
                1,
                "compared: t.py::a -> t.py::b",
            ),
            ([CODE], [EDITED], [], 3, "the benchmark itself changed: llenergy compare --across"),
            ([CODE], [EDITED], ["--across"], 0, "different workload: the benchmark itself changed"),
            ([CODE], [msgspec.structs.replace(CODE, source_digest="b")], ["--across"], 0, "itself changed"),
            ([record_of()], [EDITED], [], 0, "1 improved"),
            ([CODE], [record_of()], [], 3, "the benchmark itself changed"),
            ([tokens(1, 1)], [tokens(1.25, 1.2)], [], 3, "output tokens per iteration: 8 -> 10 (+25%)"),
            ([tokens(1, 1)], [tokens(1.25, 1.1)], ["--across"], 0, "(+25%)"),
            ([tokens(10, 1)], [tokens(10.2, 1)], [], 0, "1 unchanged"),
            ([record_of()], [in_kilojoules()], [], 5, "in kJ/token, expected J/token"),
            ([record_of()], [record_of(joules=scaled(0.001))], [], 5, "1000 times better: another unit"),
            ([record_of()], [record_of(joules=scaled(1000))], [], 1, "regressed"),
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
            ([record_of()], [record_of(attempt=1), record_of(attempt=2)], [], 0, "1 test ran again"),
            ([], [record_of(), OTHER], [], 0, "no baseline: 2 new tests"),
            (
                [FAILED],
                [record_of()],
                [],
                5,
                "warning: 1 test failed or skipped in the baseline and cannot be gated",
            ),
            (
                [FAILED, OTHER],
                [record_of(), OTHER],
                [],
                0,
                "warning: 1 test failed or skipped in the baseline",
            ),
            ([FAILED], [record_of(), OTHER], [], 5, "1 test failed or skipped in the baseline"),
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
            (["--fail-on=energy_j:300%"], "is too large; the maximum is 200%"),
            (["--removed=ignore"], "--removed=ignore: must be fail, warn or pass"),
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
