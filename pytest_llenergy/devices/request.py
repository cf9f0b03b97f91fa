# SPDX-License-Identifier: Apache-2.0
"""What a test requests: how many GPUs, and which ones would do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pytest_llenergy.errors import PlanError

#: Bytes per unit. Vendors count memory in units of 10^9 bytes; the driver shows a little more than that.
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([mgt]i?b)\s*", re.I | re.A)


@dataclass(frozen=True)
class GpuRequest:
    """A request for ``n`` GPUs that all meet the same requirements.

    Attributes:
        n: Number of GPUs.
        name: Part of the product name, in upper or lower case.
        fallback: ``"cpu"`` allows CPU ranks if there are too few GPUs.
        memory: Minimum total memory of each, such as ``"40 GB"`` or ``"40 GiB"``.
        per_host: How many of them each host has; ``None`` leaves that to the cluster.
        isolate: Whether a plain test runs in a process of its own; ``None`` if it gets GPUs.

    Raises:
        PlanError: A value is invalid.
    """

    n: int = 1
    name: str | None = None
    fallback: str | None = None
    memory: str | None = None
    per_host: int | None = None
    isolate: bool | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.n):
            raise PlanError(f"n is {self.n!r}, needs a whole number, 1 or more")
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise PlanError(f'name is {self.name!r}, needs a part of the product name, such as "H200"')
        if self.isolate not in (None, True, False):
            raise PlanError(f"isolate is {self.isolate!r}, needs True or False")
        if self.fallback not in (None, "cpu"):
            raise PlanError(f'fallback is {self.fallback!r}, must be "cpu"')
        if self.memory is not None:
            parse_memory(self.memory)
        if self.per_host is not None and not _is_count(self.per_host):
            raise PlanError(f"per_host is {self.per_host!r}, needs a whole number, 1 or more")
        if self.per_host is not None and self.n % self.per_host:
            raise PlanError(
                f"per_host={self.per_host} does not divide n={self.n}: all hosts get equal shares"
            )

    def __str__(self) -> str:
        """Return the request as its mark is written."""
        names = ("name", "memory", "per_host")
        given = (f", {name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)
        return f"gpus({self.n}{''.join(given)})"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def parse_memory(text: object) -> tuple[int, str]:
    """Parse a size such as ``40 GB`` (10^9) or ``40 GiB`` (2^30). Returns bytes and unit.

    Raises:
        PlanError: The text is not such a size.
    """
    match = SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        unit = next(each for each in UNITS if each.lower() == match[2].lower())
        size = float(match[1]) * UNITS[unit]
        if 0 < size < math.inf:
            return round(size), unit
    raise PlanError(
        f'memory is {text!r}, needs a number above 0 and a unit, such as "40 GB" or "40 GiB" '
        f"(units: {', '.join(UNITS)})"
    )


def format_memory(memory_bytes: int | None, unit: str = "GiB") -> str:
    """Format a size in this unit, or in millions if it is less than 1 of this one.

    The number has one decimal and is never rounded up, so that too little memory does not look sufficient.
    """
    if memory_bytes is None:
        return "unknown memory"
    if memory_bytes < UNITS[unit]:
        unit = f"M{unit[1:]}"
    return f"{memory_bytes * 10 // UNITS[unit] / 10:g} {unit}"
