# SPDX-License-Identifier: Apache-2.0
"""Load the plugins that other packages declare as entry points."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Generic, TypeVar

from pytest_llenergy.record.text import relative_path

Plugin = TypeVar("Plugin")


@dataclass(frozen=True)
class BrokenEntryPoint:
    """An entry point that fails to load: its name, and one line with the cause and the remedy."""

    name: str
    reason: str


@dataclass(frozen=True)
class LoadedEntryPoints(Generic[Plugin]):
    """Plugins by the names of their entry points, sorted."""

    plugins: dict[str, Plugin]
    broken: tuple[BrokenEntryPoint, ...]


def load_entry_points(group: str, kind: type[Plugin]) -> LoadedEntryPoints[Plugin]:
    """Load every entry point of a group; each must be an instance of ``kind``."""
    plugins: dict[str, Plugin] = {}
    broken: list[BrokenEntryPoint] = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        plugin, problem = _load(point, kind)
        if plugin is not None:
            plugins[point.name] = plugin
        else:
            package = "its package" if point.dist is None else point.dist.name
            reason = (
                f"entry point {point.name} = {point.value} of {group} {problem}; fix or uninstall {package}"
            )
            broken.append(BrokenEntryPoint(point.name, reason))
    return LoadedEntryPoints(plugins, tuple(broken))


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if message else ''}{message}"


def locate_error(error: Exception) -> str:
    """Return an error on one line, with the place that raised it."""
    *_, place = extract_tb(error.__traceback__)
    return f"{describe_error(error)} ({relative_path(Path(place.filename))}:{place.lineno})"


def _load(point: EntryPoint, kind: type[Plugin]) -> tuple[Plugin | None, str]:
    try:
        plugin = point.load()
    except Exception as error:  # the module belongs to another package and may raise anything
        return None, f"cannot be loaded ({describe_error(error)})"
    if isinstance(plugin, kind):
        return plugin, ""
    return None, f"is a {type(plugin).__name__}, not a {kind.__name__}"
