# SPDX-License-Identifier: Apache-2.0
"""Change power limits and clocks of leased boards for one test, and put them back however the test ends.

Each change is noted in the lock directory first. A process of its own, the keeper, which this module is the
program of, puts back what the notes say when pytest closes its pipe or has ended. It holds copies of the
lease, so that no other test gets a board before. If it is killed too, the notes stay: ``llenergy doctor``
names them, and the next test that leases such a board puts the change back.
"""

from __future__ import annotations

import os
import select
import signal
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
from pytest_llenergy.devices.locks import hash_name
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
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str) and value not in parameters:
            raise PlanError(
                f"{name} is {value!r}, which is no parameter of the test; add "
                f"@pytest.mark.parametrize({value!r}, [...]), or give a number"
            )
        found[name] = parameters[value] if isinstance(value, str) else value
    watts, clocks = found.get("power_limit_w"), found.get("graphics_clock_mhz")
    if watts is not None and not (type(watts) in (int, float) and 0 < watts < 1e6):
        raise PlanError(f"power_limit_w is {watts!r}, needs a number of watts such as 250")
    pair = tuple(clocks) if isinstance(clocks, (list, tuple)) else (clocks, clocks)
    is_pair = len(pair) == 2 and all(type(each) is int and each > 0 for each in pair)
    if clocks is not None and not (is_pair and pair[0] <= pair[1]):
        raise PlanError(
            f"graphics_clock_mhz is {clocks!r}, needs a whole number of MHz such as 1200, or the lowest and "
            "the highest such as (900, 1200)"
        )
    settings = GpuSettings(watts, None if clocks is None else pair)
    return None if settings == GpuSettings() else settings


@contextmanager
def apply_settings(
    settings: GpuSettings, lease: Lease, directory: LockDirectory, descriptors: Sequence[int]
) -> Iterator[list[BoardSettings]]:
    """Apply settings to the boards of a lease, whose open files are ``descriptors``, until the block ends.

    Raises:
        SettingsRefusedError: The boards, the driver or the rights of this user do not allow it.
        DeviceError: A board does not take a value.
    """
    if not lease.uuids:
        raise SettingsRefusedError(
            f"{settings}: the test has leased the CPU, and only power limits and clocks of GPUs can be set"
        )
    if lease.divided:
        raise SettingsRefusedError(f"{settings}: a MIG instance has no power limit or clock of its own")
    arguments = [str(os.getpid()), str(directory.path), str(directory.descriptor), *lease.uuids]
    keeper = subprocess.Popen(
        module_command(__name__, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(directory.descriptor, *descriptors),
        # Ctrl-C at the terminal must reach only pytest.
        start_new_session=True,
    )
    try:
        yield _change_boards(settings, lease.uuids, directory)
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        # If the driver hangs, it goes on trying and keeps the boards leased.
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(QUERY_TIMEOUT_S)


def _change_boards(
    settings: GpuSettings, uuids: Sequence[str], directory: LockDirectory
) -> list[BoardSettings]:
    """Change boards, each after a note. What the driver refuses is not in the notes."""
    with closing(Session()) as session:
        nvml = session.module
        boards = [session.open_board(uuid) for uuid in uuids]
        try:
            return [_change_board(session, board, settings, directory) for board in boards]
        except nvml.NVMLError_NoPermission:
            refusal = "only root may change boards; run pytest as root, or leave out this mark"
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            refusal = f"{boards[0].name} or its driver does not support it"
        except nvml.NVMLError as error:
            raise DeviceError(f"{settings}: {error}") from None
    raise SettingsRefusedError(f"{settings}: {refusal}")


def _change_board(
    session: Session, board: BoardHandle, settings: GpuSettings, directory: LockDirectory
) -> BoardSettings:
    nvml, handle = session.module, board.handle
    watts, clocks = settings.power_limit_w, settings.graphics_clock_mhz
    change, found_w, found_mhz = Change(board.uuid, read_boot_id()), None, None
    if watts is not None:
        lowest, highest = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        limit_mw = round(watts * 1000)
        if not lowest <= limit_mw <= highest:
            allowed = f"from {lowest / 1000:g} to {highest / 1000:g} W"
            raise DeviceError(f"{settings}: {board.name} takes a power limit {allowed}")
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
        new, where = f"{FILE_PREFIX}new-{os.urandom(8).hex()}", directory.descriptor
        with os.fdopen(directory.create(new), "wb") as note:
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


def restore_left_changes(directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Put back what notes say of boards, which this process must have leased.

    Raises:
        DeviceError: A board cannot be changed.
    """
    for uuid in uuids:
        name = note_name(uuid)
        if (change := _read_note(directory, name)) is not None:
            with closing(Session()) as session:
                try:
                    change.restore(session, session.open_board(uuid))
                except session.module.NVMLError as error:
                    watts = "" if change.before_mw is None else f" -pl {change.before_mw / 1000:g}, and"
                    raise DeviceError(
                        f"{uuid}: a killed run has left its settings on it ({error}); run a test that leases "
                        f"it as root, or nvidia-smi -i {uuid} with{watts} -rgc; then "
                        f"rm {directory.path / name}"
                    ) from None
        with suppress(OSError):
            os.unlink(name, dir_fd=directory.descriptor)


def note_name(uuid: str) -> str:
    """Return the name of the note of a board."""
    return f"{NOTE_PREFIX}{hash_name(uuid)}"


def _read_note(directory: LockDirectory, name: str) -> Change | None:
    """Return the change of a note; None if there is none, or a reboot has ended it."""
    try:
        descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as note, suppress(msgspec.DecodeError):
        # Others could make root change a board.
        if os.fstat(descriptor).st_uid in (0, os.geteuid()):
            change = msgspec.json.decode(note.read(MAX_NOTE_BYTES), type=Change)
            return change if change.boot_id == read_boot_id() else None
    return None


# The keeper.


def _main(parent: str, path: str, descriptor: str, *uuids: str) -> None:
    # It ends with pytest, whatever the signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sources = [0]
    # A fork of pytest may keep the other end of the pipe open.
    with suppress(OSError):
        sources.append(os.pidfd_open(int(parent)))
    select.select(sources, [], [])
    restore_left_changes(LockDirectory(Path(path), int(descriptor)), uuids)


if __name__ == "__main__":
    _main(*sys.argv[1:])
