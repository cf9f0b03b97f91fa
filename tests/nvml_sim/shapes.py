# SPDX-License-Identifier: Apache-2.0
"""Shapes of power between two calls of `World.set_power`. Powers are rounded to whole mW."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_RAMP_NS = 86_400_000_000_000
LONGEST_HALF_NS = 10_000_000_000


@dataclass(frozen=True)
class Burst:
    """A periodic square wave; each period, counted from the step's start, begins with the high part."""

    low_w: float
    high_w: float
    period_ns: int
    duty: float

    def __post_init__(self) -> None:
        if self.period_ns <= 0 or not 0.0 <= self.duty <= 1.0:
            raise ValueError(f"a burst needs a positive period and a duty in 0..1, got {self}")


@dataclass(frozen=True)
class Ramp:
    """A straight line from `from_w` to `to_w` over `duration_ns`, at most a day, and `to_w` from then on.

    Its energy over the first x ns, in pJ, is rounded down to a whole number, and so is its power in mW.
    """

    from_w: float
    to_w: float
    duration_ns: int

    def __post_init__(self) -> None:
        # Beyond a day, power times time squared would overflow the 128 bits of the C side.
        if not 0 < self.duration_ns <= LONGEST_RAMP_NS:
            raise ValueError(f"a ramp lasts from 1 ns to a day, got {self}")


@dataclass(frozen=True)
class Decay:
    """Power that halves its distance to `to_w` in every `half_ns`, at most 10 s, as after work.

    It falls, or rises, in a straight line within each of 24 such periods, and is `to_w` from then on. Its
    energy and power are rounded down as those of a ramp.
    """

    from_w: float
    to_w: float
    half_ns: int

    def __post_init__(self) -> None:
        # Beyond 10 s, the energy of all periods would overflow the 128 bits of the C side.
        if not 0 < self.half_ns <= LONGEST_HALF_NS:
            raise ValueError(f"a decay halves within 1 ns to 10 s, got {self}")


@dataclass(frozen=True)
class Noise:
    """Power drawn anew every `period_ns`, uniformly over the whole mW from `low_w` to `high_w` inclusive.

    Draw n is a fixed function of `seed` and n, so that all processes see the same power. The first read
    at a time costs a few ns per period since the step's start; later reads cost almost nothing.
    """

    low_w: float
    high_w: float
    period_ns: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.period_ns <= 0 or self.low_w > self.high_w or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"noise needs a positive period, low_w <= high_w, a 64-bit seed, got {self}")


Power = float | Burst | Decay | Ramp | Noise
"""Constant power in watts, or a shape."""
