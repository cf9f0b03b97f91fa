# SPDX-License-Identifier: Apache-2.0
"""Ways to start pytest: with -p, from another directory, from a program, with a debugger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ONE, FinishedRun, RunSuite

ONLY_ONE = {("test_one", 1): "measured"}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("llenergy", ()),
        ("pytest_llenergy.plugin", ("-n2",)),
        pytest.param("llenergy", ("-n2",), marks=pytest.mark.slow),
        pytest.param("pytest_llenergy.plugin", (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_plugin_loads_by_name_without_autoload(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    quick.makepyfile(ONE)
    others = ("-p", "xdist") if workers else ()
    result = quick.runpytest_subprocess("-p", name, *others, "--energy-report", *workers)
    result.assert_outcomes(passed=2)
    assert FinishedRun(result, quick.path).statuses("energy.json") == {("test_one", 1): "measured"}


def test_a_run_from_another_directory_has_the_same_records(
    run_suite: RunSuite, pytester: pytest.Pytester
) -> None:
    elsewhere = pytester.mkdir("elsewhere")
    ran = run_suite(ONE, f"--rootdir={elsewhere}")
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == ONLY_ONE


def test_tests_of_an_installed_package_are_recorded(
    run_suite: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytester.mkpydir("package")
    package.joinpath("test_inner.py").write_text(ONE)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    ran = run_suite({"unused": ""}, "--pyargs", "package")
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == ONLY_ONE


#: Runs pytest twice in one process, as a notebook may.
TWICE = """
import sys, pytest
for name in ("one", "two"):
    code = pytest.main(["-p", "llenergy", f"--energy-report={name}.json", f"test_{name}.py", *sys.argv[1:]])
    assert code == 0, code
"""


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-p", "xdist", "-n1"), marks=pytest.mark.slow)], ids=str
)
def test_two_runs_in_one_process_do_not_affect_each_other(
    run_suite: RunSuite, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    ran = run_suite({"test_one": ONE, "test_two": ONE})
    assert len(ran.report()["records"]) == 2
    pytester.makepyfile(twice=TWICE)
    subprocess.run([sys.executable, "twice.py", *workers], cwd=ran.path, check=True, timeout=120)
    for name in ("one", "two"):
        (record,) = json.loads((ran.path / f"{name}.json").read_text())["records"]
        assert (record["id"], record["status"]) == (f"test_{name}.py::test_one", "measured")


FAILS = ONE + "def test_fails(energy):\n    energy(time.sleep, 0.05)\n    value = 41 + 1\n    assert False\n"

GATE = """
import pytest, time
@pytest.mark.energy_gate(budget="0.1 J")
def test_gate(energy):
    energy(time.sleep, 0.05)
"""


class TestDebugger:
    def test_pdb_without_a_terminal_ends_the_run(self, run_suite: RunSuite) -> None:
        """The run ends at once, as it does without the plugin."""
        ran = run_suite(FAILS, "--pdb")
        assert ran.result.ret == pytest.ExitCode.INTERRUPTED
        assert ran.statuses() == {("test_one", 1): "measured", ("test_fails", 1): "failed"}

    @pytest.mark.parametrize(("suite", "test"), [(FAILS, "test_fails"), (GATE, "test_gate")])
    def test_pdb_continues_to_the_next_test(
        self, run_suite: RunSuite, quick: pytest.Pytester, suite: str, test: str
    ) -> None:
        pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
        quick.makepyfile(test_it=suite)
        child = quick.spawn(
            f"{sys.executable} -m pytest -p llenergy --energy-report --pdb", expect_timeout=60
        )
        child.expect(r"\(Pdb\) ")
        child.sendline("p 40 + 2")
        child.expect("42")
        child.sendline("c")
        child.expect("energy report: energy.json")
        child.expect(pexpect.EOF)
        records = json.loads(Path(quick.path, "energy.json").read_text())["records"]
        assert {each["id"].partition("::")[2]: each["status"] for each in records}[test] == "failed"
