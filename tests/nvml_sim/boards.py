# SPDX-License-Identifier: Apache-2.0
"""What a simulated board is, in the terms a test thinks in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True)
class Burst:
    """A periodic square wave: in each period the high part comes first, counted from the step's start."""

    low_w: float
    high_w: float
    period_ns: int
    duty: float

    def __post_init__(self) -> None:
        if self.period_ns <= 0 or not 0.0 <= self.duty <= 1.0:
            raise ValueError(f"a burst needs a positive period and a duty in 0..1, got {self}")


@dataclass(frozen=True)
class Process:
    """A process that holds the board. `used_memory` is in bytes; None is what NVML reports as unknown."""

    pid: int
    used_memory: int | None = GIB
    graphics: bool = False
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True)
class MigInstance:
    """One MIG device. Memory is in bytes."""

    uuid: str
    memory_total: int = 10 * GIB
    memory_used: int = 0
    gpu_instance: int = 1
    compute_instance: int = 0


@dataclass(frozen=True, kw_only=True)
class Board:
    """One board. Names carry the unit: `_w` watts, `_ns` nanoseconds, `_mj` millijoules, memory in bytes.

    `power_w` or `burst` is the power from the world's start until `World.set_power` says otherwise.
    Empty `uuid` and `pci_bus_id` are filled in by the world from the board's position.

    The counter is `energy_offset_mj + floor(energy_gain * true energy)`, looked at only at the instants
    `latch_phase_ns + k * latch_ns` of CLOCK_MONOTONIC; `latch_ns=0` makes it continuous. Power readings
    are latched by `power_latch_ns` on the same phase. Changing a gain, an offset or a latch on a live
    board acts on the whole past, so the counter jumps: that is how a test makes it run backwards.

    `energy_supported=False` refuses all three energy calls, `unsupported_fields` refuses single field
    codes, and `scopes` lists the scope ids for which fields 185, 186 and 191 answer.
    """

    uuid: str = ""
    name: str = "NVIDIA Sim 100"
    pci_bus_id: str = ""
    memory_total: int = 80 * GIB
    memory_used: int = GIB
    power_limit_w: float = 700.0
    power_w: float = 60.0
    burst: Burst | None = None
    energy_supported: bool = True
    energy_offset_mj: int = 1_000_000
    energy_gain: float = 1.0
    latch_ns: int = 100_000_000
    latch_phase_ns: int = 0
    frozen: bool = False
    power_gain: float = 1.0
    power_latch_ns: int = 0
    power_usage_supported: bool = True
    power_usage_averaged: bool = True
    unsupported_fields: tuple[int, ...] = ()
    scopes: tuple[int, ...] = (0,)
    call_delay_ns: int = 0
    lost: bool = False
    processes: tuple[Process, ...] = ()
    throttle_ns: Mapping[int, int] = field(default_factory=dict)
    event_reasons: int = 0
    temperature_c: int = 40
    clocks_mhz: tuple[int, int, int, int] = (1980, 1980, 2619, 1545)
    persistence: bool = True
    compute_capability: tuple[int, int] = (9, 0)
    architecture: int = 9
    mig_capable: bool = True
    mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()
