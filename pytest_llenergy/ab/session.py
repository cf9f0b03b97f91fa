# SPDX-License-Identifier: Apache-2.0
"""Run one session as a process of its own: pytest on one side, or a measured command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from pytest_llenergy.ab import session_plugin
from pytest_llenergy.ab.measured_command import MeasuredCommand
from pytest_llenergy.errors import PlanError
from pytest_llenergy.lifetime import ENDS_ALL, die_with_parent, module_command
from pytest_llenergy.record.base import StoredStruct
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import SideName, Source, encode_report
from pytest_llenergy.scratch import ScratchDirectory

PLUGIN = "llenergy_ab_session"

#: Signals that end a session, with the time that each has. Pytest stops its ranks and writes its report; a
#: hung test may still obey SIGTERM. Shells put off SIGINT until their command has ended, and half a command
#: has no value.
ENDS_PYTEST = (signal.SIGINT, 30.0), (signal.SIGTERM, 5.0)
ENDS_COMMAND = ((signal.SIGTERM, 5.0),)

#: Interval at which to check for the end of a session and for new output: one round takes many times as long.
SESSION_POLL_S = 0.1

#: A line in which a session tells what it waits for, such as devices, and who holds them.
WAIT = re.compile(r"^energy: (?P<wait>(?P<key>.+) \(.+ so far\))$")

#: Lines of a log to show after a failure.
TAIL_LINES = 10


@dataclass(frozen=True)
class Turn:
    """One session; ``number`` counts all sessions from 1."""

    number: int
    side: SideName


@dataclass(frozen=True)
class Side:
    """What runs on one side: code, interpreter, environment and command."""

    name: SideName
    origin: str  # the name that the user gave, for reports
    short: str  # an abbreviated name, for progress lines
    root: Path  # the checkout
    directory: Path  # in which sessions start
    args: tuple[str, ...]  # of pytest, or the words of a measured command
    environment: Mapping[str, str] = field(repr=False)
    source: Source
    python: tuple[str, ...] = ()  # the interpreter of pytest, with its options
    measured: MeasuredCommand | None = None
    venv: Path | None = None  # created for this side


class SessionFiles:
    """The directory of a session; ``end`` has the duration in seconds of one that ended as it should."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = ("report.json", "session.log", "earlier.json", "summary.json", "end")
        self.report, self.log, self.earlier, self.summary, self.end = (directory / name for name in names)


class Summary(StoredStruct, frozen=True):
    """What the session plugin writes: whether a test failed, whether one measured, whether it was stopped."""

    failed: bool
    measured: bool
    stopped: bool


class Earlier(StoredStruct, frozen=True):
    """What a session is told."""

    done: Sequence[str] = ()  # node ids of tests to skip
    devices: Mapping[str, Sequence[str]] = {}  # of each test in earlier sessions, which it uses again


def run_session(
    side: Side, files: SessionFiles, rounds: int, earlier: Earlier, poll: Callable[[TextIO], None]
) -> int:
    """Run a session to its end, and return its exit code, negative for a signal.

    If this process is interrupted, the session is interrupted too, and has ended before the exception
    propagates. ``poll`` gets the log, open for reading, while the session runs and once at its end.

    Raises:
        PlanError: It cannot start, because its checkout was removed, or a measured command left no value.
    """
    environment = dict(side.environment)
    # The step summary of GitHub is for the whole comparison, not for each session.
    environment.pop("GITHUB_STEP_SUMMARY", None)
    replace_file(files.earlier, msgspec.json.encode(earlier))
    measured = side.measured
    if measured is None:
        shutil.copyfile(session_plugin.__file__, files.directory / f"{PLUGIN}.py")
        path = [str(files.directory), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "LLENERGY_AB_SESSION": str(files.directory),
        }
        words = [*side.python, "-m", "pytest", "-p", PLUGIN]
        words += [f"--energy-report={files.report}", f"--energy-rounds={rounds}"]
        words += [word for name in session_plugin.CLEARED_OPTIONS for word in ("-o", f"{name}=")]
        # Options of the user come last, so that they win.
        return _run(side, [*words, *side.args], environment, files.log, poll)
    before = measured.look(side.directory)
    # What llenergy run writes names the whole command, and so is not kept.
    with ScratchDirectory() as scratch:
        output = scratch.path / "energy.json"
        words = module_command("pytest_llenergy.cli", "run", "--format=json", f"--output={output}")
        words += [*measured.options, "--", *side.args]
        code = _run(side, words, {**environment, ENDS_ALL: "1"}, files.log, poll)
        if code == 0:
            report = measured.read_report(output, side.directory, before, side.source)
            replace_file(files.report, encode_report(report))
            summary = Summary(failed=False, measured=True, stopped=False)
            replace_file(files.summary, msgspec.json.encode(summary))
    return code


def _run(
    side: Side,
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    poll: Callable[[TextIO], None],
) -> int:
    # llenergy run passes SIGTERM on to its command; pytest has a supervisor for its ranks.
    at_our_end = signal.SIGKILL if side.measured is None else signal.SIGTERM
    with log.open("wb") as output, log.open(errors="replace") as printed:
        try:
            process = subprocess.Popen(
                words,
                cwd=side.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Otherwise Ctrl-C would interrupt the session twice: from the terminal and from this process.
                start_new_session=True,
                preexec_fn=partial(_prepare_child, os.getpid(), at_our_end),
            )
        except OSError as error:
            raise PlanError(
                f"{error.filename}: {error.strerror}, so no session can start there; "
                "run the same command again to continue"
            ) from None
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(SESSION_POLL_S)
                poll(printed)
        except BaseException:  # Ctrl-C, SIGTERM or an error: the session must not outlive this process.
            _stop(process, whole_group=side.measured is None)
            raise
        finally:
            poll(printed)


def run_step(side: Side, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a step in the checkout of a side, before its sessions. Returns its exit code."""
    return _run(replace(side, directory=side.root, measured=None), words, environment, log, lambda _: None)


def _prepare_child(parent_pid: int, at_its_end: signal.Signals) -> None:
    # A process in the background of a script is started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent_pid, at_its_end)


def _stop(process: subprocess.Popen[bytes], *, whole_group: bool) -> None:
    """Stop a session by one signal after another. A second interrupt of this process kills it at once."""
    for number, timeout_s in ENDS_PYTEST if whole_group else ENDS_COMMAND:
        if whole_group:
            _signal_group(process, number)
        else:
            process.send_signal(number)
        try:
            process.wait(timeout_s)
            return
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            break
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Watch:
    """Says what a session waits for, once for each thing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wait = ""

    def __call__(self, printed: TextIO) -> None:
        """Read what the session has printed since the last call."""
        for line in printed:
            found = WAIT.match(line.rstrip())
            if found is not None and found["key"] != self._wait:
                self._wait = found["key"]
                self._say(f"  waiting: {found['wait']}")


def show_failure(log: Path, say: Callable[[str], None]) -> str:
    """Show the last lines of a log, and return the one that most likely explains a failure."""
    with log.open(errors="replace") as file:
        lines = deque((line.rstrip() for line in file if line.strip()), 40)
    for line in list(lines)[-TAIL_LINES:]:
        say(f"  | {line}")
    errors = [line for line in lines if line.startswith(("ERROR", "E  ", "error:"))]
    return (errors or list(lines) or ["no output"])[-1].strip()[:300]
