# SPDX-License-Identifier: Apache-2.0
"""Create a simulated world, and change it while processes read it through NVML."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from . import codec, counter, layout
from .boards import Board, Fault
from .shapes import Power
from .waveform import Waveform

__all__ = ["NO_PERMISSION", "WORLD_VARIABLE", "Board", "Fault", "World"]

WORLD_VARIABLE = "NVML_SIM_WORLD"
NO_PERMISSION = 4
_WAVEFORM_FIELDS = frozenset({"power_w", "burst"})
_BOARD_FIELDS = frozenset(entry.name for entry in dataclass_fields(Board)) - _WAVEFORM_FIELDS


class World:
    """Boards in a memory-mapped file. Times are CLOCK_MONOTONIC ns, as `time.monotonic_ns()` gives.

    Any number of processes may read through NVML. Writers, in this or another process that called
    `World.open`, take turns by a lock on the file; a forked child has to open the world anew.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        boards: Sequence[Board],
        *,
        start_ns: int | None = None,
        init_result: int = 0,
        driver_version: str = "580.95.05",
        nvml_version: str = "13.580.95.05",
        cuda_driver_version: int = 13000,
    ) -> None:
        """Create the file and map it.

        `start_ns` is when power begins to flow, by default 10 s ago so that averages are settled.
        `init_result` is the NVML code that nvmlInit returns, 0 for success.
        """
        if len(boards) > layout.MAX_BOARDS:
            raise ValueError(f"at most {layout.MAX_BOARDS} boards, got {len(boards)}")
        now_ns = time.monotonic_ns()
        start_ns = now_ns - 10_000_000_000 if start_ns is None else start_ns
        size = ctypes.sizeof(layout.Header) + len(boards) * ctypes.sizeof(layout.BoardRecord)
        content = bytearray(size)
        header = layout.Header.from_buffer(content)
        header.magic, header.version, header.file_size = layout.MAGIC, layout.VERSION, size
        header.header_size = ctypes.sizeof(layout.Header)
        header.board_size = ctypes.sizeof(layout.BoardRecord)
        header.state_size = ctypes.sizeof(layout.State)
        header.step_size = ctypes.sizeof(layout.Step)
        header.board_count, header.init_result = len(boards), init_result
        header.cuda_driver_version = cuda_driver_version
        header.driver_version, header.nvml_version = driver_version.encode(), nvml_version.encode()
        for index, board in enumerate(_named(boards)):
            record = layout.BoardRecord.from_buffer(content, _board_offset(index))
            power = board.burst if board.burst is not None else board.power_w
            codec.write_step(record.steps[0], codec.segment_of(power, start_ns))
            record.slots[0] = codec.encode(board)
            if board.frozen:
                record.slots[0].frozen_at_ns = now_ns
        # The file is complete before it appears, so a reader maps the whole world or none.
        path = Path(path)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(content)
        fresh.replace(path)
        self._map(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> World:
        """Map a world that another process created, in order to change it."""
        world = cls.__new__(cls)
        world._map(Path(path))
        return world

    def _map(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock = threading.Lock()
        self._waveforms: dict[int, Waveform] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._memory = mmap.mmap(self._fd, 0)
        self._header = layout.Header.from_buffer(self._memory)
        if (self._header.magic, self._header.version) != (layout.MAGIC, layout.VERSION):
            raise ValueError(f"{path} is not a world of this layout version")
        count = self._header.board_count
        self._records = [layout.BoardRecord.from_buffer(self._memory, _board_offset(i)) for i in range(count)]

    def close(self) -> None:
        """Unmap the file. Readers that already mapped it keep working."""
        del self._records, self._header
        with suppress(BufferError):
            self._memory.close()
        self._close_fd()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_power(self, index: int, power: Power, at_ns: int | None = None) -> int:
        """Set the power, in watts or as a shape, from `at_ns` (default: now) on; return that time.

        Steps must be in time order. A time in the future is exact for every reader. A time in the past
        changes values that readers may have read, so a counter may jump.
        """
        segment = codec.segment_of(power, 0)
        with self._locked(index) as (record, state):
            count: int = state.step_count
            if count == layout.MAX_STEPS:
                raise ValueError(f"board {index} already has {layout.MAX_STEPS} power steps")
            last_ns = record.steps[count - 1].start_ns
            with _writing(record):
                start_ns = time.monotonic_ns() if at_ns is None else at_ns
                if start_ns < last_ns:
                    raise ValueError(f"steps must be in time order: {start_ns} is before {last_ns}")
                codec.write_step(record.steps[count], segment._replace(start_ns=start_ns))
                state.step_count = count + 1
                _publish(record, state)
        return start_ns

    def reset_counter(self, index: int, at_ns: int | None = None) -> int:
        """Restart the energy counter at 0 at `at_ns` (default: now); return that time.

        This simulates a reload of the driver. The counter reads 0 until the next tick, and from then on
        the energy since the reset. The present `energy_offset_mj` of the board no longer applies, but
        later changes to it do. At most 32 resets, in time order.
        """
        with self._locked(index) as (record, state):
            count: int = state.reset_count
            if count == layout.MAX_RESETS:
                raise ValueError(f"board {index} already has {layout.MAX_RESETS} resets")
            last_ns = state.resets[count - 1].at_ns if count else 0
            with _writing(record):
                start_ns = time.monotonic_ns() if at_ns is None else at_ns
                if start_ns < last_ns:
                    raise ValueError(f"resets must be in time order: {start_ns} is before {last_ns}")
                state.resets[count] = layout.Reset(start_ns, state.energy_offset_mj)
                state.reset_count = count + 1
                _publish(record, state)
        return start_ns

    def add_fault(self, index: int, fault: Fault) -> None:
        """Add a fault, usually one to come: a past one changes what readers may have read. At most 64.

        Each starts when the previous one has ended, or later. An offset for good ends nothing: others may
        follow.
        """
        with self._locked(index) as (record, state):
            count: int = state.fault_count
            if count == layout.MAX_FAULTS:
                raise ValueError(f"board {index} already has {layout.MAX_FAULTS} faults")
            last = record.faults[count - 1] if count else layout.Fault()
            is_over = last.end_ns <= fault.start_ns or last.end_ns == layout.NEVER_NS
            if not last.start_ns <= fault.start_ns < fault.end_ns or not is_over:
                raise ValueError(f"faults must follow one another, and last: {fault}")
            with _writing(record):
                record.faults[count] = codec.fault_of(fault)
                state.fault_count = count + 1
                _publish(record, state)

    def update(self, index: int, **fields: object) -> None:
        """Change fields of a live board by their names in `Board`; use `set_power` for the power."""
        unknown = set(fields) - _BOARD_FIELDS
        if unknown:
            raise ValueError(f"cannot update {sorted(unknown)}; power is changed with set_power")
        with self._locked(index) as (record, previous):
            board = codec.decode(previous, codec.read_step(record.steps[0]))
            changes: dict[str, object] = dict(fields)
            board = replace(board, **changes)  # type: ignore[arg-type]
            state = codec.encode(board, previous)
            with _writing(record):
                if board.frozen and previous.frozen_at_ns == layout.NEVER_NS:
                    state.frozen_at_ns = time.monotonic_ns()
                _publish(record, state)

    def set_init_result(self, code: int) -> None:
        """Set the NVML code that the next nvmlInit returns; 0 is success."""
        self._header.init_result = code

    def board(self, index: int) -> Board:
        """Return the present board; `power_w` and `burst` are those of the world's start."""
        record = self._records[index]
        return codec.decode(self._state(index), codec.read_step(record.steps[0]))

    def index_of(self, uuid: str) -> int:
        """Return the index of a board."""
        return [self.board(index).uuid for index in range(len(self._records))].index(uuid)

    def true_energy_j(self, index: int, start_ns: int, end_ns: int) -> float:
        """Return the energy in joules drawn between two times, exact except for the final rounding."""
        return self._waveform(index).energy_pj(start_ns, end_ns) / 1e12

    def true_power_w(self, index: int, at_ns: int) -> float:
        """Return the power in watts at an instant."""
        return self._waveform(index).power_mw(at_ns) / 1000

    def counter_mj(self, index: int, at_ns: int, scope: int = counter.SCOPE_GPU) -> int:
        """Return an ideal read of the energy counter at an instant, in mJ.

        This uses the present fields of the board, whatever they were at that time, and all resets until
        then. A part-time sensor costs some microseconds for each tick since the world's start.
        """
        state = self._state(index)
        faults = self._records[index].faults[: state.fault_count]
        return counter.counter_mj(state, self._waveform(index), index, at_ns, scope, faults)

    def tick_ns(self, index: int, k: int) -> int:
        """Return the instant of the counter's tick k; ValueError if it moves continuously."""
        return self._ticks(index).tick_ns(k)

    def ticks(self, index: int, start_ns: int, end_ns: int) -> list[int]:
        """Return the instants of the ticks with `start_ns <= tick < end_ns`; errors as `tick_ns`."""
        return self._ticks(index).between(start_ns, end_ns)

    def changes(self, index: int) -> int:
        """Return how often anybody has changed the board, through NVML or by this class."""
        return int(self._records[index].seq)

    def calls(self, index: int) -> int:
        """Return how many queries the board has answered, over all processes."""
        return int(self._records[index].calls)

    def init_count(self) -> int:
        """Return how many times a process mapped this world through nvmlInit."""
        return int(self._header.init_count)

    def environment(self, library_dir: str | os.PathLike[str]) -> dict[str, str]:
        """Return the environment variables that make a subprocess see this world."""
        search = [str(library_dir), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {WORLD_VARIABLE: str(self.path), "LD_LIBRARY_PATH": os.pathsep.join(search)}

    def _state(self, index: int) -> layout.State:
        record = self._records[index]
        while True:
            seq: int = record.seq
            state = layout.State.from_buffer_copy(record.slots[seq & 1])
            _fence()
            if record.seq == seq:
                return state

    def _waveform(self, index: int) -> Waveform:
        # Published steps never change, so they are cached.
        count = self._state(index).step_count
        with self._lock:
            known = self._waveforms.setdefault(index, Waveform())
            for position in range(len(known), count):
                known.append(codec.read_step(self._records[index].steps[position]))
        return known

    def _ticks(self, index: int) -> counter.Ticks:
        ticks = counter.ticks_of(self._state(index), index)
        if ticks is None:
            raise ValueError(f"the counter of board {index} has no ticks: its latch_ns is 0")
        return ticks

    @contextmanager
    def _locked(self, index: int) -> Iterator[tuple[layout.BoardRecord, layout.State]]:
        """Lock out other writers; yield the board's record and a copy of its state."""
        record = self._records[index]
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield record, layout.State.from_buffer_copy(record.slots[record.seq & 1])
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


@contextmanager
def _writing(record: layout.BoardRecord) -> Iterator[None]:
    # Readers wait while `writing` is set; take_snapshot() in library/view.c explains why.
    record.writing = 1
    _fence()
    try:
        yield
    finally:
        _fence()
        record.writing = 0


def _publish(record: layout.BoardRecord, state: layout.State) -> None:
    following: int = record.seq + 1
    record.slots[following & 1] = state
    _fence()
    record.seq = following


_fence_lock = threading.Lock()


def _fence() -> None:
    # Python has no memory fence, but taking and releasing a lock implies one.
    with _fence_lock:
        pass


def _board_offset(index: int) -> int:
    return ctypes.sizeof(layout.Header) + index * ctypes.sizeof(layout.BoardRecord)


def _named(boards: Sequence[Board]) -> list[Board]:
    named = [
        replace(
            board,
            uuid=board.uuid or f"GPU-{0xA1B2C300 + index:08x}-51d0-4c1f-9e70-{0x5E11F0 + index:012x}",
            pci_bus_id=board.pci_bus_id or f"00000000:{0x17 + 0x0E * index:02X}:00.0",
        )
        for index, board in enumerate(boards)
    ]
    slots = [tuple(int(part, 16) for part in board.pci_bus_id.split(".")[0].split(":")) for board in named]
    if any(len(slot) != 3 for slot in slots):
        raise ValueError("a PCI bus id looks like 00000000:3B:00.0")
    # NVML numbers boards by PCI address, so a world in another order could not exist.
    if slots != sorted(set(slots)):
        raise ValueError("boards must be given in ascending PCI order, without repeats")
    return named
