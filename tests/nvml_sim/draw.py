# SPDX-License-Identifier: Apache-2.0
"""Reproducible pseudo-random numbers; library/draw.h generates the same in C."""

from __future__ import annotations

_WORD = (1 << 64) - 1


def draw(seed: int, index: int) -> int:
    """Return output `index` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) for `seed`, 64 bits."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31
