# SPDX-License-Identifier: Apache-2.0
"""One session: a pytest process of one side, in a process group of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pytest_llenergy.ab import session_plugin
from pytest_llenergy.ab.command import GPUS_OPTION, Command
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.workers.proctree import die_with_parent

#: How long a session that was interrupted may take to tidy up (seconds), and then one that was terminated.
STOP_TIMEOUTS_S = (30.0, 5.0)

#: How often to look whether it has ended, or has printed something (seconds).
POLL_S = 0.1

PLUGIN = "llenergy_ab_session"

#: What the settings of a project may say and sessions must not do: each has one round, and ``ab`` compares.
SILENCED = session_plugin.CLEARED_OPTIONS


@dataclass(frozen=True)
class SessionFiles:
    """What one session reads and writes, in one directory under one stem."""

    directory: Path
    stem: str

    @property
    def report(self) -> Path:
        """The report; a journal beside it as long as the session runs."""
        return self.directory / f"{self.stem}.json"

    @property
    def log(self) -> Path:
        """What pytest printed."""
        return self.directory / f"{self.stem}.log"

    @property
    def done(self) -> Path:
        """Node ids that are not to be run."""
        return self.directory / f"{self.stem}.done"

    @property
    def modules(self) -> Path:
        """A directory: where modules were imported from."""
        return self.directory / f"{self.stem}.modules"

    @property
    def told(self) -> Path:
        """What became of its tests, written by pytest at its end."""
        return self.directory / f"{self.stem}.told"

    @property
    def end(self) -> Path:
        """How it ended, written once it has."""
        return self.directory / f"{self.stem}.end"


def session_arguments(
    side: Side, command: Command, files: SessionFiles, rounds: int, gpus: Sequence[str]
) -> list[str]:
    """The whole command line of a session. What the user says comes last, and so decides."""
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
    show: Callable[[str], None] | None,
) -> int:
    """Run it to its end and return its exit code; negative for a signal. ``show`` is given its output.

    Where this process is interrupted the session is too, once, and has ended when this returns or raises.
    """
    plugins = files.directory / "plugin"
    plugins.mkdir(exist_ok=True)
    shutil.copyfile(session_plugin.__file__, plugins / f"{PLUGIN}.py")
    files.done.write_bytes(msgspec.json.encode(list(done)))
    path = [str(plugins), *filter(None, [side.environment.get("PYTHONPATH")])]
    environment = {
        **side.environment,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "LLENERGY_AB_DONE": str(files.done),
        "LLENERGY_AB_MODULES": str(files.modules),
        "LLENERGY_AB_ROOT": str(side.root),
        "LLENERGY_AB_TOLD": str(files.told),
    }
    # What all of them say together is shown there, not each of them.
    environment.pop("GITHUB_STEP_SUMMARY", None)
    with files.log.open("wb") as log:
        process = subprocess.Popen(
            words,
            cwd=side.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C in the terminal must not reach it twice, from there and from here.
            start_new_session=True,
            preexec_fn=partial(_prepare_child, os.getpid()),
        )
        with files.log.open(errors="replace") as printed:
            try:
                return _wait(process, lambda: show(printed.read()) if show else None)
            except BaseException:  # Ctrl-C, SIGTERM or a fault of ours: it must not measure on alone.
                _stop(process)
                raise


def _prepare_child(parent_pid: int) -> None:
    # Also where this process was started with it ignored, as in the background of a script.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent_pid)


def _wait(process: subprocess.Popen[bytes], look: Callable[[], None]) -> int:
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            look()
        else:
            look()
            return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it as a terminal would; who interrupts again does not want to wait."""
    for number, patience_s in zip((signal.SIGINT, signal.SIGTERM), STOP_TIMEOUTS_S, strict=True):
        _signal_group(process, number)
        try:
            process.wait(patience_s)
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
