# SPDX-License-Identifier: Apache-2.0
"""Describe a simulated board as tests write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from . import layout
from .shapes import Burst

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Process:
    """A process that uses the board, through MPS if `mps`.

    `used_memory` is in bytes; None makes NVML report it as unknown.
    """

    pid: int
    used_memory: int | None = GIB
    graphics: bool = False
    mps: bool = False
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True)
class MigInstance:
    """One MIG instance. Memory is in bytes; with 0 slices the driver reports no attributes."""

    uuid: str
    memory_total: int = 10 * GIB
    memory_used: int = 0
    gpu_instance: int = 1
    compute_instance: int = 0
    gpu_slices: int = 1
    compute_slices: int = 1


@dataclass(frozen=True)
class Fault:
    """Something wrong with a board from `start_ns` until `end_ns`, by default for good.

    `"offset"`: the counter is `offset_mj` off at its ticks in that time, unless a reset is in between.
    `"stall"`: the counter does not tick in that time, and catches up at the next tick; `"loss"`: it goes on
    from where it stood, and the energy of that time is missing. `"lost"`: every query fails as for `lost`.
    """

    kind: Literal["offset", "stall", "loss", "lost"]
    start_ns: int
    end_ns: int = layout.NEVER_NS
    offset_mj: int = 0


@dataclass(frozen=True, kw_only=True)
class Board:
    """One board. Suffixes give units: `_w` watts, `_ns` nanoseconds, `_mj` millijoules; memory is in bytes.

    `power_w` or `burst` is the power from the world's start until `World.set_power` changes it.
    The world fills in an empty `uuid` or `pci_bus_id` from the board's position.

    **Counter.** It reads `energy_offset_mj + floor(energy_gain * counted energy)`, updated only at its
    ticks: tick k is at `latch_phase_ns + k * latch_ns + j` of CLOCK_MONOTONIC, where j is a fixed draw of
    k with 0 <= j < `latch_jitter_ns`. `latch_ns=0` makes the counter continuous. The counted energy is the
    true one, except for a part-time sensor (`0 < sensor_window_ns < latch_ns`): each tick adds the mean
    power over the last `sensor_window_ns` times the whole interval since the previous tick (or since the
    world's start or the last `World.reset_counter`, if that came later).

    Changing a gain, an offset, a latch or a window of a live board applies to the whole past, so the
    counter jumps. `update(i, energy_offset_mj=lower)` makes it step back; `World.reset_counter` restarts
    it at 0, now or at a given time.

    **Power.** Field 185 is the mean over the last second; field 186 is the power at the instant, or with
    `power_window_ns` the mean over that time before it; `power_usage_averaged` selects which of the two
    `nvmlDeviceGetPowerUsage` returns. All are updated every `power_latch_ns` in phase with the counter,
    without jitter; 0 means continuously.

    **Support.** `energy_supported=False` refuses all three energy calls, `unsupported_fields` refuses
    single field codes, and `scopes` lists the scope ids for which fields 185, 186 and 191 answer. Field 83
    and `nvmlDeviceGetTotalEnergyConsumption` apply to scope 0, the GPU, and answer only if it is listed;
    `nvmlDeviceGetPowerUsage` depends on `power_usage_supported` alone. A Grace Hopper board is therefore
    `scopes=(1,)`. Scope 1, the module, reads `module_factor` times the power and energy of the board.
    `processes_supported=False` refuses the process lists, as without permission. `lost` and
    `no_permission` make every query of the board, including that for its handle, fail with codes 15 and 4.

    **Settings.** Through NVML, processes set `power_limit_w` and `locked_clocks_mhz`, the lowest and highest
    graphics clock, (0, 0) if not locked. `settings_supported=False` refuses that with code 3, and
    `settings_denied`, as for users without root, with code 4. Power does not follow them.

    **Memory.** `memory_used` is the allocated memory. `memory_reserved`, in whole MiB, belongs to the
    driver; version 1 of `nvmlDeviceGetMemoryInfo` counts it as used and version 2 does not.

    **Slow calls.** Every `call_delay_every`-th query of the board, over all processes, as counted by
    `World.calls`, sleeps for `call_delay_ns`; 0 and 1 mean every query. `call_delay_before=True` sleeps
    before reading the value, which is then that of the end of the call; False sleeps afterwards, so the
    value (and a field's timestamp) is that of the start.
    """

    uuid: str = ""
    name: str = "NVIDIA Sim RTX 4090"
    pci_bus_id: str = ""
    memory_total: int = 80 * GIB
    memory_used: int = 4 * MIB
    memory_reserved: int = 0
    power_limit_w: float = 700.0
    power_limit_min_w: float = 200.0
    power_limit_max_w: float = 700.0
    power_limit_default_w: float = 700.0
    power_w: float = 60.0
    burst: Burst | None = None
    energy_supported: bool = True
    energy_offset_mj: int = 1_000_000
    energy_gain: float = 1.0
    latch_ns: int = 100_000_000
    latch_phase_ns: int = 0
    latch_jitter_ns: int = 0
    sensor_window_ns: int = 0
    frozen: bool = False
    power_gain: float = 1.0
    power_latch_ns: int = 0
    power_window_ns: int = 0
    power_usage_supported: bool = True
    power_usage_averaged: bool = True
    unsupported_fields: tuple[int, ...] = ()
    scopes: tuple[int, ...] = (0,)
    module_factor: float = 1.0
    call_delay_ns: int = 0
    call_delay_every: int = 0
    call_delay_before: bool = True
    lost: bool = False
    no_permission: bool = False
    processes: tuple[Process, ...] = ()
    processes_supported: bool = True
    throttle_ns: Mapping[int, int] = field(default_factory=dict)
    event_reasons: int = 0
    temperature_c: int = 40
    clocks_mhz: tuple[int, int, int, int] = (1980, 1980, 2619, 1545)
    max_clocks_mhz: tuple[int, int, int, int] = (1980, 1980, 2619, 1545)
    locked_clocks_mhz: tuple[int, int] = (0, 0)
    settings_supported: bool = True
    settings_denied: bool = False
    persistence: bool = True
    compute_capability: tuple[int, int] = (9, 0)
    architecture: int = 9
    mig_capable: bool = True
    mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()

    def __post_init__(self) -> None:
        if self.latch_jitter_ns and not 0 <= self.latch_jitter_ns < self.latch_ns:
            raise ValueError(
                f"latch_jitter_ns must be below latch_ns={self.latch_ns}, got {self.latch_jitter_ns}"
            )
        for name in ("latch_ns", "sensor_window_ns", "power_latch_ns", "power_window_ns", "call_delay_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
