# SPDX-License-Identifier: Apache-2.0
"""Run one session as a process of its own: pytest on one side, or a measured command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from pytest_llenergy.ab import session_plugin
from pytest_llenergy.ab.measured_command import MeasuredCommand
from pytest_llenergy.errors import PlanError
from pytest_llenergy.lifetime import ENDS_ALL, die_with_parent
from pytest_llenergy.record.report import SideName, Source, encode_report

PLUGIN = "llenergy_ab_session"

#: Time that a session has to end after SIGINT, so that ranks stop and its report is written, and then after
#: SIGTERM, which a hung test may still obey; then it is killed.
INTERRUPT_TIMEOUT_S, TERMINATE_TIMEOUT_S = 30.0, 5.0
POLITELY = (signal.SIGINT, INTERRUPT_TIMEOUT_S), (signal.SIGTERM, TERMINATE_TIMEOUT_S)
#: Interval at which to check for the end of a session and for new output: one round takes many times as long.
SESSION_POLL_S = 0.1

#: A line in which a session tells what it waits for, such as devices, and who holds them.
WAIT = re.compile(r"^energy: (?P<wait>(?P<key>.+) \(.+ so far\))$")
#: Time between signs of life of a session.
SIGN_S = 120.0

#: The code outside of a git checkout.
NO_SOURCE = Source()

#: Lines of a log to show after a failure.
TAIL_LINES = 10


@dataclass(frozen=True)
class Side:
    """What runs on one side: code, interpreter, environment and command.

    Attributes:
        name: ``"base"`` or ``"head"``.
        origin: The name that the user gave, for reports.
        short: An abbreviated name for progress lines.
        root: The checkout.
        directory: The directory in which sessions start.
        args: Arguments of pytest, or the words of a measured command.
        environment: The environment variables.
        python: The interpreter of pytest, with its options.
        measured: How a command that is not pytest is measured.
        source: The code.
        venv: The virtual environment that was created for this side, if any.
    """

    name: SideName
    origin: str
    short: str
    root: Path
    directory: Path
    args: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    python: tuple[str, ...] = ()
    measured: MeasuredCommand | None = None
    source: Source = NO_SOURCE
    venv: Path | None = None


class SessionFiles:
    """The files of one attempt at a session: one directory, one stem.

    Attributes:
        report: The report; while the session runs, its journal is next to it.
        log: The output.
        done: Node ids of tests to skip because they are finished.
        devices: The devices of each test in earlier sessions.
        modules: A directory with lists of the imported modules.
        summary: What the session plugin writes at the end of pytest.
        end: How the session ended, written afterwards.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self.directory = directory
        self.stem = stem
        names = ("json", "log", "done", "devices", "modules", "summary", "end")
        paths = [directory / f"{stem}.{name}" for name in names]
        self.report, self.log, self.done, self.devices, self.modules, self.summary, self.end = paths


@dataclass(frozen=True)
class Earlier:
    """What a session knows of earlier ones.

    Attributes:
        done: Node ids of tests to skip.
        devices: Devices of each test, which it uses again.
    """

    done: Sequence[str] = ()
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)


def run_session(
    side: Side, files: SessionFiles, rounds: int, earlier: Earlier, poll: Callable[[TextIO], None]
) -> int:
    """Run a session to its end, and return its exit code, negative for a signal.

    If this process is interrupted, the session is interrupted too, and has ended before the exception
    propagates.

    ``poll`` gets the log, open for reading, while the session runs and once at its end.

    Raises:
        PlanError: It cannot start, because its checkout was removed, or a measured command left no value.
    """
    environment = dict(side.environment)
    # The step summary of GitHub is for the whole comparison, not for each session.
    environment.pop("GITHUB_STEP_SUMMARY", None)
    if side.measured is None:
        environment |= _prepare_pytest(side, files, earlier)
        words = [*side.python, "-m", "pytest", "-p", PLUGIN]
        words += [f"--energy-report={files.report}", f"--energy-rounds={rounds}"]
        words += [word for name in session_plugin.CLEARED_OPTIONS for word in ("-o", f"{name}=")]
        # Options of the user come last, so that they win.
        return _run(side, [*words, *side.args], environment, files.log, poll)
    measured = side.measured
    environment[ENDS_ALL] = "1"
    before = measured.look(side.directory)
    with measured.output_file() as output:
        code = _run(side, measured.words(side.args, output), environment, files.log, poll)
        if code == 0:
            report = measured.read_report(output, side.directory, before, side.source)
            files.report.write_bytes(encode_report(report))
            summary = {"failed": [], "measured": True, "stopped": False}
            files.summary.write_bytes(msgspec.json.encode(summary))
    return code


def _prepare_pytest(side: Side, files: SessionFiles, earlier: Earlier) -> dict[str, str]:
    """Write what the plugin of the session reads, and return the variables that name it."""
    plugins = files.directory / "plugin"
    plugins.mkdir(exist_ok=True)
    shutil.copyfile(session_plugin.__file__, plugins / f"{PLUGIN}.py")
    files.done.write_bytes(msgspec.json.encode(list(earlier.done)))
    files.devices.write_bytes(msgspec.json.encode(earlier.devices))
    path = [str(plugins), *filter(None, [side.environment.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "LLENERGY_AB_DEVICES": str(files.devices),
        "LLENERGY_AB_DONE": str(files.done),
        "LLENERGY_AB_MODULES": str(files.modules),
        "LLENERGY_AB_ROOT": str(side.root),
        "LLENERGY_AB_SUMMARY": str(files.summary),
    }


def _run(
    side: Side,
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    poll: Callable[[TextIO], None],
) -> int:
    # llenergy run passes SIGTERM on to its command; pytest has a supervisor for its ranks.
    measures = side.measured is not None
    with log.open("wb") as output:
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
                preexec_fn=partial(
                    _prepare_child, os.getpid(), signal.SIGTERM if measures else signal.SIGKILL
                ),
            )
        except OSError as error:
            raise PlanError(
                f"{error.filename}: {error.strerror}, so no session can start there; "
                "run the same command again to continue"
            ) from None
        with log.open(errors="replace") as printed:
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(SESSION_POLL_S)
                        poll(printed)
                        return code
                    poll(printed)
            except BaseException:  # Ctrl-C, SIGTERM or an error: the session must not outlive this process.
                if measures:
                    # Shells put off SIGINT until their command has ended, and half a command has no value.
                    _stop(process, process.send_signal, [(signal.SIGTERM, TERMINATE_TIMEOUT_S)])
                else:
                    _stop(process, partial(_signal_group, process), POLITELY)
                raise


def _prepare_child(parent_pid: int, at_its_end: signal.Signals) -> None:
    # A process in the background of a script is started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent_pid, at_its_end)


def _stop(
    process: subprocess.Popen[bytes],
    send: Callable[[signal.Signals], None],
    steps: Sequence[tuple[signal.Signals, float]],
) -> None:
    """Stop a session by one signal after another. A second interrupt of this process kills it at once."""
    for number, timeout_s in steps:
        send(number)
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
    """Says what a session waits for, and now and then that it still runs."""

    def __init__(self, say: Callable[[str], None], name: str) -> None:
        self._say = say
        self._name = name
        self._started_s = self._said_s = time.monotonic()
        self._wait = ""

    def __call__(self, printed: TextIO) -> None:
        """Read what the session has printed since the last call."""
        now_s = time.monotonic()
        while True:
            position = printed.tell()
            line = printed.readline()
            if not line.endswith("\n"):
                # An unfinished line is read again next time.
                printed.seek(position)
                break
            found = WAIT.match(line.rstrip())
            if found is not None and (found["key"] != self._wait or now_s >= self._said_s + SIGN_S):
                self._wait, self._said_s = found["key"], now_s
                self._say(f"  waiting: {found['wait']}")
        if now_s >= self._said_s + SIGN_S:
            self._said_s = now_s
            self._say(f"  {self._name} runs, {now_s - self._started_s:.0f} s so far")


def read_tail(log: Path, count: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log, without blank lines."""
    try:
        with log.open(errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), count))
    except OSError:
        return []


def find_error_line(log: Path) -> str:
    """Return the line of a log that most likely explains a failure."""
    lines = read_tail(log, 40)
    errors = [line for line in lines if line.startswith(("ERROR", "E  ", "error:"))]
    return (errors or lines or ["no output"])[-1].strip()[:300]
