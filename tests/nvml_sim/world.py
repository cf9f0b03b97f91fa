# SPDX-License-Identifier: Apache-2.0
"""Creating a simulated world and driving it while processes read it through NVML."""

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

from . import codec, layout, waveform
from .boards import Board, Burst, MigInstance, Process
from .build import BuildError, build_library

__all__ = ["Board", "BuildError", "Burst", "MigInstance", "Process", "World", "build_library"]

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
            record.slots[0] = codec.encode(board, now_ns)
        # Complete before it can be seen: a reader maps the whole world or finds none.
        path = Path(path)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(content)
        fresh.replace(path)
        self._map(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> World:
        """Map a world that another process created, to drive it from here too."""
        world = cls.__new__(cls)
        world._map(Path(path))
        return world

    def _map(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock = threading.Lock()
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

    def set_power(self, index: int, watts: float | Burst, at_ns: int | None = None) -> int:
        """From `at_ns` (default: now) the board draws `watts`, or the given burst; returns that instant.

        Steps are in time order. An instant in the future is exact for every reader. One in the past
        rewrites what readers may already have seen, so a counter may jump.
        """
        with self._writing(index) as record:
            previous = record.slots[record.seq & 1]
            count: int = previous.step_count
            start_ns = time.monotonic_ns() if at_ns is None else at_ns
            last_ns = record.steps[count - 1].start_ns
            if start_ns < last_ns:
                raise ValueError(f"steps must be in time order: {start_ns} is before {last_ns}")
            if count == layout.MAX_STEPS:
                raise ValueError(f"board {index} already has {layout.MAX_STEPS} power steps")
            codec.write_step(record.steps[count], codec.segment_of(watts, start_ns))
            state = layout.State.from_buffer_copy(previous)
            state.step_count = count + 1
            _publish(record, state)
        return start_ns

    def update(self, index: int, **fields: object) -> None:
        """Change fields of a live board, by their names in `Board`; power goes through `set_power`."""
        unknown = set(fields) - _BOARD_FIELDS
        if unknown:
            raise ValueError(f"cannot update {sorted(unknown)}; power is changed with set_power")
        with self._writing(index) as record:
            previous = record.slots[record.seq & 1]
            board = codec.decode(previous, codec.read_step(record.steps[0]))
            changes: dict[str, object] = dict(fields)
            board = replace(board, **changes)  # type: ignore[arg-type]
            _publish(record, codec.encode(board, time.monotonic_ns(), previous))

    def set_init_result(self, code: int) -> None:
        """The NVML code that the next nvmlInit returns, 0 for success."""
        self._header.init_result = code

    def board(self, index: int) -> Board:
        """The board as it is now; `power_w` and `burst` are those of the world's start."""
        record = self._records[index]
        return codec.decode(self._state(index), codec.read_step(record.steps[0]))

    def true_energy_j(self, index: int, start_ns: int, end_ns: int) -> float:
        """The energy in joules that the board drew between two instants, exact but for the last rounding."""
        return waveform.energy_pj(self._segments(index), start_ns, end_ns) / 1e12

    def true_power_w(self, index: int, at_ns: int) -> float:
        """The power in watts at an instant."""
        return waveform.power_mw(self._segments(index), at_ns) / 1000

    def calls(self, index: int) -> int:
        """How many queries the board has answered, over all processes."""
        return int(self._records[index].calls)

    def init_count(self) -> int:
        """How many times a process mapped this world through nvmlInit."""
        return int(self._header.init_count)

    def environment(self, library_dir: str | os.PathLike[str]) -> dict[str, str]:
        """The variables that make a subprocess see this world; merge them into its environment."""
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

    def _segments(self, index: int) -> list[waveform.Segment]:
        count = self._state(index).step_count
        return [codec.read_step(step) for step in self._records[index].steps[:count]]

    @contextmanager
    def _writing(self, index: int) -> Iterator[layout.BoardRecord]:
        # Readers hold back while `writing` is up; see take_snapshot() in nvml_sim.c for why.
        record = self._records[index]
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                record.writing = 1
                _fence()
                yield record
            finally:
                _fence()
                record.writing = 0
                fcntl.flock(self._fd, fcntl.LOCK_UN)


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
    # NVML numbers boards by PCI address; a world in another order would be one that cannot exist.
    if slots != sorted(set(slots)):
        raise ValueError("boards must be given in ascending PCI order, without repeats")
    return named
