# SPDX-License-Identifier: Apache-2.0
"""The meters that there are: of this package, of others, and of a test suite's own hook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.protocol import MeterSpec
from pytest_llenergy.model.installed import Broken, Installed, installed

#: Modules of this room, each with a ``SPEC``, by its name.
BUILTIN = {
    "nvml": "nvml",
    "rapl": "rapl",
    "estimate": "estimate",
    "amd": "amd",
    "zeus": "zeus_devices",
    "codecarbon": "codecarbon_model",
    "hwmon": "hwmon",
    "command": "command",
}

ENTRY_POINTS = "pytest_llenergy.meters"


class KnownMeters(Mapping[str, MeterSpec]):
    """By name: built-in meters, those of entry points (group ``pytest_llenergy.meters``), then ``extra``.

    Each is imported when it is asked for, and not before. Of two of a name the later in that order counts,
    but no installed package takes the place of a built-in meter.

    Raises ``MeterError`` where an entry point does not give a ``MeterSpec``, as soon as others than built-in
    meters are asked for; with ``whole_only`` it is left out, and is in ``broken``.
    """

    def __init__(self, extra: Sequence[MeterSpec] = (), *, whole_only: bool = False) -> None:
        self._specs = {spec.name: spec for spec in extra}
        self._whole_only = whole_only
        self._installed: Installed[MeterSpec] | None = None

    def __getitem__(self, name: str) -> MeterSpec:
        if name not in self._specs:
            if name in BUILTIN:
                module = import_module(f"pytest_llenergy.meters.{BUILTIN[name]}")
                self._specs[name] = module.SPEC
            else:
                self._specs[name] = self._from_packages()[name]
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*BUILTIN, *self._from_packages(), *self._specs]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def broken(self) -> tuple[Broken, ...]:
        """Entry points that do not give a ``MeterSpec``."""
        return self._found().broken

    def _from_packages(self) -> dict[str, MeterSpec]:
        found = self._found()
        if found.broken and not self._whole_only:
            raise MeterError("; ".join(each.reason for each in found.broken))
        return found.whole

    def _found(self) -> Installed[MeterSpec]:
        if self._installed is None:
            self._installed = installed(ENTRY_POINTS, MeterSpec)
        return self._installed
