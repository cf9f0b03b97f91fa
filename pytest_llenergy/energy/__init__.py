# SPDX-License-Identifier: Apache-2.0
"""Meters: cumulative joules per domain on the monotonic clock, and windows of them.

``measure()`` is all that a plain script needs. Between two calls of ``nvmlDeviceGetTotalEnergyConsumption``
and joules with their uncertainty lie three steps.

**Trace.** A meter (``meters/``) reads cumulative joules; power readings are integrated first
(``power_readings``). ``selfcheck`` tells once per board and driver when its counter ticks and whether it
agrees with power. ``sampler`` reads in a thread, mostly near the ticks that ``schedule`` predicts. ``trace``
keeps, for each tick, the two moments between which the counter moved, and what was wrong with it.

**Window.** ``window`` notes when work begins and ends, ``window_meters`` what the host of the meters does
then. The counter stands still between ticks, so ``window_arithmetic`` infers its value at both edges:

- ``quiet_gaps``: from the nearest tick outside, and idle power up to the edge, as in rounds;
- ``joint_solution``: windows and phases that share ticks, from all of these ticks at once;
- ``edges``: a counter that is always fresh, or one window that is shorter than two ticks;
- ``running_average``: readings that lag, since they are means of the last second.

**Uncertainty.** Each of them states variances by cause, which ``uncertainty`` adds up. ``host_window`` adds
flags, and on a busy host the test's share of a processor (``attribution``, from ``cpu_time``).
"""

from __future__ import annotations

from pytest_llenergy.energy.window import Measuring, Window, measure

__all__ = ["Measuring", "Window", "measure"]
