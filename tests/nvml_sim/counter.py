# SPDX-License-Identifier: Apache-2.0
"""Value of a board's energy counter at an instant; written independently of library/counter.c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from . import layout
from .draw import draw
from .waveform import Waveform

SCOPE_GPU = 0
SCOPE_MODULE = 1


@dataclass(frozen=True)
class Ticks:
    """The times at which a counter is updated: tick k is at `tick_ns(k)`, for any k."""

    latch_ns: int
    phase_ns: int
    jitter_ns: int
    seed: int

    def tick_ns(self, k: int) -> int:
        """Return the time of tick k: `phase + k * latch` plus a fixed part of the jitter."""
        late_ns = draw(self.seed, k) % self.jitter_ns if self.jitter_ns else 0
        return self.phase_ns + k * self.latch_ns + late_ns

    def last(self, at_ns: int) -> int:
        """Return the number of the last tick at or before an instant."""
        k = (at_ns - self.phase_ns) // self.latch_ns
        return k if self.tick_ns(k) <= at_ns else k - 1

    def between(self, start_ns: int, end_ns: int) -> list[int]:
        """Return the instants of all ticks with `start_ns <= tick < end_ns`."""
        return [self.tick_ns(k) for k in range(self.last(start_ns - 1) + 1, self.last(end_ns - 1) + 1)]


def ticks_of(state: layout.State, index: int) -> Ticks | None:
    """Return the counter's ticks, or None if it moves continuously. Each board has its own jitter."""
    if not state.latch_ns:
        return None
    return Ticks(state.latch_ns, state.latch_phase_ns, state.latch_jitter_ns, index)


def counter_mj(
    state: layout.State,
    waveform: Waveform,
    index: int,
    at_ns: int,
    scope: int = SCOPE_GPU,
    faults: Sequence[layout.Fault] = (),
) -> int:
    """Return an ideal read of the counter at an instant, in mJ."""
    ticks = ticks_of(state, index)
    at_ns = _shown_ns(faults, ticks, min(at_ns, state.frozen_at_ns))
    origin_ns = waveform.start_ns
    offset_mj: int = state.energy_offset_mj
    for reset in state.resets[: state.reset_count]:
        if reset.at_ns <= at_ns:
            origin_ns = max(waveform.start_ns, reset.at_ns)
            offset_mj = state.energy_offset_mj - reset.offset_mj
    gain_ppm: int = state.energy_gain_ppm
    if scope == SCOPE_MODULE:
        gain_ppm = gain_ppm * state.module_factor_ppm // 1_000_000
    update_ns = _update_ns(ticks, at_ns)
    counted_pj = _counted_pj(state, waveform, ticks, origin_ns, at_ns)
    for fault in faults:
        if fault.kind == layout.FAULT_LOSS and fault.end_ns <= update_ns:
            edges = (fault.start_ns - 1, fault.end_ns - 1)
            before_pj, after_pj = (_counted_pj(state, waveform, ticks, origin_ns, edge) for edge in edges)
            counted_pj -= after_pj - before_pj
        elif fault.kind == layout.FAULT_OFFSET and fault.start_ns >= origin_ns:
            offset_mj += fault.offset_mj if fault.start_ns <= update_ns < fault.end_ns else 0
    # The counter is an unsigned 64-bit number, so negative values wrap around as in C.
    return (offset_mj + int(counted_pj * gain_ppm // 10**15)) % (1 << 64)


def _update_ns(ticks: Ticks | None, at_ns: int) -> int:
    """Return when the counter was last updated, up to an instant."""
    return at_ns if ticks is None else ticks.tick_ns(ticks.last(at_ns))


def _shown_ns(faults: Sequence[layout.Fault], ticks: Ticks | None, at_ns: int) -> int:
    """Return an instant at which the counter last ticked as at this one: not while it stands still."""
    for fault in reversed(faults):
        stands = fault.kind in (layout.FAULT_STALL, layout.FAULT_LOSS)
        if stands and fault.start_ns <= _update_ns(ticks, at_ns) < fault.end_ns:
            at_ns = fault.start_ns - 1
    return at_ns


def _counted_pj(
    state: layout.State, waveform: Waveform, ticks: Ticks | None, origin_ns: int, at_ns: int
) -> Fraction:
    window_ns = state.sensor_window_ns
    if at_ns <= origin_ns:
        return Fraction(0)
    if ticks is not None and 0 < window_ns < ticks.latch_ns:
        return _seen_pj(waveform, ticks, window_ns, origin_ns, at_ns)
    end_ns = at_ns if ticks is None else ticks.tick_ns(ticks.last(at_ns))
    return Fraction(waveform.energy_pj(origin_ns, max(end_ns, origin_ns)))


def _seen_pj(waveform: Waveform, ticks: Ticks, window_ns: int, origin_ns: int, at_ns: int) -> Fraction:
    # Mean power over the window times the whole interval, tick by tick.
    seen, previous_ns = 0, origin_ns
    for tick_ns in ticks.between(origin_ns + 1, at_ns + 1):
        seen += waveform.energy_pj(tick_ns - window_ns, tick_ns) * (tick_ns - previous_ns)
        previous_ns = tick_ns
    return Fraction(seen, window_ns)
