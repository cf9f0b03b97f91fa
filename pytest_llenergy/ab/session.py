# SPDX-License-Identifier: Apache-2.0
"""Run one session: pytest on one side, in a separate process group."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from pytest_llenergy.ab import session_plugin
from pytest_llenergy.ab.command import GPUS_OPTION, Command
from pytest_llenergy.ab.progress import SessionWatch
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError
from pytest_llenergy.lifetime import die_with_parent

PLUGIN = "llenergy_ab_session"

#: Settings of a project that sessions must ignore, because ``ab`` compares.
SILENCED = session_plugin.CLEARED_OPTIONS

#: Time that a session has to end after SIGINT, so that ranks stop and its report is written, and then after
#: SIGTERM, which a hung test may still obey; then it is killed.
INTERRUPT_TIMEOUT_S, TERMINATE_TIMEOUT_S = 30.0, 5.0
#: Interval at which to check for the end of a session and for new output: one round takes many times as long.
SESSION_POLL_S = 0.1


@dataclass(frozen=True)
class SessionFiles:
    """The files of one attempt at a session: one directory, one stem."""

    directory: Path
    stem: str

    @property
    def report(self) -> Path:
        """The report; while the session runs, its journal is next to it."""
        return self.directory / f"{self.stem}.json"

    @property
    def log(self) -> Path:
        """The output of pytest."""
        return self.directory / f"{self.stem}.log"

    @property
    def done(self) -> Path:
        """Node ids of tests to skip because they are finished."""
        return self.directory / f"{self.stem}.done"

    @property
    def devices(self) -> Path:
        """The devices of each test in earlier sessions."""
        return self.directory / f"{self.stem}.devices"

    @property
    def modules(self) -> Path:
        """A directory with lists of the imported modules."""
        return self.directory / f"{self.stem}.modules"

    @property
    def summary(self) -> Path:
        """The summary that the session plugin writes at the end of pytest."""
        return self.directory / f"{self.stem}.summary"

    @property
    def end(self) -> Path:
        """How the session ended, written afterwards."""
        return self.directory / f"{self.stem}.end"


def session_arguments(
    side: Side, command: Command, files: SessionFiles, rounds: int, gpus: Sequence[str]
) -> list[str]:
    """Return the command line of a session. Options of the user come last, so that they win.

    Args:
        side: The side to run.
        command: The pytest command.
        files: The files of the session.
        rounds: Rounds of each test.
        gpus: GPUs to use; empty leaves the choice to the session.
    """
    words = [str(side.python), *command.interpreter, "-m", "pytest", "-p", PLUGIN]
    words += [f"--energy-report={files.report}", f"--energy-rounds={rounds}"]
    words += [word for name in SILENCED for word in ("-o", f"{name}=")]
    words += [f"{GPUS_OPTION}={','.join(gpus)}"] if gpus else []
    return [*words, *command.args, *side.options]


def run_session(
    side: Side,
    words: Sequence[str],
    files: SessionFiles,
    done: Sequence[str],
    devices: Mapping[str, Sequence[str]],
    show: Callable[[str], None] | None,
    watch: Callable[[TextIO], SessionWatch],
) -> int:
    """Run a session and return its exit code, negative for a signal.

    If this process is interrupted, the session is interrupted too, and has ended before the exception
    propagates.

    Args:
        side: The side to run.
        words: The command line.
        files: The files of the session.
        done: Node ids of tests to skip.
        devices: Devices of each test in earlier sessions, which it uses again.
        show: Receives the output while the session runs.
        watch: Makes what reports on a session by its log, unless ``show`` does.

    Raises:
        PlanError: If it cannot start, because its checkout was removed.
    """
    plugins = files.directory / "plugin"
    plugins.mkdir(exist_ok=True)
    shutil.copyfile(session_plugin.__file__, plugins / f"{PLUGIN}.py")
    files.done.write_bytes(msgspec.json.encode(list(done)))
    files.devices.write_bytes(msgspec.json.encode(devices))
    path = [str(plugins), *filter(None, [side.environment.get("PYTHONPATH")])]
    environment = {
        **side.environment,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "LLENERGY_AB_DEVICES": str(files.devices),
        "LLENERGY_AB_DONE": str(files.done),
        "LLENERGY_AB_MODULES": str(files.modules),
        "LLENERGY_AB_ROOT": str(side.root),
        "LLENERGY_AB_SUMMARY": str(files.summary),
    }
    # The step summary of GitHub is for the whole comparison, not for each session.
    environment.pop("GITHUB_STEP_SUMMARY", None)
    with files.log.open("wb") as log:
        try:
            process = subprocess.Popen(
                words,
                cwd=side.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Otherwise Ctrl-C would interrupt the session twice: from the terminal and from this process.
                start_new_session=True,
                preexec_fn=partial(_prepare_child, os.getpid()),
            )
        except OSError as error:
            raise PlanError(
                f"{error.filename}: {error.strerror}, so no session can start there; "
                "run the same command again to continue"
            ) from None
        with files.log.open(errors="replace") as printed:
            poll = watch(printed).poll
            try:
                return _wait(process, lambda: show(printed.read()) if show else poll())
            except BaseException:  # Ctrl-C, SIGTERM or an error: the session must not outlive this process.
                _stop(process)
                raise


def _prepare_child(parent_pid: int) -> None:
    # A process in the background of a script is started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent_pid)


def _wait(process: subprocess.Popen[bytes], poll: Callable[[], None]) -> int:
    while True:
        try:
            code = process.wait(SESSION_POLL_S)
        except subprocess.TimeoutExpired:
            poll()
        else:
            poll()
            return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a session like a terminal would. A second interrupt of this process kills it at once."""
    for number, timeout_s in ((signal.SIGINT, INTERRUPT_TIMEOUT_S), (signal.SIGTERM, TERMINATE_TIMEOUT_S)):
        _signal_group(process, number)
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
