# SPDX-License-Identifier: Apache-2.0
"""Which tests share ranks: by rule, and without a look at what a test has left behind."""

from __future__ import annotations

import pytest

from .no_torch import without_torch

CONFTEST = """
import os
from pathlib import Path
import pytest
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def run(self):
        pass
    def result(self, _outcome):
        # The pid stands for a token.
        request = RequestTimeline(input_tokens=1, output_tokens=1)
        return Generation(texts=["x"], token_ids=[[os.getpid()]], requests=[request])

class Tiny:
    def load(self, model, options, context):
        return BackendInfo(name="tiny", version="1", model=model.label)
    def prepare(self, prompts, params):
        return Job()
    def synchronize(self):
        pass
    def close(self):
        pass

def pytest_llenergy_backends(config):
    return [BackendSpec("tiny", "conftest:Tiny", (), "", Capabilities(data=True))]

ROOT = Path(__file__).parent

@pytest.fixture
def note(request):
    def note(pid):
        with (ROOT / "pids").open("a") as file:
            print(pid, file=file)
    return note
"""

FUNCTIONS = """
import os, random, subprocess, threading, time
from pathlib import Path

def litter():
    os.environ["LEFT"] = "behind"
    del os.environ["PATH"]
    os.chdir("/")
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
    child = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True).pid
    return os.getpid(), child, random.random()

def look():
    return os.getpid(), os.environ.get("LEFT"), os.environ.get("PATH"), os.getcwd(), random.random()

drawn = []

def test_first(workers, note):
    (pid, _, number), = workers.run(litter)
    drawn.append(number)
    note(pid)

def test_second(workers, note):
    (pid, *found), = workers.run(look)
    assert found == [None, os.environ["PATH"], os.getcwd(), drawn[0]]
    note(pid)

def test_another_environment(workers, note, monkeypatch):
    monkeypatch.setenv("LEFT", "on purpose")
    assert workers.run(look)[0][1] == "on purpose"
    note(workers.run(os.getpid)[0])

def test_fails(workers, note):
    note(workers.run(os.getpid)[0])
    assert False

def test_after_the_failure(workers, note):
    (pid, child, _), = workers.run(litter)
    Path("child").write_text(str(child))
    note(pid)
"""

ANOTHER_FILE = """
import os
from pathlib import Path

def test_beside_another_file(energy_meter):
    with energy_meter("w"):
        Path("beside").write_text(str(Path("/proc", Path("child").read_text()).exists()))

def test_of_another_file(workers, note):
    note(workers.run(os.getpid)[0])
"""

TASKS = """
def test_passes(backend, note):
    note(backend.generate(["x"]).token_ids[0][0])

def test_fails(backend, note):
    note(backend.generate(["x"]).token_ids[0][0])
    assert False
"""


def shared(quick: pytest.Pytester, *options: str) -> str:
    """Run the tests; return a letter for the ranks of each, in their order."""
    with (quick.path / "conftest.py").open("a") as file:
        file.write(CONFTEST)
    without_torch(quick.path)
    quick.runpytest_subprocess("-p", "no:cacheprovider", *options)
    pids = (quick.path / "pids").read_text().split()
    return "".join(chr(ord("a") + list(dict.fromkeys(pids)).index(pid)) for pid in pids)


@pytest.mark.parametrize(
    ("isolation", "expected"), [("module", "aabcde"), ("run", "aabcdd"), ("test", "abcdef")]
)
def test_functions_share_ranks_within_their_file_until_a_test_fails(
    quick: pytest.Pytester, isolation: str, expected: str
) -> None:
    quick.makepyfile(test_1=FUNCTIONS, test_2=ANOTHER_FILE)
    options = () if isolation == "module" else (f"--energy-isolation={isolation}",)
    assert shared(quick, *options) == expected
    # What a file's functions leave behind does not run beside another file's measurement.
    assert (quick.path / "beside").read_text() == str(isolation == "run")


def test_tasks_of_a_backend_share_ranks_in_the_whole_run(quick: pytest.Pytester) -> None:
    quick.makepyfile(test_1=TASKS, test_2=TASKS)
    assert shared(quick, "--energy-backend=tiny") == "aaaa"
