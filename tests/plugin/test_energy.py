# SPDX-License-Identifier: Apache-2.0
"""The ``energy`` fixture with callables of this process, and the records of the tests that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.plugin.draft import NOTHING_MEASURED

from ..conftest import TEN_WATTS

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

SLEEPY = """
    import time, pytest
    def test_it(energy):
        run = energy(time.sleep, 0.2)
        assert run.result is None
        assert len(run.rounds) == 2
        assert 1.9 < run.energy_j < 4
        assert abs(run.energy_j - 10 * run.duration_s) < 0.05
        assert abs(run.mean_power_w - 10) < 0.1
        assert abs(run.net_energy_j) < 0.1
"""


def test_require_measured_refuses_to_estimate_and_says_why(
    pytester: pytest.Pytester, read_report: Read
) -> None:
    pytester.makeconftest(
        "import pytest_llenergy.energy.meters.rapl as rapl\nfrom pathlib import Path\n"
        "def pytest_llenergy_meters(config):\n"
        "    from pytest_llenergy.energy.meters.base import MeterSpec\n"
        "    return [MeterSpec('rapl', 'measured', lambda targets: rapl.open_rapl(\n"
        "        targets, powercap_root=Path('nowhere')))]\n"
    )
    pytester.makepyfile(SLEEPY)
    result = pytester.runpytest("--energy-report", "--energy-require=measured")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["MeterError: no meter that measures (--energy-require=measured) for the CPU *: *rapl*nvml*"]
    )
    assert read_report()["records"][0]["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "the test uses energy but measured nothing: *"),
        (
            "with __import__('pytest').raises(ValueError): energy(int, 'k')",
            "the test uses energy but measured nothing: *",
        ),
        ("energy(int); energy(int)", "LLEnergyError: energy() was called twice in one test; *"),
        ("energy(int())", "LLEnergyError: energy: 0 is not callable; pass the function, not its result"),
        ("energy(sleepy)", "LLEnergyError: energy: a call of this function only makes a coroutine *"),
        (
            "energy(lambda: (each for each in ()))",
            "PlanError: energy: a call of this function only makes a coroutine *",
        ),
        ("energy(int).joules", "*AttributeError: a run has no joules; metrics: energy_j, *"),
    ],
)
def test_misuse_fails_with_one_clear_line(quick: pytest.Pytester, body: str, message: str) -> None:
    quick.makepyfile(f"async def sleepy(): pass\ndef test_it(energy):\n    {body}\n")
    result = quick.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])


def test_every_outcome_has_a_record(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        def test_fails(energy):
            energy(sum, [1])
            assert 1 == 2, "on purpose"
        def test_raises(energy):
            energy(int, "x")
        @pytest.mark.xfail(reason="known")
        def test_expected(energy):
            energy(sum, [1])
            assert 0
        def test_never(energy):
            pass
        def test_refused(energy):
            with pytest.raises(ValueError):
                energy(int, "x")
        def test_refused_then_measured(energy):
            with pytest.raises(ValueError):
                energy(int, "x")
            energy(sum, range(100_000))
        def test_skips(energy):
            pytest.skip("not today")
        @pytest.mark.skip(reason="never")
        def test_marked(energy):
            pass
        def test_other():
            pass
        """
    )
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(failed=4, xfailed=1, passed=2, skipped=2)
    found = {
        record["id"].split("::")[1]: (record["status"], record["reason"], len(record["rounds"]))
        for record in read_report()["records"]
    }
    assert found == {
        "test_fails": ("failed", "AssertionError: on purpose", 2),
        "test_raises": ("failed", "ValueError: invalid literal for int() with base 10: 'x'", 1),
        "test_expected": ("failed", "xfail: known", 2),
        "test_never": ("failed", f"Failed: {NOTHING_MEASURED}", 0),
        "test_refused": ("failed", f"Failed: {NOTHING_MEASURED}", 1),
        "test_refused_then_measured": ("measured", None, 2),
        "test_skips": ("skipped", "not today", 0),
        "test_marked": ("skipped", "never", 0),
    }
    assert read_report()["run"]["exit_status"] == 1


def test_params_are_primitives(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pathlib, pytest
        class Item:
            def __repr__(self): return "i"
        long = ["x" * 300, "x" * 250]
        values = [1, 2.5, *long, None, True, pathlib.PurePosixPath("p"), object(), {2, 1}, [Item()] * 999]
        @pytest.mark.parametrize("a", values, ids=range(len(values)))
        def test_it(energy, a):
            pytest.skip()
        """
    )
    quick.runpytest("--energy-report").assert_outcomes(skipped=10)
    *values, items = [record["params"]["a"] for record in read_report()["records"]]
    long = [values.pop(2), values.pop(2)]
    assert [(len(each), each[:187]) for each in long] == [(200, "x" * 187)] * 2
    assert long[0] != long[1], "the end of a long text counts"
    assert values == [1, 2.5, None, True, "PurePosixPath('p')", "object", "{1, 2}"]
    assert items[:187] == ("[" + "i, " * 100)[:187]


def test_energy_tests_are_found_by_fixture_not_by_name(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize("energy", [1])
        def test_users_own(energy): pass
        def test_asked_for_late(request):
            request.getfixturevalue("energy")(sum, [1])
        @pytest.fixture
        def measured(energy):
            return energy(sum, [1, 2])
        class TestIn:
            def test_by_a_fixture(self, measured):
                assert measured.result == 3
        """
    )
    quick.runpytest("--energy-report").assert_outcomes(passed=3)
    names = [record["id"].rpartition("::")[2] for record in read_report()["records"]]
    assert names == ["test_asked_for_late", "test_by_a_fixture"]


def test_unencodable_text_does_not_end_the_run(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        r"""
        import time, pytest
        @pytest.mark.parametrize("text", ["\ud800", "line\nbreak"], ids=["lone", "break"])
        def test_it(energy, text):
            energy(time.sleep, 0.1)
        def test_fails(energy):
            energy(time.sleep, 0.1)
            raise ValueError("\udce9 bad")
        def test_after(energy):
            energy(time.sleep, 0.1)
        """
    )
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(passed=3, failed=1)
    records = read_report()["records"]
    assert len(records) == 4
    assert [record["params"].get("text") for record in records[:2]] == ["\\ud800", "line\nbreak"]
    assert records[2]["reason"] == "ValueError: \\udce9 bad"
    result.stdout.fnmatch_lines(["test_it", "  text=line *"])


def test_one_round_claims_no_uncertainty(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(SLEEPY.replace("== 2", "== 1"))
    quick.runpytest("--energy-report", "--energy-rounds=1").assert_outcomes(passed=1)
    for name, metric in read_report()["records"][0]["metrics"].items():
        if metric["value"] is not None and name != "peak_memory_bytes":
            assert metric["uncertainty"] is None, name
            assert metric["reason"] == "one round shows no scatter: uncertainty unknown"


def test_hooks_receive_and_replace_values(quick: pytest.Pytester, read_report: Read) -> None:
    conftest = quick.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
import msgspec
def pytest_llenergy_record(item, record):
    return msgspec.structs.replace(record, reason="seen by a hook")
def pytest_llenergy_report(config, report):
    print("REPORT", len(report.records))
"""
    )
    quick.makepyfile(SLEEPY)
    result = quick.runpytest("--energy-report", "-s")
    result.stdout.fnmatch_lines(["*REPORT 1*"])
    assert read_report()["records"][0]["reason"] == "seen by a hook"


def test_ended_before_setup_by_another_plugin_has_a_record(
    quick: pytest.Pytester, read_report: Callable[..., dict[str, Any]]
) -> None:
    quick.makeconftest(
        TEN_WATTS
        + """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    pytest.skip("not today")
    yield
"""
    )
    quick.makepyfile("def test_it(energy): energy(int)")
    # In a process in which nothing has been measured before. pytest's own logging fails by such a plugin.
    result = quick.runpytest_subprocess("--energy-report", "-p", "no:logging")
    result.assert_outcomes(skipped=1)
    (record,) = read_report()["records"]
    assert (record["status"], record["reason"]) == ("skipped", "not today")
