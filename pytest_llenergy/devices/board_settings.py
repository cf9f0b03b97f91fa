# SPDX-License-Identifier: Apache-2.0
"""Change power limits and clocks of leased boards for one test, and put them back however the test ends.

A process of its own, which this module is the program of, makes the changes. It notes each in the lock
directory first, and puts back what the notes say when pytest closes its pipe or has ended. It holds copies of
the lease, so that no other test gets a board before. If it is killed too, the notes stay: ``llenergy doctor``
names them, and the next test that leases such a board puts the change back.
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
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.locks import hash_name, is_held
from pytest_llenergy.devices.nvml import BoardHandle, Session
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


class AppliedSettings(msgspec.Struct, frozen=True):
    """What was asked of each board and what the driver then reported; or why nothing was changed."""

    boards: list[BoardSettings] = []
    refusal: str | None = None
    error: str | None = None


@contextmanager
def apply_settings(
    settings: GpuSettings, lease: Lease, directory: LockDirectory, descriptors: Sequence[int]
) -> Iterator[AppliedSettings]:
    """Apply settings to the boards of a lease until the block ends.

    Args:
        settings: The settings.
        lease: The boards.
        directory: Where the changes are noted.
        descriptors: Open files of the lease.

    Raises:
        SettingsRefusedError: The boards, the driver or the rights of this user do not allow it.
        DeviceError: A board does not take a value, the driver does not answer, or the boards could not be
            restored.
    """
    if not lease.uuids:
        raise SettingsRefusedError(
            f"{settings}: the test has leased the CPU, and only power limits and clocks of GPUs can be set"
        )
    if lease.divided:
        raise SettingsRefusedError(f"{settings}: a MIG instance has no power limit or clock of its own")
    wanted = msgspec.json.encode(settings).decode()
    arguments = [wanted, str(os.getpid()), str(directory.path), str(directory.descriptor), *lease.uuids]
    keeper = subprocess.Popen(
        module_command(__name__, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(directory.descriptor, *descriptors),
        # Ctrl-C at the terminal must reach only pytest.
        start_new_session=True,
    )
    try:
        applied = _read_answer(keeper)
        if applied.refusal is not None:
            raise SettingsRefusedError(f"{settings}: {applied.refusal}")
        if applied.error is not None:
            raise DeviceError(f"{settings}: {applied.error}")
        yield applied
    finally:
        _end(keeper, directory, lease.uuids)


def _read_answer(keeper: subprocess.Popen[bytes]) -> AppliedSettings:
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], QUERY_TIMEOUT_S)[0]:
        return AppliedSettings(
            error=f"NVML: the driver has not answered for {QUERY_TIMEOUT_S:g} s; see nvidia-smi"
        )
    line = keeper.stdout.readline()
    if not line:
        return AppliedSettings(error="the process that changes boards has ended; run the test again")
    return msgspec.json.decode(line, type=AppliedSettings)


def _end(keeper: subprocess.Popen[bytes], directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Let the keeper restore the boards, or do so if it is gone."""
    for pipe in (keeper.stdin, keeper.stdout):
        assert pipe is not None
        pipe.close()
    try:
        keeper.wait(QUERY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"{', '.join(uuids)}: the driver has not put back power limit and clocks for {QUERY_TIMEOUT_S:g} "
            f"s; process {keeper.pid} goes on trying, and keeps the boards leased; see nvidia-smi"
        ) from None
    restore_left_changes(directory, uuids)


# Notes of changes.


class Change(msgspec.Struct, frozen=True):
    """The note of a board: its power limit before and since (mW), and whether clocks were locked."""

    uuid: str
    boot_id: str
    before_mw: int | None = None
    set_mw: int | None = None
    locks_clocks: bool = False

    def write(self, directory: LockDirectory) -> None:
        """Write the note, in one step."""
        where, new = directory.descriptor, f"{FILE_PREFIX}new-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o644, dir_fd=where), "wb") as note:
            note.write(msgspec.json.encode(self))
        os.rename(new, note_name(self.uuid), src_dir_fd=where, dst_dir_fd=where)

    def restore(self, session: Session, board: BoardHandle) -> None:
        """Put the change back. A power limit that somebody else has set since stays.

        Raises:
            NVMLError: The driver refuses.
        """
        nvml, handle = session.module, board.handle
        if self.locks_clocks:
            nvml.nvmlDeviceResetGpuLockedClocks(handle)
        if self.set_mw != self.before_mw and nvml.nvmlDeviceGetPowerManagementLimit(handle) == self.set_mw:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, self.before_mw)

    def __str__(self) -> str:
        """Return what is left on the board, and the commands that put it back."""
        limit, clocks = self.set_mw is not None, self.locks_clocks
        parts = [f"a power limit of {(self.set_mw or 0) / 1000:g} W"] * limit
        parts += ["locked graphics clocks"] * clocks
        commands = [f"-pl {(self.before_mw or 0) / 1000:g}"] * limit + ["-rgc"] * clocks
        by_hand = "; ".join(f"nvidia-smi -i {self.uuid} {command}" for command in commands)
        left = f"{self.uuid}: a killed run left {' and '.join(parts)} on it"
        return f"{left}; as root, run a test that leases it, or: {by_hand}"


def restore_left_changes(directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Put back what notes say of boards, which this process must have leased.

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
                    raise DeviceError(f"{change}; rm {directory.path / name} ({error})") from None
        with suppress(OSError):
            os.unlink(name, dir_fd=directory.descriptor)


def describe_left_changes(directory: LockDirectory) -> Iterator[str]:
    """Yield a line for each note of a killed run."""
    for name in sorted(os.listdir(directory.descriptor)):  # noqa: PTH208 - by descriptor
        change = _read_note(directory, name) if name.startswith(NOTE_PREFIX) else None
        if change is not None and not is_held(directory, change.uuid):
            yield f"{change}; rm {directory.path / name}"


def note_name(uuid: str) -> str:
    """Return the name of the note of a board."""
    return f"{NOTE_PREFIX}{hash_name(uuid)}"


def _read_note(directory: LockDirectory, name: str) -> Change | None:
    """Return the change of a note; None if there is none, or a reboot has ended it."""
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
        return None
    finally:
        os.close(descriptor)
    return change if change.boot_id == read_boot_id() else None


# The process that keeps the settings.


def _apply(settings: GpuSettings, uuids: Sequence[str], directory: LockDirectory) -> AppliedSettings:
    """Change boards, each after a note. What the driver refuses is not in the notes."""
    with closing(Session()) as session:
        nvml = session.module
        try:
            boards = [session.open_board(uuid) for uuid in uuids]
            return AppliedSettings([_apply_to(session, board, settings, directory) for board in boards])
        except nvml.NVMLError_NoPermission:
            return AppliedSettings(
                refusal="only root may change boards; run pytest as root, or leave out this mark"
            )
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return AppliedSettings(refusal=f"{boards[0].name} or its driver does not support it")


def _apply_to(
    session: Session, board: BoardHandle, settings: GpuSettings, directory: LockDirectory
) -> BoardSettings:
    nvml, handle = session.module, board.handle
    watts, clocks = settings.power_limit_w, settings.graphics_clock_mhz
    change, found_w, found_mhz = Change(board.uuid, read_boot_id()), None, None
    if watts is not None:
        lowest, highest = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        limit_mw = round(watts * 1000)
        if not lowest <= limit_mw <= highest:
            raise DeviceError(
                f"{board.name} takes a power limit from {lowest / 1000:g} to {highest / 1000:g} W"
            )
        before_mw = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        change = replace(change, before_mw=before_mw, set_mw=limit_mw)
        change.write(directory)
        nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        found_w = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    if clocks is not None:
        replace(change, locks_clocks=True).write(directory)
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(handle, *clocks)
        except nvml.NVMLError:
            change.write(directory)
            raise
        found_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_GRAPHICS)
    return BoardSettings(
        uuid=board.uuid,
        power_limit_w=watts,
        graphics_clock_mhz=None if clocks is None else list(clocks),
        power_limit_found_w=found_w,
        graphics_clock_found_mhz=found_mhz,
    )


def _main(settings: str, parent: str, path: str, descriptor: str, *uuids: str) -> None:
    # It ends with pytest, whatever the signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    directory = LockDirectory(Path(path), int(descriptor))
    try:
        answer = _apply(msgspec.json.decode(settings, type=GpuSettings), uuids, directory)
    except Exception as error:  # of any driver
        answer = AppliedSettings(error=str(error))
    # A fork of pytest may keep the other end of the pipe open.
    sources: list[Any] = [0]
    with suppress(OSError, AttributeError):
        sources.append(os.pidfd_open(int(parent)))
    with suppress(OSError):
        os.write(1, msgspec.json.encode(answer) + b"\n")
    select.select(sources, [], [])
    restore_left_changes(directory, uuids)


if __name__ == "__main__":
    _main(*sys.argv[1:])
