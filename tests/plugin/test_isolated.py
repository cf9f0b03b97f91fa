# SPDX-License-Identifier: Apache-2.0
"""Plain tests with a mark gpus in processes of their own: unusual tests, as black boxes."""

from __future__ import annotations

import pytest

from tests.contract.conftest import GiveBoards, give_boards, project, shared
from tests.contract.project import Project
from tests.nvml_sim import Board, World

__all__ = ["give_boards", "project", "shared"]


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    return give_boards(project, [Board(), Board()])


def test_exit_in_a_test_ends_the_run(project: Project, world: World) -> None:
    marked = "import pytest\npytestmark = pytest.mark.gpus(1)\n"
    project.write("test_e.py", marked + "def test_a(): pytest.exit('enough', 9)\ndef test_b(): pass\n")
    ended = project.pytest("test_e.py")
    assert ended.ret == 9
    assert "enough" in ended.text


def test_a_test_that_cannot_be_found_again_is_one_line(project: Project, world: World) -> None:
    project.write(
        "test_r.py",
        "import os, pytest\n@pytest.mark.gpus(1)\n@pytest.mark.parametrize('n', [os.getpid()])\n"
        "def test_it(n): pass\n@pytest.mark.gpus(1)\ndef test_next(): pass\n",
    )
    project.write(
        "test_q.py",
        "import os, pytest\npytestmark = pytest.mark.gpus(1)\n"
        "assert not os.environ.get('CUDA_VISIBLE_DEVICES')\ndef test_it(): pass\n",
    )
    ended = project.pytest().check(error=2, passed=1)
    assert "2 tests there, 0 of this name" in ended.text
    assert "assert not" in ended.out
    assert "isolate=False" in ended.text


def test_what_only_pytests_process_has_is_refused_in_one_line(project: Project, world: World) -> None:
    project.write(
        "test_l.py",
        """
import pytest
@pytest.mark.gpus(1)
@pytest.mark.parametrize("name", ["energy", "workers"])
def test_late(request, name): request.getfixturevalue(name)
@pytest.mark.gpus(1)
def test_debugged(): breakpoint()
@pytest.mark.gpus(1)
def test_fails(): assert 0
""",
    )
    ended = project.pytest("--pdb").check(failed=4)
    assert ended.text.count("among its arguments") == 2
    assert "isolate=False) runs it in pytest's process" in ended.text


def test_fixtures_of_pytests_process_end_where_they_would(project: Project, world: World) -> None:
    """Those that tests before it had set up; what a test leaves running ends with its process."""
    project.write(
        "test_f.py",
        """
import os, pathlib, subprocess, pytest

@pytest.fixture(scope="module")
def thing():
    yield
    pathlib.Path(f"ended-{os.environ.get('CUDA_VISIBLE_DEVICES')}").touch()
    raise ValueError("the module ends")

def test_plain(thing): pass

@pytest.mark.gpus(1)
def test_gpu():
    assert not list(pathlib.Path().glob("ended-*"))
    pathlib.Path("left").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
""",
    )
    project.write(
        "test_g.py",
        """
import os, pathlib

def test_next():
    assert [path.name for path in pathlib.Path().glob("ended-*")] == ["ended-None"]
    assert not os.path.exists("/proc/" + pathlib.Path("left").read_text())
""",
    )
    ended = project.pytest("--junit-xml=j.xml").check(passed=3, error=1)
    assert "ERROR at teardown of test_gpu" in ended.out
    assert "the module ends" in ended.out
    assert project.text("j.xml").count("<testcase ") == 3


def test_a_pytest_within_a_test_does_not_wait_for_that_test(project: Project, world: World) -> None:
    project.write("inner.py", "import pytest\n@pytest.mark.gpus(1, isolate=False)\ndef test_inner(): pass\n")
    project.write(
        "test_o.py",
        """
import pytest
@pytest.mark.gpus(2, isolate=False)
def test_outer(): assert pytest.main(["-q", "inner.py"]) == 1
""",
    )
    assert "a pytest within a test does not wait" in project.pytest("-s").check(passed=1).text
