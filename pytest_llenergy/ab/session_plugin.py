# SPDX-License-Identifier: Apache-2.0
"""Loaded by the pytest of each session: leaves out tests that are done, notes what became of the others.

It is copied to a directory of its own, since a side may have another version of this package: it needs
nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Options that the settings of a project may give and sessions must not have: ``ab`` compares.
CLEARED_OPTIONS = ("energy_compare", "energy_fail_on", "energy_save", "energy_html")

#: Options by which sessions would run different tests, wherever they are said.
REFUSED_OPTIONS = {
    "maxfail": "--maxfail (-x)",
    "lf": "--lf",
    "failedfirst": "--ff",
    "newfirst": "--nf",
    "stepwise": "--stepwise",
}

#: ``pytest.ExitCode.USAGE_ERROR``
USAGE_ERROR = 4

WATCH_NAME = "llenergy-ab-watch"


class Watch:
    """What the process that has the say sees of a session."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.measured: bool = False
        self.cut: bool = False

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed[_encodable(report.nodeid)] = None
            # Whatever the session was told to do about it: its tests are missing.
            self.cut = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[_encodable(report.nodeid)] = None
        self.measured = self.measured or hasattr(report, "llenergy")

    # Also of pytest.exit(), whatever exit code it is given.
    def pytest_keyboard_interrupt(self) -> None:
        self.cut = True

    def pytest_sessionfinish(self, session: Any) -> None:
        self.cut = self.cut or bool(session.shouldstop or session.shouldfail)


def pytest_cmdline_main(config: Any) -> int | None:
    """Before anybody looks at the options. A usage error, in one line, for what no session can have."""
    for name in CLEARED_OPTIONS:
        if getattr(config.option, name, None) is not None:
            setattr(config.option, name, None)
    for name, flag in REFUSED_OPTIONS.items():
        if getattr(config.option, name, None):
            sys.stderr.write(
                f"ERROR: {flag} is set, and every session of llenergy ab runs the same tests: take it out of "
                "the command, or of addopts by -o addopts=''\n"
            )
            return USAGE_ERROR
    return None


def pytest_configure(config: Any) -> None:
    """Workers of xdist see their own tests only."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch(), WATCH_NAME)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect by whole node ids: ``--deselect`` takes their beginnings, and a command line has an end."""
    done = set(json.loads(Path(os.environ["LLENERGY_AB_DONE"]).read_text(encoding="utf-8")))
    kept = [item for item in items if _encodable(item.nodeid) not in done]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_unconfigure(config: Any) -> None:
    """What became of the session, and where its modules are from."""
    _write_imported_modules()
    watch = config.pluginmanager.get_plugin(WATCH_NAME)
    if watch is not None:
        told = {"failed": list(watch.failed), "measured": watch.measured, "cut": watch.cut}
        _write_json(Path(os.environ["LLENERGY_AB_TOLD"]), told)


def _write_imported_modules() -> None:
    """Where each top-level package was imported from; each process of xdist writes a file of its own."""
    found: dict[str, list[str]] = {}
    # Ranks import what this process may not have: from the same path.
    for name in _importable_names(Path(os.environ["LLENERGY_AB_ROOT"], "src")):
        with suppress(Exception):
            spec = importlib.util.find_spec(name)
            if spec is not None:
                found[name] = _locations(spec.origin if spec.has_location else None, spec)
    for name, module in sorted(sys.modules.items()):
        if name not in (__name__, "__main__", "__mp_main__") and _is_top_level(name):
            # Anybody may have put anything there.
            with suppress(Exception):
                found[name] = _locations(getattr(module, "__file__", None), module)
    place = Path(os.environ["LLENERGY_AB_MODULES"])
    place.mkdir(exist_ok=True)
    _write_json(place / f"{os.getpid()}.json", {name: places for name, places in found.items() if places})


def _is_top_level(name: str) -> bool:
    """Whether it is no part of a package; what is in a namespace may come from many places."""
    parent, _, last = name.rpartition(".")
    return bool(last) and (not parent or getattr(sys.modules.get(parent), "__file__", "") is None)


def _locations(file: object, found: Any) -> list[str]:
    """The file of a module, or the directories of a namespace."""
    if isinstance(file, str):
        return [str(Path(file).resolve())]
    paths = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None) or []
    return [str(Path(path).resolve()) for path in paths if isinstance(path, str)]


def _importable_names(directory: Path) -> list[str]:
    """The names that can be imported from a directory."""
    with suppress(OSError):
        packages = [each.parent.name for each in directory.glob("*/__init__.py")]
        return sorted([*packages, *(each.stem for each in directory.glob("*.py"))])
    return []


def _encodable(nodeid: str) -> str:
    return nodeid.encode("utf-8", "replace").decode()


def _write_json(place: Path, told: object) -> None:
    """In one step: two processes may have the same number in two containers."""
    scratch = place.with_name(f".{place.name}.{os.getpid()}")
    scratch.write_text(json.dumps(told), encoding="utf-8")
    scratch.replace(place)
