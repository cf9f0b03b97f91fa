# SPDX-License-Identifier: Apache-2.0
"""What a test asks for: how many GPUs, and which ones would do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from pytest_llenergy.errors import PlanError

#: Bytes of a unit. Boards are sold by 10^9 bytes, and what a driver shows of one is more than that.
UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SPELLING = {"mb": "MB", "gb": "GB", "tb": "TB", "mib": "MiB", "gib": "GiB", "tib": "TiB"}
SMALLER = {"TB": "GB", "GB": "MB", "TiB": "GiB", "GiB": "MiB"}

#: Compute slices where they are fewer than the GPU's, GPU slices, memory.
PROFILE = re.compile(r"(?:[1-9]c\.)?[1-9]g\.[1-9][0-9]*gb")


@dataclass(frozen=True)
class GpuRequest:
    """``n`` GPUs, each of which has what is asked for.

    ``name`` is a part of the product name in either case, ``memory`` the least total of each as in
    ``"40 GB"`` or ``"40 GiB"``, ``mig`` a profile as in ``1g.10gb``, which asks for instances instead of
    boards; ``fallback="cpu"`` allows CPU ranks. Raises ``PlanError`` for a value that is none of these.
    """

    n: int = 1
    name: str | None = None
    fallback: str | None = None
    memory: str | None = None
    mig: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise PlanError(f"n is {self.n!r}, needs a whole number, 1 or more")
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise PlanError(f'name is {self.name!r}, needs a part of the product name, such as "H200"')
        if self.fallback not in (None, "cpu"):
            raise PlanError(f'fallback is {self.fallback!r}, knows only "cpu"')
        if self.memory is not None:
            parse_memory(self.memory)
        if self.mig is not None and not (isinstance(self.mig, str) and PROFILE.fullmatch(self.mig.lower())):
            raise PlanError(f'mig is {self.mig!r}, needs a profile such as "1g.10gb" (nvidia-smi mig -lgip)')

    @cached_property
    def memory_bytes(self) -> int:
        """The least total memory of each device; 0 where none is asked for."""
        return parse_memory(self.memory)[0] if self.memory is not None else 0

    @property
    def memory_unit(self) -> str:
        """The unit in which the memory is asked for."""
        return parse_memory(self.memory)[1] if self.memory is not None else "GB"

    def __str__(self) -> str:
        """As the mark is written."""
        asked = (("name", self.name), ("memory", self.memory), ("mig", self.mig))
        told = (f", {name}={value!r}" for name, value in asked if value is not None)
        return f"gpus({self.n}{''.join(told)})"


def parse_memory(text: str) -> tuple[int, str]:
    """Bytes and unit of a text such as ``40 GB`` (10^9) or ``40 GiB`` (2^30).

    Raises ``PlanError`` for anything else.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([mgt]i?b)\s*", text.lower()) if _text(text) else None
    size = float(found[1]) * UNITS[found[2]] if found is not None else 0.0
    if found is None or not 0 < size < math.inf:
        raise PlanError(
            f'memory is {text!r}, needs a number above 0 and a unit, such as "40 GB" or "40 GiB" '
            f"(units: {', '.join(SPELLING.values())})"
        )
    return round(size), SPELLING[found[2]]


def format_memory(memory_bytes: int | None, unit: str = "GiB") -> str:
    """With one decimal and never rounded up: what is too little must not look like enough.

    In this unit, or in the next smaller one where it is less than one of it.
    """
    if memory_bytes is None:
        return "unknown memory"
    if memory_bytes < UNITS[unit.lower()]:
        unit = SMALLER.get(unit, unit)
    tenths = memory_bytes * 10 // UNITS[unit.lower()]
    return f"{tenths / 10:g} {unit}" if tenths % 10 else f"{tenths // 10} {unit}"


def _text(value: object) -> bool:
    # A mark can hold anything, whatever its signature says.
    return isinstance(value, str)
