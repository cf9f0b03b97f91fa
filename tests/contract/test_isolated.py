# SPDX-License-Identifier: Apache-2.0
"""Plain tests with a mark gpus, each in a process of its own, on simulated boards."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import signal
import sys
from xml.etree import ElementTree

import pytest

from tests.nvml_sim import Board, World

from .conftest import GiveBoards
from .project import Outcome, Project, wait_for


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    return give_boards(project, [Board(name="NVIDIA H200"), Board(name="NVIDIA H200")])


def test_it_sees_its_gpus_and_no_others(project: Project, world: World) -> None:
    project.write(
        "test_p.py",
        """
import json, os, pytest

def note(name, *more):
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "RANK", "WORLD_SIZE")
    with open(name, "w") as file:
        json.dump([os.getpid(), *map(os.environ.get, variables), *more], file)

def test_plain():
    note("plain")

@pytest.mark.gpus(1)
def test_mark():
    note("mark")

@pytest.mark.gpus(2)
class TestClass:
    def test_fixture(self, gpus):
        note("fixture", gpus.visible_devices, gpus.names)

def test_after():
    note("after")
""",
    )
    project.pytest().check(passed=4)
    plain, mark, fixture, after = (
        json.loads(project.text(name)) for name in ("plain", "mark", "fixture", "after")
    )
    one, both = world.board(0).uuid, ",".join(world.board(index).uuid for index in range(2))
    assert plain == after
    assert plain[1:] == [None] * 5
    assert mark[1:] == [one, "PCI_BUS_ID", one, None, None]
    assert fixture[1:] == [both, "PCI_BUS_ID", both, None, None, both, ["NVIDIA H200"] * 2]
    assert len({plain[0], mark[0], fixture[0]}) == 3
    assert not project.survivors()


def test_a_crash_fails_that_test_alone_in_its_phase(project: Project, world: World) -> None:
    project.write(
        "test_c.py",
        """
import ctypes, os, pytest
pytestmark = pytest.mark.gpus(1)

@pytest.fixture
def crashing():
    print("setting up")
    os._exit(7)

@pytest.fixture
def leaving():
    yield
    os.kill(os.getpid(), 9)

def test_segfault():
    print("said before")
    ctypes.string_at(0)

def test_setup(crashing): pass
def test_teardown(leaving): pass
@pytest.mark.xfail
def test_expected(): os._exit(1)
def test_passes(): pass
""",
    )
    ended = project.pytest("-rA", "--junit-xml=j.xml").check(passed=2, failed=1, error=2, xfailed=1)
    assert re.search(r"FAILED test_c.py::test_segfault - .*", ended.out)
    assert "during call: was killed by SIGSEGV" in ended.text
    assert "said before" in ended.out
    # The stack.
    assert re.search(r"line \d+ in test_segfault", ended.out)
    assert "during setup: ended with exit code 7" in ended.text
    assert "setting up" in ended.out
    assert "during teardown: was killed by SIGKILL" in ended.text
    # What it printed is shown however output is captured.
    for capture in ("no", "tee-sys"):
        assert "said before" in project.pytest("-k", "segfault", f"--capture={capture}").check(failed=1).out
    assert not project.survivors()


SUITE = """
import os, sys, unittest, warnings
import pytest
from helper import TOKEN

pytestmark = pytest.mark.gpus(1, isolate=ISOLATE)

@pytest.fixture(scope="session")
def session_thing(tmp_path_factory):
    return tmp_path_factory.mktemp("s")

@pytest.fixture(scope="module", params=["a", "b"])
def module_thing(request, session_thing):
    assert session_thing.is_dir()
    return request.param

@pytest.fixture(autouse=True)
def each(request):
    yield
    print("after", request.node.name)

@pytest.fixture
def failing():
    raise ValueError("in the fixture")

@pytest.fixture
def failing_later():
    yield
    raise ValueError("in the teardown")

def test_ok(session_thing, module_thing, from_conftest):
    print("out", module_thing, from_conftest, TOKEN)
    print("err", file=sys.stderr)
    os.system("echo from another process")

@pytest.mark.parametrize("text", ["", "a b::[x]", "é/@", "\\x00", "x" * 300])
def test_ids(text, record_property):
    record_property("text", text)
    record_property("object", object)

def test_fails(monkeypatch):
    monkeypatch.setenv("X", "1")
    assert {"a": 1, "b": [1, 2]} == {"a": 1, "b": [1, 3]}

def test_error(failing): pass
def test_error_later(failing_later): print("body")
def test_skips(): pytest.skip("not now")
@pytest.mark.skip(reason="never")
def test_skipped(): pass
@pytest.mark.skipif("sys.platform == 'linux'", reason="here")
def test_skipped_here(): pass
@pytest.mark.xfail(reason="known", raises=ZeroDivisionError)
def test_xfails(): 1 / 0
@pytest.mark.xfail(raises=ZeroDivisionError)
def test_other_error(): raise KeyError("k")
@pytest.mark.xfail
def test_xpasses(): pass
@pytest.mark.xfail(strict=True)
def test_xpasses_strictly(): pass
@pytest.mark.xfail(run=False)
def test_not_run(): os._exit(1)
@pytest.mark.usefixtures("from_conftest")
def test_warns():
    warnings.warn("mind this")
    warnings.warn("and that", DeprecationWarning)
    class Own(UserWarning): pass
    warnings.warn("mine", Own)
def test_imports():
    pytest.importorskip("no_such_module_here")
def test_exits(): sys.exit(3)
def test_stops_itself(capfd, caplog, tmp_path, worker_like):
    print("captured")
    assert capfd.readouterr().out == "captured\\n"
    (tmp_path / "f").write_text("x")
def test_thread():
    import threading
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
def test_parts(subtests):
    for n in range(3):
        with subtests.test(n=n):
            assert n != 1

@pytest.fixture(scope="class")
def count():
    return []

class TestClass:
    @pytest.mark.parametrize("n", [1, 2])
    def test_one(self, count, n):
        count.append(n)
        assert n in count
    class TestInner:
        def test_deep(self): print("deep")

class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.value = 5
    def setUp(self): self.own = 6
    def test_case(self): self.assertEqual((self.value, self.own), (5, 6))
    def test_case_fails(self): self.assertEqual(self.value, 4)
    @unittest.skip("no")
    def test_case_skipped(self): pass
    @unittest.expectedFailure
    def test_case_expected(self): self.fail()
"""

SUITE_CONFTEST = """
import logging, pytest
pytest_plugins = ["plug"]

def pytest_addoption(parser):
    parser.addoption("--own-option", default="none")
    parser.addini("own_ini", "")

@pytest.fixture
def from_conftest(request):
    return request.config.getoption("--own-option") + request.config.getini("own_ini")

def pytest_sessionstart(session):
    session.started = True

def pytest_collection_modifyitems(items):
    for item in items:
        item.user_properties.append(("added", item.name[:9]))

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, "report_" + report.when, report)
    report.sections.append(("hook", f"{report.when} {item.session.started}"))
    return report
"""


def read_results(project: Project, out: Outcome) -> list[str]:
    """Return what JUnit's file says of each test, and the last lines of pytest."""
    found: list[object] = []
    for case in ElementTree.parse(project.path / "j.xml").iter("testcase"):
        parts = [(each.tag, dict(each.attrib), each.text) for each in case.iter() if each is not case]
        found.append((case.get("classname"), case.get("name"), sorted(map(str, parts))))
    found += [line for line in out.lines if re.match(r"(PASSED|FAILED|ERROR|SKIPPED|X|SUBFAIL)", line)]
    start = next((n for n, line in enumerate(out.lines) if "warnings summary" in line), len(out.lines))
    end = next((n for n, line in enumerate(out.lines) if "docs.pytest.org" in line), len(out.lines))
    found += out.lines[start:end]
    # Where a process keeps its files, what is at which address, and how long it took.
    variable = r"0x[0-9a-f]+|isolated\d+/|Thread-\d+|pytest-\d+/|isolate=\w+|(?<=n=)'|(?<=n='1)'|\d+\.\d+s\b"
    return [re.sub(variable, "", str(each)) for each in found]


def test_outcomes_are_those_of_the_process(project: Project, world: World) -> None:
    project.write("pytest.ini", "[pytest]\nown_ini = set\naddopts = --own-option=given\npythonpath = lib\n")
    project.write("lib/helper.py", "TOKEN = 'token'\n")
    project.write(
        "lib/plug.py",
        "import pytest\n@pytest.fixture\ndef worker_like(pytestconfig): return pytestconfig.rootpath\n",
    )
    project.write("conftest.py", SUITE_CONFTEST)
    results = []
    for isolate in (False, True):
        project.write("sub/test_suite.py", SUITE.replace("ISOLATE", str(isolate)))
        arguments = ["--junit-xml=j.xml", "-o", "junit_logging=all", "-o", "junit_family=xunit1"]
        ended = project.pytest("-rA", "-v", *arguments)
        assert ended.ret == 1, ended.out + ended.err
        results.append(read_results(project, ended))
    assert not list(difflib.unified_diff(results[0], results[1], lineterm="", n=0))


def test_options_of_the_run_hold(project: Project, world: World) -> None:
    """Those that choose tests and end the run, others' conftest files, and --import-mode=importlib."""
    project.env["PYTEST_ADDOPTS"] = "-p llenergy"
    marked = "import pytest\npytestmark = pytest.mark.gpus(1)\n"
    project.write("a/conftest.py", "def pytest_addoption(parser): parser.addoption('--of-a')\n")
    project.write(
        "a/test_x.py",
        marked + "def test_a(): assert 0\ndef test_b(): print('said')\ndef test_c(): assert 0\n",
    )
    project.write(
        "b/test_x.py", marked + "def test_d(pytestconfig): assert pytestconfig.option.of_a == '1'\n"
    )
    common = ["--import-mode=importlib", "a", "b", "--of-a=1"]
    ended = project.pytest(*common, "-k", "test_a or test_b or test_d", "--deselect=a/test_x.py::test_b")
    assert ended.counts == {"failed": 1, "passed": 1}, ended.out
    project.pytest(*common, "-x").check(failed=1)
    project.pytest(*common, "--lf").check(failed=1)
    assert "said" in project.pytest("a/test_x.py::test_b", "-s", "--of-a=1").out


def test_a_suite_may_turn_warnings_into_errors(project: Project) -> None:
    """Also those of pytest about the process of a test."""
    project.write("pytest.ini", "[pytest]\nfilterwarnings = error\n")
    mark = "@pytest.mark.gpus(1, fallback='cpu', isolate=True)"
    project.write("test_w.py", f"import pytest\n{mark}\ndef test_it(): pass\n")
    project.pytest().check(passed=1)


def test_workers_of_xdist_isolate_their_tests(project: Project, world: World) -> None:
    project.plugin("xdist")
    project.write(
        "test_w.py",
        """
import os, time, pytest

@pytest.mark.gpus(1)
@pytest.mark.parametrize("n", range(4))
def test_it(n, worker_id, tmp_path, record_property, gpus):
    (tmp_path / "lease").write_text(gpus.visible_devices)
    record_property("seen", f"{worker_id} {os.getppid()}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus.visible_devices
    time.sleep(0.5)
    assert (tmp_path / "lease").read_text() == gpus.visible_devices
    if n == 3:
        os._exit(1)
""",
    )
    ended = project.pytest("-n2", "--junit-xml=j.xml").check(passed=3, failed=1)
    assert "crashed" not in ended.text
    seen = {each.get("value") for each in ElementTree.parse(project.path / "j.xml").iter("property")}
    # Each worker has a supervisor of its own.
    assert {each.split()[0] for each in map(str, seen)} == {"gw0", "gw1"}
    assert len(seen) == 2


def test_a_time_limit_ends_the_test_and_not_the_run(project: Project, world: World) -> None:
    """That of pytest-timeout in both ways, and --energy-timeout."""
    project.plugin("pytest_timeout")
    project.write(
        "test_t.py",
        """
import time, pytest
pytestmark = pytest.mark.gpus(1)

def hang(name):
    print("hanging in", name)
    time.sleep(300)

@pytest.mark.timeout(1, method="signal", func_only=True)
def test_signal(): hang("signal")
@pytest.mark.timeout(1, method="thread", func_only=True)
def test_thread(): hang("thread")
def test_no_limit(): hang("none")
def test_next(): pass
""",
    )
    ended = project.pytest("--energy-timeout=8").check(failed=3, passed=1)
    for name, limit in (("signal", ">1.0s"), ("thread", "Timeout"), ("none", "during call")):
        assert f"hanging in {name}" in ended.out
        assert limit in ended.text
    assert ended.text.count("in hang") >= 2
    assert not project.survivors()


def test_ctrl_c_ends_the_process_and_the_run(project: Project, world: World) -> None:
    project.write(
        "test_i.py",
        """
import pathlib, subprocess, time, pytest
pytestmark = pytest.mark.gpus(1)
def test_before(): pass
def test_long():
    subprocess.Popen(["sleep", "300"])
    pathlib.Path("running").touch()
    time.sleep(300)
def test_never(): pathlib.Path("ran").touch()
""",
    )
    process = project.start_pytest("test_i.py")
    wait_for(lambda: project.exists("running"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out + err
    assert "1 passed" in out
    assert "KeyboardInterrupt" in out
    assert "INTERNALERROR" not in out
    assert not project.exists("ran")
    assert not project.survivors()


CHANGES = """
import os, pytest

@pytest.fixture
def changes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

each = pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.gpus(1, isolate=bool(n))) for n in range(2)]
)

@each
def test_fixture(n, changes): open("ran", "w")

@each
def test_body(n): del os.environ["CUDA_VISIBLE_DEVICES"]

@each
def test_neither(n): pass

@pytest.mark.gpus(1)
def test_measured(energy_meter, changes): open("ran", "w")
"""


def test_a_fixture_that_changes_what_is_visible_is_an_error(project: Project, world: World) -> None:
    """In each process, and before anything is measured."""
    project.write("test_v.py", CHANGES)
    ended = project.pytest("test_v.py").check(error=3, failed=2, passed=2)
    uuid = world.board(0).uuid
    assert ended.text.count(f"CUDA_VISIBLE_DEVICES was '{uuid}'") >= 5
    assert ended.text.count("is now '0'") >= 3
    assert ended.text.count("is now None") >= 2
    assert not project.exists("ran")
    # The next test of a process that keeps its GPUs has them again.
    selected = "-k", "0 and (body or neither)"
    project.pytest("test_v.py", "--energy-worker-gpus=1", *selected).check(failed=1, passed=1)


def test_isolate_chooses_the_process(project: Project, world: World) -> None:
    project.write(
        "test_i.py",
        """
import os, pytest
MAIN = os.getpid()
with open("main", "a") as file:
    file.write("x")
@pytest.fixture(scope="session")
def main(): return os.getpid()

@pytest.mark.gpus(1, isolate=False)
def test_inside(gpus):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus.visible_devices
    assert os.path.getsize("main") == 1

@pytest.mark.gpus(1, fallback="cpu")
def test_fallback(gpus): assert os.path.getsize("main") == 1 + bool(gpus.uuids)

@pytest.mark.gpus(1, fallback="cpu", isolate=True)
def test_may_crash(gpus):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus.visible_devices
    os._exit(5)

@pytest.mark.gpus(1)
def test_needs_gpus(): pass

@pytest.mark.skip(reason="not today")
@pytest.mark.gpus(1)
def test_skipped(): pass
""",
    )
    ended = project.pytest("-rs").check(passed=3, failed=1, skipped=1)
    assert "exit code 5" in ended.text
    (project.path / "main").unlink()
    ended = project.pytest("-rs", CUDA_VISIBLE_DEVICES="").check(passed=1, failed=1, skipped=3)
    # One of the two processes that import the file is pytest's.
    assert project.text("main") == "xx"


#: Fixtures and values for which the argument isolate has no effect, and a word of the line about each.
WITHOUT_EFFECT = (
    ("isolate=False", "workers", "runs in ranks"),
    ("isolate=True", "energy", "runs in ranks"),
    ("isolate=True", "energy_meter", "pytest's process"),
    ("isolate=3", "gpus", "isolate is 3"),
)


def test_where_isolate_has_no_effect_is_a_collection_error(project: Project) -> None:
    for number, (mark, fixture, _) in enumerate(WITHOUT_EFFECT):
        source = f"import pytest\n@pytest.mark.gpus(1, {mark})\ndef test_it({fixture}): pass\n"
        project.write(f"test_{number}.py", source)
    ended = project.pytest()
    assert ended.ret == pytest.ExitCode.INTERRUPTED
    ended.check(error=len(WITHOUT_EFFECT))
    for number, (_, _, said) in enumerate(WITHOUT_EFFECT):
        assert re.search(rf"test_{number}\.py::test_it.*{said}", ended.out), ended.out


@pytest.mark.parametrize("options", [[], ["--energy-worker-gpus=1", "--max-worker-restart=20"]], ids=len)
@pytest.mark.slow
def test_two_hundred_tests_see_their_leases(
    project: Project, give_boards: GiveBoards, options: list[str]
) -> None:
    """On four boards, by four workers; twenty of them crash, alone or with their worker."""
    give_boards(project, [Board(name="NVIDIA H200")] * 4)
    project.plugin("xdist")
    project.write(
        "test_many.py",
        """
import json, os, random, signal, time, uuid, pytest
CRASHING = set(random.Random(SEED).sample(range(200), 20))

@pytest.mark.gpus(1)
@pytest.mark.parametrize("n", range(200))
def test_it(n, gpus):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus.visible_devices
    begin = time.monotonic()
    if n in CRASHING:
        random.choice([lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: os._exit(3), os.abort])()
    time.sleep(0.02)
    with open(f"seen-{n}", "w") as file:
        json.dump([gpus.visible_devices, begin, time.monotonic()], file)
""".replace("SEED", str(os.getpid())),
    )
    command = [sys.executable, "-m", "pytest", "-n4", "-q", "--tb=line", *options]
    ended = project.run(*command, timeout_s=1200).check(passed=180, failed=20)
    assert ("crashed while running" in ended.text) == bool(options)
    by_board: dict[str, list[tuple[float, float]]] = {}
    for path in project.path.glob("seen-*"):
        board, begin, end = json.loads(path.read_text())
        by_board.setdefault(board, []).append((begin, end))
    assert len(by_board) == 4
    for spans in by_board.values():
        spans.sort()
        assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    assert not project.survivors()
