# SPDX-License-Identifier: Apache-2.0
"""A directory with a user's test files, and the commands that a user runs in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

#: Programs that print a constant power, as an external power meter does.
WATTS = """
import sys, time
while True:
    print(sys.argv[1], flush=True)
    time.sleep(0.02)
"""

#: Few short rounds.
QUICK = "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\n"

#: The same, measured by simulated boards alone, whatever other counters the machine has.
BOARDS_ALONE = f"{QUICK}energy_meter = nvml\n"

#: A package that ranks import in place of torch, which takes seconds; these tests do not use it.
TORCH = """
import os
from types import SimpleNamespace
__version__ = "0"
def visible(): return [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
def zeros(size, device): pass
def set_num_threads(n): pass
def get_num_threads(): return 1
def manual_seed(seed): pass
class cuda:
    device_count = staticmethod(lambda: len(visible()))
    is_initialized = staticmethod(lambda: False)
    set_device = staticmethod(lambda device: None)
    get_device_properties = staticmethod(lambda index: SimpleNamespace(uuid=visible()[index][len("GPU-"):]))
"""
DISTRIBUTED = """
import os
def init_process_group(*args, **kwargs): pass
def barrier(): pass
def get_world_size(): return int(os.environ["WORLD_SIZE"])
def is_available(): return False
"""

MARKER = "CONTRACT_TEST_MARKER"


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    ret: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All output, in single spaces, so that wrapped lines do not matter."""
        return " ".join(f"{self.out}\n{self.err}".split())

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def counts(self) -> dict[str, int]:
        """How many tests passed, failed and so on, by pytest's last line."""
        last = next((line for line in reversed(self.lines) if re.search(r"\d+\.\d+s", line)), "")
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)", last)
        return {name.removesuffix("s") if name == "errors" else name: int(n) for n, name in found}

    def check(self, **counts: int) -> Outcome:
        """Fail, with the whole output, unless pytest counted this."""
        assert self.counts == counts, f"{self.counts} != {counts}\n{self.out}\n{self.err}"
        return self


class Ended(NamedTuple):
    """What became of a test: passed, failure, error or skipped, and why."""

    outcome: str
    why: str


def clean_environment() -> dict[str, str]:
    """Return the variables of this process without those of an outer pytest or CI."""
    dropped = ("PYTEST_", "LLENERGY_", "GITHUB_", "GITLAB_", "SLURM_", "CUDA_", "NVML_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    for name in ("CI", "COV_CORE_SOURCE", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "OMP_NUM_THREADS"):
        kept.pop(name, None)
    return kept


class Project:
    """A project of a user, with a lock directory and a cache of its own.

    Attributes:
        path: Its directory, in which commands run.
        env: Environment of its commands.
        mark: Marks its processes in their environment.
        said: What the last ``suite`` printed.
    """

    def __init__(self, directory: Path, models: Path) -> None:
        self.path = directory / "project"
        for name in ("project", "locks", "cache"):
            (directory / name).mkdir()
        self.locks = directory / "locks"
        # Models that were converted once serve all tests.
        (directory / "cache" / "models").symlink_to(models)
        self.mark = uuid.uuid4().hex
        self.said = ""
        self.started: list[subprocess.Popen[str]] = []
        self.env = {
            **clean_environment(),
            MARKER: self.mark,
            "COLUMNS": "80",
            "LLENERGY_LOCK_DIR": str(self.locks),
            "LLENERGY_CACHE_DIR": str(directory / "cache"),
            # Finding all installed plugins takes a third of a short run.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p llenergy -p no:cacheprovider",
        }
        self.write("pytest.ini", QUICK)
        self.write("watts.py", WATTS)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the project."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def plugin(self, *names: str) -> None:
        """Load other plugins, too."""
        self.env["PYTEST_ADDOPTS"] += "".join(f" -p {name}" for name in names)

    def without_torch(self) -> None:
        """Let ranks start without the seconds that torch takes to be imported."""
        self.write("torch/__init__.py", TORCH)
        self.write("torch/distributed.py", DISTRIBUTED)

    def meter(self, watts: float = 10.0) -> str:
        """Return the option for a power meter that always shows so many watts."""
        command = shlex.join([sys.executable, str(self.path / "watts.py"), str(watts)])
        return f"--energy-meter=command:{command}"

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, in front of a terminal as it were."""
        process = subprocess.Popen(
            # Background jobs ignore Ctrl-C, and programs under nohup that the terminal is closed.
            ["env", "--default-signal=INT,HUP", *command],
            cwd=self.path,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def start_pytest(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", "pytest", *args, **env)

    def run(
        self, *command: str, timeout_s: float = 400.0, env: Mapping[str, str] = MappingProxyType({})
    ) -> Outcome:
        """Run a command to its end."""
        with self.start(*command, **env) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill_all()
                out, err = process.communicate()
                raise AssertionError(f"{command} did not end in {timeout_s} s\n{out}\n{err}") from None
        return Outcome(process.returncode, out, err)

    def pytest(self, *args: str, **env: str) -> Outcome:
        return self.run(sys.executable, "-m", "pytest", *args, env=env)

    def suite(self, *args: str, **env: str) -> dict[str, Ended]:
        """Run pytest with a report, and return what became of each test, by name with parameters."""
        outcome = self.pytest("--energy-report", "--junit-xml=junit.xml", *args, **env)
        self.said = outcome.out
        if outcome.ret not in (0, 1):
            raise RuntimeError(f"pytest ended with {outcome.ret}\n{outcome.out}\n{outcome.err}")
        found = {}
        for case in ElementTree.parse(self.path / "junit.xml").iter("testcase"):
            result = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            message = "" if result is None else f"{result.get('message')}\n{result.text}"
            name = str(case.get("name"))
            found[name] = Ended("passed" if result is None else result.tag, " ".join(message.split()))
        return found

    def llenergy(self, *args: str, **env: str) -> Outcome:
        return self.run(str(Path(sys.executable).with_name("llenergy")), *args, env=env)

    def report(self, name: str = "energy.json") -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / name).read_text())
        return loaded

    def records(self, name: str = "energy.json") -> dict[str, dict[str, Any]]:
        """Return the records of a report by the name of the test function with its parameters."""
        return {each["id"].rpartition("::")[2]: each for each in self.report(name)["records"]}

    def text(self, name: str) -> str:
        return (self.path / name).read_text()

    def exists(self, *names: str) -> bool:
        return all((self.path / name).exists() for name in names)

    def processes(self) -> dict[int, str]:
        """Return the command lines of the project's living processes, whoever their parents are."""
        wanted = f"{MARKER}={self.mark}".encode()
        found = {}
        for process in Path("/proc").iterdir():
            with suppress(OSError, IndexError):
                if not process.name.isdigit():
                    continue
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and wanted in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return found

    def survivors(self, limit_s: float = 30.0) -> dict[int, str]:
        """Wait until no process of the project lives. Returns those that still do after the time limit."""
        end_s = time.monotonic() + limit_s
        while (found := self.processes()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """End everything that a failed test has left."""
        self.kill_all()
        for process in self.started:
            if process.returncode is None:
                process.communicate()

    def kill_all(self) -> None:
        for pid in self.processes():
            # It may end by itself meanwhile.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark a test that states the right behaviour, where today's is a known fault."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


def wait_for(condition: Callable[[], object], limit_s: float = 200.0) -> None:
    """Wait until something is true."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {limit_s} s"
        time.sleep(0.02)


def flags(record: dict[str, Any]) -> set[str]:
    """Return the names of the flags of a record and of its rounds and windows."""
    found = list(record["flags"])
    for each in (*record["rounds"], *record["windows"]):
        found += each["flags"]
    return {flag["name"] for flag in found}


def too_long(lines: Sequence[str], width: int = 80) -> Iterator[str]:
    """Yield lines that do not fit."""
    return (line for line in lines if len(line) > width)
