# SPDX-License-Identifier: Apache-2.0
"""Plugins of other packages, found by entry points."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

Plugin = TypeVar("Plugin")


@dataclass(frozen=True)
class BrokenEntryPoint:
    """An entry point that does not give what it should: its name, and in a line why, and what to do."""

    name: str
    reason: str


@dataclass(frozen=True)
class LoadedEntryPoints(Generic[Plugin]):
    """By the names of their entry points, in the order of these."""

    whole: dict[str, Plugin]
    broken: tuple[BrokenEntryPoint, ...]


def load_entry_points(group: str, kind: type[Plugin]) -> LoadedEntryPoints[Plugin]:
    """Load every entry point of a group; each is to give one of a kind."""
    whole: dict[str, Plugin] = {}
    broken: list[BrokenEntryPoint] = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        found, wrong = _loaded(point, kind)
        if found is not None:
            whole[point.name] = found
        else:
            package = "its package" if point.dist is None else point.dist.name
            told = f"entry point {point.name} = {point.value} of {group} {wrong}; mend or uninstall {package}"
            broken.append(BrokenEntryPoint(point.name, told))
    return LoadedEntryPoints(whole, tuple(broken))


def _loaded(point: EntryPoint, kind: type[Plugin]) -> tuple[Plugin | None, str]:
    try:
        spec = point.load()
    except Exception as error:
        # The module is somebody else's, and may fail with anything.
        said = str(error).strip().partition("\n")[0]
        return None, f"cannot be loaded ({type(error).__name__}{': ' if said else ''}{said})"
    if isinstance(spec, kind):
        return spec, ""
    return None, f"gives a {type(spec).__name__}, not a {kind.__name__}"
