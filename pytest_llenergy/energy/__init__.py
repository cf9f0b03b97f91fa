# SPDX-License-Identifier: Apache-2.0
"""Meters: cumulative joules per domain on the monotonic clock, and windows of them.

``measure()`` is all that a plain script needs. This page says what happens between two calls of
``nvmlDeviceGetTotalEnergyConsumption`` and a joule with its uncertainty. Names that end in ``_ns`` are
moments on the monotonic clock.

**What is read.** ``meters.select`` opens the meters of the targets. ``meters.nvml`` asks a board for every
counter that it may have and takes the best. Once per board, driver and boot, ``selfcheck`` reads counter and
power together for a second or two: it finds the period of the counter's ticks, and rejects a counter that
stands still, goes back, or differs from integrated power. Each meter describes itself in a ``Domain``:
period, resolution, highest power, share of each tick that its sensor samples, accuracy. Without a counter,
power is integrated to one (``power_readings``), which lags by a refresh, or is a running average.

**When it is read.** A counter stands still between its ticks, so one reading says little about the moment at
which it was made, but two readings around a tick say when the counter was up to date. ``sampler`` has one
thread for all meters. ``schedule.Timetable`` fits a line through the latest ticks and reads a few times
around the next one; ``schedule.Budget`` keeps that below 1 % of a core, and a quarter of it during work,
except in quiet gaps and next to the edges of windows. Elsewhere in a window, ticks may be left unread for a
second.

**Trace.** Each reading goes to ``trace.Series.add``. If the joules have moved since the last one, that is a
``Tick``: energy, and the two moments between which the counter moved. ``Timetable`` narrows the ticks that
were read late to their prediction, unless they came before they were due: a counter may tick faster under
load. A counter that goes back, or moves by more than the device can draw, leaves an ``Outage``: windows that
touch it have its reason in place of energy. A tick that did not come leaves a stall, whose energy is added
to the uncertainty.

**Window.** ``window.Window`` waits for the GPU, notes its start and its end, and tells the meters of each
host (``window_meters``). Rounds (``measure/``) have their moments from the ranks. Once three more ticks have
come, ``window_arithmetic.energy_between`` computes E(end) - E(start):

1. Between quiet gaps, as in rounds: ``quiet_gaps.quiet_power`` is the idle power P of a gap, from its first
   to its last tick, and E(edge) = C(tick) + P (edge - tick) with the tick next to the work.
2. Under load: ``joint_solution`` takes all windows that share ticks, and models power as a mean and a trend
   for each name, with deviations, a common course and fluctuation, each Gaussian. Its best linear prediction
   from the increments between ticks is the energy (kriging). ``measure.phases`` solves the phases of a round
   alike. Alone, a window with fewer than two ticks inside (``edges.is_short_window``) may hold all, none or a
   share of what the power around it does not explain; beside a few others, none to all of its own ticks.
3. Counters that are fresh at every reading, and averages: ``edges.energy_at``.

**Uncertainty.** Every step states variances by cause (``uncertainty.Variances``, all at k = 1):

- ``edges``: a tick known within g has the variance (P g)²/12;
- ``outside``: idle power and its fluctuation, over the distance to the tick; what stood still, readings that
  lag;
- ``resolution``: the counter's step q gives q²/6;
- ``shape``: what the model leaves open, and the tail after the work: its power for ``Domain.tail_s``, which
  does not fall at once. It is the same in all windows, so that its standard uncertainties are added;
- ``coverage``: what a part-time sensor did not sample, or what happened between two power readings;
- ``attribution``, ``clock``: the split of a busy CPU (``attribution``), the clock of another host.

``host_window`` adds them up over domains, with the flags of the trace. If the standard uncertainty exceeds a
third of the energy, ``require_resolvable`` takes what bounds the window: none to all of the energy between
the ticks around it, and the device's highest power; where nothing bounds it, there is a reason. The accuracy
of the sensor (``Domain.limits``) is added last, in ``energy_u_absolute_j`` alone: it cancels between runs on
one device.
"""

from __future__ import annotations

from pytest_llenergy.energy.window import Measuring, Window, measure

__all__ = ["Measuring", "Window", "measure"]
