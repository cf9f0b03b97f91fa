# SPDX-License-Identifier: Apache-2.0
"""Remote xdist workers: in other directories, with other Pythons, on other hosts over a socket."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import execnet
import pytest

from pytest_llenergy.plugin.xdist import WorkerInput, whereabouts

from .suites import Read
from .test_xdist_modes import states, tables

pytestmark = pytest.mark.usefixtures("few_plugins", "no_xdist")

SERVER = Path(execnet.__file__).parent / "script" / "socketserver.py"

SUITE = """
import time
def test_it(energy):
    energy(time.sleep, 0.02)
def test_other(energy):
    energy(time.sleep, 0.02)
"""

#: Source of a hook that ends the first worker when its first test starts.
DIES_AT_ONCE = """
import os
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid):
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        os._exit(3)
"""

#: Source of a hook that kills the controller when all tests have run.
KILLED_WRITING = """
import os
def pytest_llenergy_report(config, report):
    os.kill(os.getpid(), 9)
"""

#: Source that gives workers another version of the package and an unknown input.
OTHER_VERSION = """
import os, pytest_llenergy
if os.environ.get("PYTEST_XDIST_WORKER"):
    pytest_llenergy.__version__ = "9.8.7"
@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_configure_node(node):
    node.workerinput["llenergy"]["unheard-of"] = 1
"""

#: Command prefix that runs a process under another host name, in a UTS namespace.
OTHER_HOST = ("unshare", "--uts", "sh", "-c", 'hostname far-away && exec "$@"', "sh")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a host name of one's own needs root"
)

Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a socket server of execnet and returns the spec of a worker there."""
    running: list[subprocess.Popen[str]] = []

    def start(*before: str, python: str = sys.executable) -> str:
        place = tmp_path / f"remote{len(running)}"
        place.mkdir()
        process = subprocess.Popen(
            [*before, python, "-u", str(SERVER), "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, cwd=place
        )
        running.append(process)
        assert process.stdout is not None
        port = re.search(r"'127\.0\.0\.1', (\d+)", process.stdout.readline())
        assert port is not None
        return f"socket=127.0.0.1:{port[1]}//chdir={place}"

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def project(quick: pytest.Pytester) -> Path:
    """Return a project directory that xdist can copy."""
    directory = quick.mkdir("proj")
    for name in ("tox.ini", "conftest.py"):
        (quick.path / name).rename(directory / name)
    (directory / "test_it.py").write_text(SUITE)
    return directory


def run(pytester: pytest.Pytester, project: Path, *args: str) -> pytest.RunResult:
    # -d is --dist=load.
    hand_out = () if any(arg.startswith("--dist") for arg in args) else ("-d",)
    return pytester.runpytest_subprocess(
        "--energy-report", *hand_out, f"--rsyncdir={project}", str(project), "-p", "no:cacheprovider", *args
    )


def flags(report: dict[str, Any]) -> set[str]:
    return {flag["name"] for record in report["records"] for flag in record["flags"]}


@pytest.mark.slow
def test_several_tx_options_give_one_record_per_test(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(SUITE)
    result = quick.runpytest_subprocess("--energy-report", "-d", "--tx=2*popen", "--tx=popen")
    result.stdout.fnmatch_lines(["*3 workers*"])
    assert states(read_report()) == {"test_it": "measured", "test_other": "measured"}
    assert "elsewhere" not in flags(read_report())


def test_workers_in_another_directory_send_their_records(
    quick: pytest.Pytester, project: Path, read_report: Read, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    result = run(quick, project, f"--tx=2*popen//chdir={tmp_path / 'there'}")
    result.assert_outcomes(passed=2)
    report = read_report()
    assert states(report) == {"test_it": "measured", "test_other": "measured"}
    assert "elsewhere" not in flags(report)
    assert tables(result) == 1


@pytest.mark.slow
@pytest.mark.parametrize("door", [False, True], ids=["chdir", "via"])
def test_workers_in_another_directory_compare_with_the_baseline(
    quick: pytest.Pytester, project: Path, read_report: Read, tmp_path: Path, door: bool
) -> None:
    """The path of the baseline is relative to the directory of the controller."""
    (tmp_path / "there").mkdir()
    place = f"popen//chdir={tmp_path / 'there'}"
    specs = [f"--px=id=door//{place}", "--tx=popen//via=door"] if door else [f"--tx={place}"]
    run(quick, project, *specs, "--energy-report=base.json").assert_outcomes(passed=2)
    run(quick, project, *specs, "--energy-compare=base.json").assert_outcomes(passed=2)
    report = read_report()
    assert states(report) == {"test_it": "measured", "test_other": "measured"}
    assert [len(record["comparisons"]) for record in report["records"]] == [1, 1]
    assert report["baseline"]["absent"] == []


@pytest.mark.slow
def test_socket_worker_on_this_host_has_no_flag(
    quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
) -> None:
    result = run(quick, project, f"--tx={serve()}")
    result.assert_outcomes(passed=2)
    report = read_report()
    assert states(report) == {"test_it": "measured", "test_other": "measured"}
    assert report["environment"]["host"]["name"] == whereabouts()[0]
    assert "elsewhere" not in flags(report)


@needs_root
class TestOtherHosts:
    def test_report_names_the_host_that_measured(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        result = run(quick, project, f"--tx={serve(*OTHER_HOST)}")
        result.assert_outcomes(passed=2)
        report = read_report()
        assert states(report) == {"test_it": "measured", "test_other": "measured"}
        assert report["environment"]["host"]["name"] == "far-away"
        for record in report["records"]:
            (flag,) = [flag for flag in record["flags"] if flag["name"] == "elsewhere"]
            assert flag["detail"].startswith("measured on far-away with Python ")
            assert f"started on {whereabouts()[0]} with" in flag["detail"]
        result.stdout.fnmatch_lines(["2 tests were measured on far-away with Python *"])

    @pytest.mark.slow
    def test_report_names_two_hosts_with_the_same_hardware(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        result = run(quick, project, f"--tx={serve(*OTHER_HOST)}", f"--tx={serve()}", "--dist=each")
        result.assert_outcomes(passed=4)
        report = read_report()
        assert len(states(report)) == 4
        hosts = report["environment"]["host"]["name"].split(", ")
        assert sorted(hosts) == sorted(["far-away", whereabouts()[0]])
        elsewhere = [
            record["id"].partition("@")[2]
            for record in report["records"]
            if any(flag["name"] == "elsewhere" for flag in record["flags"])
        ]
        assert elsewhere == ["gw0", "gw0"]

    @pytest.mark.slow
    def test_report_of_hosts_with_different_hardware_has_no_environment(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        """A report has one environment; naming either host would permit invalid comparisons."""
        one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
        specs = [f"--tx={serve(*OTHER_HOST, *one_core)}", f"--tx={serve()}"]
        result = run(quick, project, *specs, "--dist=each")
        result.assert_outcomes(passed=4)
        report = read_report()
        assert report["environment"] is None
        result.stdout.fnmatch_lines(["tests ran on different hardware (cores: *"])

    @pytest.mark.slow
    def test_worker_on_another_host_compares_with_the_baseline(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        """Only the controller has the baseline file."""
        run(quick, project, f"--tx={serve(*OTHER_HOST)}", "--energy-save=base").assert_outcomes(passed=2)
        (project / ".llenergy").rename(quick.path / "elsewhere")
        again = run(quick, project, f"--tx={serve(*OTHER_HOST)}", "--energy-compare=elsewhere/base.json")
        again.assert_outcomes(passed=2)
        report = read_report()
        assert [len(record["comparisons"]) for record in report["records"]] == [1, 1]
        assert {record["comparisons"][0]["reason"] for record in report["records"]} == {
            "2 base and 2 head rounds; a verdict needs at least 4 of each"
        }
        assert report["baseline"]["side"]["origin"] == "elsewhere/base.json"

    @pytest.mark.slow
    def test_crash_on_another_host_is_recorded(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        (project / "test_it.py").write_text(SUITE + "def test_z(energy):\n    import os\n    os._exit(1)\n")
        run(quick, project, f"--tx={serve(*OTHER_HOST)}", "--max-worker-restart=0")
        assert states(read_report()) == {"test_it": "measured", "test_other": "measured", "test_z": "crashed"}

    @pytest.mark.slow
    def test_worker_that_crashes_before_its_first_test_still_names_its_host(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        """No test ran on the host of the controller, so its hardware is not in the report."""
        with (project / "conftest.py").open("a") as conftest:
            conftest.write(DIES_AT_ONCE)
        one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
        specs = [f"--tx={serve(*OTHER_HOST, *one_core)}" for _ in range(2)]
        result = run(quick, project, *specs, "--max-worker-restart=0")
        report = read_report()
        assert sorted(states(report).values()) == ["crashed", "measured"]
        assert report["environment"]["host"]["name"] == "far-away"
        result.stdout.no_fnmatch_line("*tests ran on different hardware*")

    @pytest.mark.slow
    def test_workers_behind_a_proxy_name_their_host(
        self, quick: pytest.Pytester, project: Path, read_report: Read, serve: Serve
    ) -> None:
        proxy, _, place = serve(*OTHER_HOST).partition("//")
        specs = [f"--px=id=door//{proxy}", f"--tx=2*popen//via=door//{place}"]
        run(quick, project, *specs).assert_outcomes(passed=2)
        report = read_report()
        assert states(report) == {"test_it": "measured", "test_other": "measured"}
        assert report["environment"]["host"]["name"] == "far-away"

    def test_journal_of_a_killed_controller_names_the_host_that_measured(
        self, quick: pytest.Pytester, project: Path, serve: Serve
    ) -> None:
        from pytest_llenergy.report.store import read_report as read

        with (project / "conftest.py").open("a") as conftest:
            conftest.write(KILLED_WRITING)
        run(quick, project, f"--tx={serve(*OTHER_HOST)}")
        (journal,) = quick.path.glob("*.jsonl")
        left = read(journal)
        assert left.environment is not None
        assert left.environment.host.name == "far-away"
        assert len(left.records) == 2

    @pytest.mark.slow
    def test_journal_of_a_killed_controller_names_both_hosts(
        self, quick: pytest.Pytester, project: Path, serve: Serve
    ) -> None:
        from pytest_llenergy.report.store import read_report as read

        with (project / "conftest.py").open("a") as conftest:
            conftest.write(KILLED_WRITING)
        run(quick, project, f"--tx={serve(*OTHER_HOST)}", f"--tx={serve()}", "--dist=each")
        (journal,) = quick.path.glob("*.jsonl")
        left = read(journal)
        assert left.environment is not None
        assert sorted(left.environment.host.name.split(", ")) == sorted(["far-away", whereabouts()[0]])
        assert len(left.records) == 4


class TestOtherPythons:
    @pytest.fixture
    def other(self, tmp_path: Path) -> str:
        """Create a virtual environment with the packages of this one; return its Python."""
        place = tmp_path / "other"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        (site,) = place.glob("lib/python*/site-packages")
        paths = [path for path in sys.path if path and Path(path).is_dir()]
        (site / "all.pth").write_text("\n".join(paths) + "\n")
        return str(place / "bin" / "python")

    @pytest.mark.slow
    def test_records_of_another_python_are_flagged(
        self, quick: pytest.Pytester, read_report: Read, other: str
    ) -> None:
        quick.makepyfile(SUITE)
        specs = ["--tx=popen//id=own", f"--tx=popen//id=other//python={other}"]
        result = quick.runpytest_subprocess("--energy-report", "--dist=each", *specs)
        result.assert_outcomes(passed=4)
        report = read_report()
        names = {f"{name}@{worker}" for name in ("test_it", "test_other") for worker in ("own", "other")}
        assert set(states(report)) == names
        details = {
            record["id"]: flag["detail"]
            for record in report["records"]
            for flag in record["flags"]
            if flag["name"] == "elsewhere"
        }
        assert {name.partition("@")[2] for name in details} == {"other"}
        assert all(f" in {Path(other).parents[1]};" in detail for detail in details.values())


@pytest.mark.usefixtures("no_xdist")
class TestOtherVersions:
    """Controller and workers with different versions of this package."""

    def test_a_version_mismatch_is_one_line_that_names_both_versions(self, quick: pytest.Pytester) -> None:
        with (quick.path / "conftest.py").open("a") as conftest:
            conftest.write(OTHER_VERSION)
        quick.makepyfile(SUITE)
        result = quick.runpytest_subprocess("--energy-report", "-n1")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        (line,) = [each for each in result.errlines + result.outlines if "install the same" in each]
        assert line.startswith("ERROR: worker gw0 has pytest-llenergy 9.8.7, this run was started with ")
        assert "Traceback" not in result.stdout.str() + result.stderr.str()
        assert not (quick.path / "energy.json").exists()

    @pytest.mark.slow
    def test_run_without_energy_tests_ignores_the_version(self, quick: pytest.Pytester) -> None:
        with (quick.path / "conftest.py").open("a") as conftest:
            conftest.write(OTHER_VERSION)
        quick.makepyfile("def test_it():\n    pass\n")
        quick.runpytest_subprocess("--energy-report", "-n1").assert_outcomes(passed=1)


def test_only_workers_elsewhere_have_the_flag() -> None:
    assert WorkerInput(home=whereabouts()).elsewhere is None
    assert WorkerInput().flags == []
    host, *others = whereabouts()
    (flag,) = WorkerInput(home=("another", *others)).flags
    assert f"measured on {host} with Python" in flag.detail
