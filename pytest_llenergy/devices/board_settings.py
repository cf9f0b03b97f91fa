# SPDX-License-Identifier: Apache-2.0
"""Change power limits and clocks of leased boards for one test, and put them back however the test ends.

A guard process, which this module is the program of, makes the changes. It notes each before
(``noted_changes``), and restores the boards when pytest closes its pipe or has ended. It holds copies of the
lease, so that no other test gets a board before.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.lockdir import LockDirectory
from pytest_llenergy.devices.noted_changes import Change, Note, restore_change, restore_left_changes
from pytest_llenergy.devices.nvml import BoardHandle, Session
from pytest_llenergy.devices.subprocess_query import PROGRAM
from pytest_llenergy.devices.timeouts import PARENT_POLL_S, QUERY_TIMEOUT_S
from pytest_llenergy.errors import DeviceError, PlanError
from pytest_llenergy.record.record import BoardSettings

#: Signals that ask a process to end.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SettingsRefusedError(DeviceError):
    """The boards, the driver or the rights of this user allow no such change: a reason to skip the test."""


class GpuSettings(msgspec.Struct, frozen=True):
    """What a test asks for: a power limit in watts, and the lowest and highest graphics clock in MHz."""

    power_limit_w: float | None = None
    graphics_clock_mhz: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Return the settings as their mark is written."""
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"gpu_settings({', '.join(f'{name}={each!r}' for name, each in given if each is not None)})"


def parse_settings(values: Mapping[str, object], parameters: Mapping[str, object] = {}) -> GpuSettings | None:
    """Check the values of a mark, of which None leaves a setting alone. Returns None if all do.

    Args:
        values: Value by name of the setting. A text is the name of a parameter.
        parameters: The parameters of the test.

    Raises:
        PlanError: A value is invalid, or the test lacks the parameter.
    """
    for name, value in values.items():
        if isinstance(value, str) and value not in parameters:
            raise PlanError(
                f"{name} is {value!r}, which is no parameter of the test; add "
                f"@pytest.mark.parametrize({value!r}, [...]), or give a number"
            )
    found = {name: parameters[each] if isinstance(each, str) else each for name, each in values.items()}
    clocks = found.get("graphics_clock_mhz")
    pair = tuple(clocks) if isinstance(clocks, (list, tuple)) else (clocks, clocks)
    if clocks is not None and not (
        len(pair) == 2 and all(type(each) is int and each > 0 for each in pair) and pair[0] <= pair[1]
    ):
        raise PlanError(
            f"graphics_clock_mhz is {clocks!r}, needs a whole number of MHz such as 1200, or the lowest and "
            "the highest such as (900, 1200)"
        )
    watts = found.get("power_limit_w")
    if watts is not None and not (type(watts) in (int, float) and 0 < watts < 1e6):  # type: ignore[operator]
        raise PlanError(f"power_limit_w is {watts!r}, needs a number of watts such as 250")
    settings = GpuSettings(watts, None if clocks is None else pair)  # type: ignore[arg-type]
    return None if settings == GpuSettings() else settings


@dataclass
class AppliedSettings:
    """Settings that the guard has applied, and keeps until it ends."""

    boards: list[BoardSettings]
    guard: subprocess.Popen[bytes]
    ended: bool = False

    def is_lost(self) -> bool:
        """Return whether the guard ended before the test."""
        return not self.ended and self.guard.poll() is not None


@contextmanager
def apply_settings(
    settings: GpuSettings, lease: Lease, directory: LockDirectory, descriptors: Sequence[int]
) -> Iterator[AppliedSettings]:
    """Apply settings to the boards of a lease until the block ends.

    Args:
        settings: The settings.
        lease: The boards.
        directory: Where the guard notes what was set before.
        descriptors: Open files of the lease.

    Raises:
        SettingsRefusedError: The boards, the driver or the rights of this user do not allow it.
        DeviceError: A value is outside of the range of a board, the driver does not answer, or the boards
            could not be restored.
    """
    if not lease.uuids:
        raise SettingsRefusedError(
            f"{settings}: the test has leased the CPU, and only power limits and clocks of GPUs can be set"
        )
    if lease.divided:
        raise SettingsRefusedError(f"{settings}: a MIG instance has no power limit or clock of its own")
    arguments = [str(os.getpid()), str(directory.path), str(directory.descriptor), *lease.uuids]
    guard = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(pytest_llenergy.__file__).parents[1]), __name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(directory.descriptor, *descriptors),
        # Ctrl-C at the terminal must reach only pytest.
        start_new_session=True,
    )
    applied = None
    try:
        assert guard.stdin is not None
        guard.stdin.write(msgspec.json.encode(settings) + b"\n")
        guard.stdin.flush()
        answer = _read_answer(guard)
        if answer.refusal is not None:
            raise SettingsRefusedError(f"{settings}: {answer.refusal}")
        if answer.error is not None:
            raise DeviceError(f"{settings}: {answer.error}")
        applied = AppliedSettings(answer.boards, guard)
        yield applied
    finally:
        if applied is not None:
            applied.ended = not applied.is_lost()
        _end(guard, directory, lease.uuids)


class _Answer(msgspec.Struct, frozen=True):
    boards: list[BoardSettings] = []
    refusal: str | None = None
    error: str | None = None


def _read_answer(guard: subprocess.Popen[bytes]) -> _Answer:
    assert guard.stdout is not None
    if not select.select([guard.stdout], [], [], QUERY_TIMEOUT_S)[0]:
        return _Answer(error=f"NVML: the driver has not answered for {QUERY_TIMEOUT_S:g} s; see nvidia-smi")
    line = guard.stdout.readline()
    if not line:
        return _Answer(error="the process that changes boards has ended; run the test again")
    return msgspec.json.decode(line, type=_Answer)


def _end(guard: subprocess.Popen[bytes], directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Let the guard restore the boards, or do so if it is gone."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    with suppress(OSError):
        guard.stdin.close()
    last = _read_answer(guard) if guard.poll() is None else _Answer(error="gone")
    guard.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        guard.wait(QUERY_TIMEOUT_S)
    if last.error is not None:
        restore_left_changes(directory, uuids)
    if guard.returncode is None:
        raise DeviceError(
            f"{', '.join(uuids)}: the driver has not put back power limit and clocks for {QUERY_TIMEOUT_S:g} "
            f"s; process {guard.pid} goes on trying, and keeps the boards leased; see nvidia-smi"
        )


# The guard process.


class _Guard:
    def __init__(self, directory: LockDirectory, settings: GpuSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._session = Session()
        self._changed: list[tuple[BoardHandle, Note]] = []

    def apply(self, uuids: Sequence[str]) -> _Answer:
        nvml = self._session.module
        try:
            boards = [self._session.open_board(uuid) for uuid in uuids]
            # All are checked before one is changed.
            for board in boards:
                self._check_range(board)
            return _Answer([self._apply_to(board) for board in boards])
        except nvml.NVMLError_NoPermission:
            return _Answer(refusal="only root may change boards; run pytest as root, or leave out this mark")
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return _Answer(refusal=f"{boards[0].name} or its driver does not support it")
        except (nvml.NVMLError, DeviceError, OSError) as error:
            return _Answer(error=str(error))

    def restore(self) -> _Answer:
        error = None
        for board, note in self._changed:
            try:
                restore_change(self._session, board, note.change)
            except self._session.module.NVMLError as problem:
                error = f"{board.uuid}: {problem}"
                note.leave()
            else:
                note.remove()
        return _Answer(error=error)

    def _check_range(self, board: BoardHandle) -> None:
        nvml, settings = self._session.module, self._settings
        if settings.power_limit_w is not None:
            lowest, highest = nvml.nvmlDeviceGetPowerManagementLimitConstraints(board.handle)
            if not lowest <= round(settings.power_limit_w * 1000) <= highest:
                raise DeviceError(
                    f"{board.name} takes a power limit from {lowest / 1000:g} to {highest / 1000:g} W"
                )
        if settings.graphics_clock_mhz is not None:
            highest = nvml.nvmlDeviceGetMaxClockInfo(board.handle, nvml.NVML_CLOCK_GRAPHICS)
            if settings.graphics_clock_mhz[1] > highest:
                raise DeviceError(f"{board.name} takes a graphics clock up to {highest} MHz")

    def _apply_to(self, board: BoardHandle) -> BoardSettings:
        nvml, settings, handle = self._session.module, self._settings, board.handle
        watts, clocks = settings.power_limit_w, settings.graphics_clock_mhz
        if watts is not None:
            limit_mw = round(watts * 1000)
            before_mw = nvml.nvmlDeviceGetPowerManagementLimit(handle)
            self._change(
                Change(board.uuid, before_mw, limit_mw),
                board,
                lambda: nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw),
            )
        if clocks is not None:
            self._change(
                Change(board.uuid, locks_clocks=True),
                board,
                lambda: nvml.nvmlDeviceSetGpuLockedClocks(handle, *clocks),
            )
        return BoardSettings(
            uuid=board.uuid,
            power_limit_w=watts,
            graphics_clock_mhz=None if clocks is None else list(clocks),
            power_limit_found_w=(
                None if watts is None else nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            ),
            graphics_clock_found_mhz=(
                None if clocks is None else nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_GRAPHICS)
            ),
        )

    def _change(self, change: Change, board: BoardHandle, make: Callable[[], object]) -> None:
        """Note a change, then make it."""
        note = Note(self._directory, change)
        self._changed.append((board, note))
        note.write()
        try:
            make()
        except self._session.module.NVMLError:
            # Refused, so there is nothing to restore.
            self._changed.pop()
            note.remove()
            raise


def _main(parent: str, path: str, descriptor: str, *uuids: str) -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, _exit_once)
    settings = msgspec.json.decode(sys.stdin.buffer.readline() or b"null", type=GpuSettings | None)
    if settings is None:
        return
    try:
        guard = _Guard(LockDirectory(Path(path), int(descriptor)), settings)
    except DeviceError as error:
        _send(_Answer(error=str(error)))
        return
    try:
        try:
            answer = _Answer(error="the process that changes boards was asked to end")
            try:
                answer = guard.apply(uuids)
            finally:
                _send(answer)
            if not answer.refusal and not answer.error:
                _wait_for_end(int(parent))
        finally:
            # A signal may still arrive before this line has run, and must not prevent the next one.
            _ignore_signals()
    finally:
        _send(guard.restore())


def _exit_once(*_: object) -> None:
    _ignore_signals()
    sys.exit(1)


def _ignore_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _send(answer: _Answer) -> None:
    # pytest may be gone.
    with suppress(OSError):
        os.write(1, msgspec.json.encode(answer) + b"\n")


def _wait_for_end(parent: int) -> None:
    """Wait until pytest closes the pipe or ends. A fork of it may keep the other end of the pipe open."""
    sources: list[Any] = [0]
    with suppress(OSError, AttributeError):
        sources.append(os.pidfd_open(parent))
    while os.getppid() == parent:
        readable = select.select(sources, [], [], None if len(sources) > 1 else PARENT_POLL_S)[0]
        if readable:
            return


if __name__ == "__main__":
    _main(*sys.argv[1:])
