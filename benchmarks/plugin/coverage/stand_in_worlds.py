# SPDX-License-Identifier: Apache-2.0
"""The worlds of ``stand_in_run.py``: boards with their faults, and how their power follows the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from tests.nvml_sim import Board, Decay, Fault, Process, World
from tests.nvml_sim.shapes import Power

MS = 1_000_000
S = 1000 * MS

#: Power without work, and in windows (W).
IDLE_W, BUSY_W = 100.0, 500.0

#: Power of a neighbour that comes and goes (W), and the shortest and longest time until it does (seconds).
NEIGHBOUR_W, NEIGHBOUR_S = 200.0, (0.05, 0.6)

#: The first process of the host, which is surely not one of the test.
FOREIGN_PID = 1

#: A board whose sensor samples all the time, with a counter that ticks every 100 ms, up to 5 ms late. The
#: power reading refreshes with it.
BOARD = Board(
    name="NVIDIA Sim RTX 4090",
    power_w=IDLE_W,
    latch_ns=100 * MS,
    latch_phase_ns=37 * MS,
    latch_jitter_ns=5 * MS,
    power_latch_ns=100 * MS,
    power_window_ns=100 * MS,
)
PART_TIME = replace(BOARD, sensor_window_ns=25 * MS, power_window_ns=25 * MS)

#: What a fault is, from its start and a random number generator.
DrawFault = Callable[[Random, int], Fault]


@dataclass(frozen=True)
class Setting:
    """One world.

    Attributes:
        boards: The boards.
        fault: Draws a fault of the first board, of which several come at random moments.
        fault_s: How long such a fault lasts (seconds).
        resets: Whether the counter of the first board restarts at zero at random moments.
        half_ns: Time in which power falls half of the way to idle after the work; 0 for at once.
        late_ns: How long after its mark the power of work rises (nanoseconds).
        neighbour: Whether another process draws power at random; a listed one is visible to the test.
        tests: Number of tests with rounds.
    """

    boards: tuple[Board, ...] = (BOARD,)
    fault: DrawFault | None = None
    fault_s: float = 0.0
    resets: bool = False
    half_ns: int = 0
    late_ns: int = 0
    neighbour: Literal["", "hidden", "listed"] = ""
    tests: int = 3


def _ticks(ms: int, jitter_ms: int) -> Setting:
    board = replace(BOARD, latch_ns=ms * MS, latch_jitter_ns=jitter_ms * MS)
    return Setting((board,), tests=3 if ms < 500 else 2)


def _fault(kind: Literal["stall", "loss", "lost"], seconds: float) -> Setting:
    def draw(_random: Random, start_ns: int) -> Fault:
        return Fault(kind, start_ns, start_ns + round(seconds * S))

    return Setting(fault=draw, fault_s=seconds)


def _jump(joules: float) -> Setting:
    return Setting(fault=lambda _random, start_ns: Fault("offset", start_ns, offset_mj=round(joules * 1000)))


def _glitch(random: Random, start_ns: int) -> Fault:
    return Fault("offset", start_ns, start_ns + 250 * MS, random.choice((50_000, -50_000)))


WORLDS: dict[str, Setting] = {
    "ticks of 100 ms, 5 % late": Setting(),
    "ticks of 100 ms, 30 % late": _ticks(100, 30),
    "ticks of 20 ms, 30 % late": _ticks(20, 6),
    "ticks of 500 ms, 5 % late": _ticks(500, 25),
    "part-time sensor, known": Setting((replace(PART_TIME, name="NVIDIA H100 80GB HBM3"),)),
    "part-time sensor, unknown": Setting((replace(PART_TIME, name="NVIDIA Sim X1"),)),
    "gain 1.15": Setting((replace(BOARD, energy_gain=1.15),)),
    "no counter": Setting((replace(BOARD, energy_supported=False),)),
    "no counter, average of 1 s": Setting(
        (replace(BOARD, energy_supported=False, unsupported_fields=(185, 186)),), tests=2
    ),
    "resets": Setting(resets=True),
    "freezes for 3 s": _fault("loss", 3.0),
    "stalls for 350 ms": _fault("stall", 0.35),
    "loses 350 ms": _fault("loss", 0.35),
    "jumps by +50 J": _jump(50),
    "jumps by -50 J": _jump(-50),
    "±50 J for 250 ms": Setting(fault=_glitch, fault_s=0.25),
    "lost for 2 s": _fault("lost", 2.0),
    "slow calls": Setting((replace(BOARD, call_delay_ns=60 * MS, call_delay_every=4),)),
    "power falls, half in 35 ms": Setting(half_ns=35 * MS),
    "power rises 5 ms late": Setting(late_ns=5 * MS),
    "neighbour, hidden": Setting(neighbour="hidden"),
    "neighbour, listed": Setting(neighbour="listed"),
    "8 boards": Setting(tuple(replace(BOARD, latch_phase_ns=13 * number * MS) for number in range(8))),
}


@dataclass
class Rank:
    """Switches the power of all boards when work begins, changes and ends, as a rank does.

    Boards of one world differ in power by up to a fifth.
    """

    world: World
    setting: Setting
    _watts: float = IDLE_W
    _neighbour_w: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw_power(self, watts: float) -> int:
        """Draw so much power for work from now on. Returns the mark, at which power changes unless late."""
        with self._lock:
            late_ns = self.setting.late_ns if self._watts == IDLE_W else 0
            self._watts = watts
            return self._apply(late_ns) - late_ns

    def rest(self) -> int:
        """End the work. Returns the mark."""
        with self._lock:
            before_w, self._watts = self._watts, IDLE_W
            if not self.setting.half_ns:
                return self._apply()
            return self._set(
                [Decay(watts, IDLE_W, self.setting.half_ns) for watts in self._boards_w(before_w)]
            )

    def mean_w(self, watts: float) -> float:
        """Return the power of all boards together."""
        return sum(self._boards_w(watts))

    def true_j(self, start_ns: int, end_ns: int) -> float:
        """Return what all boards drew between two moments."""
        boards = range(len(self.setting.boards))
        return sum(self.world.true_energy_j(index, start_ns, end_ns) for index in boards)

    def _boards_w(self, watts: float) -> list[float]:
        count = len(self.setting.boards)
        return [watts * (1 + 0.2 * index / count) for index in range(count)]

    def _apply(self, late_ns: int = 0) -> int:
        at_ns = time.monotonic_ns() + late_ns if late_ns else None
        return self._set([watts + self._neighbour_w for watts in self._boards_w(self._watts)], at_ns)

    def _set(self, powers: Sequence[Power], at_ns: int | None = None) -> int:
        marks = [self.world.set_power(index, power, at_ns) for index, power in enumerate(powers)]
        return marks[0]

    @contextmanager
    def with_neighbour(self, random: Random) -> Iterator[None]:
        """Let the neighbour of the setting come and go, if it has one."""
        if not self.setting.neighbour:
            yield
            return
        if self.setting.neighbour == "listed":
            self.world.update(0, processes=(Process(FOREIGN_PID),))
        ended = threading.Event()

        def come_and_go() -> None:
            while not ended.wait(random.uniform(*NEIGHBOUR_S)):
                with self._lock:
                    self._neighbour_w = NEIGHBOUR_W - self._neighbour_w
                    self._apply()

        thread = threading.Thread(target=come_and_go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def add_faults(
    rank: Rank, random: Random, start_ns: int, length_s: float, count: int
) -> list[tuple[int, int]]:
    """Schedule up to ``count`` faults of the setting at random moments of a stretch; return when."""
    setting, world = rank.setting, rank.world
    if setting.fault is None and not setting.resets:
        return []
    count = max(1, min(count, int(length_s / (1.5 * setting.fault_s)) if setting.fault_s else count))
    each_s = length_s / count
    found = []
    for number in range(count):
        # A stretch may be shorter than its only fault.
        offset_s = number * each_s + random.uniform(0.0, each_s - (setting.fault_s if count > 1 else 0.0))
        at_ns = start_ns + round(offset_s * S)
        if setting.fault is not None:
            world.add_fault(0, setting.fault(random, at_ns))
        else:
            world.reset_counter(0, at_ns)
        found.append((at_ns, at_ns + round(setting.fault_s * S)))
    return found
