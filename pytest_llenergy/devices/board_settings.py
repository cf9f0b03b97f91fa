# SPDX-License-Identifier: Apache-2.0
"""Change power limits and clocks of leased boards for one test, and put them back however the test ends.

A guard process, which this module is the program of, makes the changes. It writes a note of each board into
the lock directory before, and restores the boards when pytest closes its pipe or has ended. It holds copies
of the lease, so that no other test gets a board before. If it is killed too, the note stays: ``llenergy
doctor`` names it, and the next test that leases the board puts the change back.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.locks import hash_name, is_held
from pytest_llenergy.devices.nvml import BoardHandle, Session
from pytest_llenergy.devices.probe import read_or_none
from pytest_llenergy.devices.timeouts import QUERY_TIMEOUT_S
from pytest_llenergy.errors import DeviceError, PlanError
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.record.environment import read_boot_id
from pytest_llenergy.record.record import BoardSettings

#: Beginning of the names of notes, and what is read of one, which is many times its size.
NOTE_PREFIX, MAX_NOTE_BYTES = f"{FILE_PREFIX}settings-", 4096


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
    wanted = msgspec.json.encode(settings).decode()
    arguments = [wanted, str(os.getpid()), str(directory.path), str(directory.descriptor), *lease.uuids]
    guard = subprocess.Popen(
        module_command(__name__, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(directory.descriptor, *descriptors),
        # Ctrl-C at the terminal must reach only pytest.
        start_new_session=True,
    )
    applied = None
    try:
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
    guard.stdin.close()
    last = _read_answer(guard)
    guard.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        guard.wait(QUERY_TIMEOUT_S)
    if guard.returncode is None:
        raise DeviceError(
            f"{', '.join(uuids)}: the driver has not put back power limit and clocks for {QUERY_TIMEOUT_S:g} "
            f"s; process {guard.pid} goes on trying, and keeps the boards leased; see nvidia-smi"
        )
    if last.error is not None:
        restore_left_changes(directory, uuids)


# Notes of changes.


class Change(msgspec.Struct, frozen=True):
    """The note of a board: its power limit before and since (mW), and whether clocks were locked."""

    uuid: str
    boot_id: str
    before_mw: int | None = None
    set_mw: int | None = None
    locks_clocks: bool = False

    def restore(self, session: Session, board: BoardHandle) -> None:
        """Put the change back. A power limit that somebody else has set since stays.

        Raises:
            NVMLError: The driver refuses.
        """
        nvml = session.module
        try:
            if self.set_mw is not None and self.is_limit(
                nvml.nvmlDeviceGetPowerManagementLimit(board.handle)
            ):
                nvml.nvmlDeviceSetPowerManagementLimit(board.handle, self.before_mw)
        finally:
            if self.locks_clocks:
                nvml.nvmlDeviceResetGpuLockedClocks(board.handle)

    def is_limit(self, limit_mw: int) -> bool:
        """Return whether a limit is the one that was set, and was not there before."""
        return limit_mw == self.set_mw != self.before_mw

    def by_hand(self, path: Path) -> str:
        """Return the commands that put the change back."""
        parts = [] if self.before_mw is None else [f"-pl {self.before_mw / 1000:g}"]
        parts += ["-rgc"] if self.locks_clocks else []
        commands = (f"nvidia-smi -i {self.uuid} {part}" for part in parts)
        return f"{'; '.join(commands)}; rm {path}"


def restore_left_changes(directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Put back what killed runs have left on boards, which this process must have leased.

    Raises:
        DeviceError: A board cannot be changed.
    """
    for uuid in uuids:
        name = note_name(uuid)
        change = _read_note(directory, name)
        if change is not None:
            with closing(Session()) as session:
                try:
                    change.restore(session, session.open_board(uuid))
                except session.module.NVMLError as error:
                    raise DeviceError(
                        f"{uuid}: a killed run has left a power limit or clock on it, which cannot be put "
                        f"back ({error}); as root, run pytest once, or: "
                        f"{change.by_hand(directory.path / name)}"
                    ) from None
        with suppress(OSError):
            os.unlink(name, dir_fd=directory.descriptor)


def describe_left_changes(directory: LockDirectory) -> Iterator[tuple[str, bool]]:
    """Yield a line for each note of a killed run, and whether its change may still be in force."""
    for name in sorted(os.listdir(directory.descriptor)):  # noqa: PTH208 - by descriptor
        change = _read_note(directory, name) if name.startswith(NOTE_PREFIX) else None
        if change is None or is_held(directory, change.uuid):
            # Of a run that goes on.
            continue
        path, limit_mw = directory.path / name, _read_limit_mw(change)
        if limit_mw is not None and not change.is_limit(limit_mw):
            # Somebody has set another since.
            change = msgspec.structs.replace(change, before_mw=None, set_mw=None)
        parts = [f"a power limit of {change.set_mw / 1000:g} W"] if change.set_mw is not None else []
        parts += ["locked graphics clocks"] if change.locks_clocks else []
        if parts:
            found = f"{'may have' if limit_mw is None else 'has'} left {' and '.join(parts)} on it"
            advice = f"as root, run a test that leases it, or: {change.by_hand(path)}"
            yield f"{change.uuid}: a killed run {found}; {advice}", True
        else:
            yield (
                f"{change.uuid}: a killed run left a note of a limit that it no longer has; rm {path}",
                False,
            )


def note_name(uuid: str) -> str:
    """Return the name of the note of a board."""
    return f"{NOTE_PREFIX}{hash_name(uuid)}"


def _read_note(directory: LockDirectory, name: str) -> Change | None:
    """Return the change of a note; None if there is none, or it was never made, or a reboot has ended it."""
    try:
        descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        # Others could make root change a board.
        if not stat.S_ISREG(state.st_mode) or state.st_uid not in (0, os.geteuid()):
            return None
        change = msgspec.json.decode(os.read(descriptor, MAX_NOTE_BYTES), type=Change)
    except msgspec.DecodeError:
        # Its writer was killed before it had changed anything.
        return None
    finally:
        os.close(descriptor)
    boot_id = read_boot_id()
    return None if change.boot_id and boot_id and change.boot_id != boot_id else change


def _read_limit_mw(change: Change) -> int | None:
    if change.set_mw is not None:
        with suppress(DeviceError), closing(Session()) as session:
            handle = session.open_board(change.uuid).handle
            read = session.module.nvmlDeviceGetPowerManagementLimit
            return read_or_none(session.module, lambda: int(read(handle)))
    return None


# The guard process.


class _Guard:
    def __init__(self, directory: LockDirectory, settings: GpuSettings) -> None:
        self._directory, self._settings, self._session = directory, settings, Session()
        self._made: list[tuple[BoardHandle, Change]] = []

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
        for board, change in self._made:
            try:
                change.restore(self._session, board)
                os.unlink(note_name(board.uuid), dir_fd=self._directory.descriptor)
            except (self._session.module.NVMLError, OSError) as problem:
                error = f"{board.uuid}: {problem}"
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
        """Note the changes of a board, then make them. Returns them with what the driver then reports."""
        nvml, settings, handle = self._session.module, self._settings, board.handle
        watts, clocks = settings.power_limit_w, settings.graphics_clock_mhz
        limit_mw = None if watts is None else round(watts * 1000)
        before_mw = None if watts is None else nvml.nvmlDeviceGetPowerManagementLimit(handle)
        change = Change(board.uuid, read_boot_id(), before_mw, limit_mw, locks_clocks=clocks is not None)
        self._write_note(change)
        # What is refused need not be put back.
        self._made.append((board, Change(board.uuid, "")))
        found_w = found_mhz = None
        if limit_mw is not None:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
            self._made[-1] = board, Change(board.uuid, "", before_mw, limit_mw)
            found_w = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        if clocks is not None:
            nvml.nvmlDeviceSetGpuLockedClocks(handle, *clocks)
            self._made[-1] = board, change
            found_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_GRAPHICS)
        return BoardSettings(
            uuid=board.uuid,
            power_limit_w=watts,
            graphics_clock_mhz=None if clocks is None else list(clocks),
            power_limit_found_w=found_w,
            graphics_clock_found_mhz=found_mhz,
        )

    def _write_note(self, change: Change) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        note = os.open(note_name(change.uuid), flags, 0o644, dir_fd=self._directory.descriptor)
        try:
            os.write(note, msgspec.json.encode(change))
        finally:
            os.close(note)


def _main(settings: str, parent: str, path: str, descriptor: str, *uuids: str) -> None:
    # It ends with pytest, whatever the signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        directory = LockDirectory(Path(path), int(descriptor))
        guard = _Guard(directory, msgspec.json.decode(settings, type=GpuSettings))
    except DeviceError as error:
        _send(_Answer(error=str(error)))
        return
    answer = guard.apply(uuids)
    _send(answer)
    if answer.refusal is None and answer.error is None:
        _wait_for_end(int(parent))
    _send(guard.restore())


def _send(answer: _Answer) -> None:
    # pytest may be gone.
    with suppress(OSError):
        os.write(1, msgspec.json.encode(answer) + b"\n")


def _wait_for_end(parent: int) -> None:
    """Wait until pytest closes the pipe or ends. A fork of it may keep the other end of the pipe open."""
    sources: list[Any] = [0]
    with suppress(OSError, AttributeError):
        sources.append(os.pidfd_open(parent))
    select.select(sources, [], [])


if __name__ == "__main__":
    _main(*sys.argv[1:])
