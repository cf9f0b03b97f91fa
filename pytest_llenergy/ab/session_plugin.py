# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for sessions: skips finished tests and writes a summary of the others.

It is copied to a separate directory, because a side may have another version of this package, and therefore
imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Options that sessions must ignore if the settings of a project give them, because ``ab`` compares.
CLEARED_OPTIONS = (
    "energy_compare",
    "energy_fail_on",
    "energy_save",
    "energy_html",
    "energy_disable",
    "energy_skip",
)

#: Options by which sessions would run different tests, on the command line or in settings.
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
    """Collects the summary of a session in the controller process."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.measured: bool = False
        self.stopped: bool = False

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed[_encodable(report.nodeid)] = None
            # Even if pytest continues on collection errors, the tests of this file are missing.
            self.stopped = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[_encodable(report.nodeid)] = None
        self.measured = self.measured or hasattr(report, "llenergy")

    # pytest.exit() calls this too, with any exit code.
    def pytest_keyboard_interrupt(self) -> None:
        self.stopped = True

    def pytest_sessionfinish(self, session: Any) -> None:
        self.stopped = self.stopped or bool(session.shouldstop or session.shouldfail)


def pytest_cmdline_main(config: Any) -> int | None:
    """Clear options before other plugins read them, and refuse those that sessions cannot have."""
    # pytest-xdist sends options to its workers. A mark or call then does not override --energy-rounds.
    config.option.llenergy_ab = True
    config.option.llenergy_ab_devices = _read_json("LLENERGY_AB_DEVICES")
    for name in CLEARED_OPTIONS:
        if getattr(config.option, name, None) is not None:
            setattr(config.option, name, None)
    for name, flag in REFUSED_OPTIONS.items():
        if getattr(config.option, name, None):
            sys.stderr.write(
                f"ERROR: {flag} is set, but every session of llenergy ab must run the same tests; remove it "
                "from the command, or from addopts with -o addopts=''\n"
            )
            return USAGE_ERROR
    return None


def pytest_configure(config: Any) -> None:
    """Watch the session in the controller; a worker of pytest-xdist sees only its own tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch(), WATCH_NAME)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect finished tests by node id.

    ``--deselect`` would match prefixes, and a command line is limited in length.
    """
    done = set(_read_json("LLENERGY_AB_DONE"))
    kept = [item for item in items if _encodable(item.nodeid) not in done]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_unconfigure(config: Any) -> None:
    """Write the list of imports and the summary."""
    _write_imported_modules()
    watch = config.pluginmanager.get_plugin(WATCH_NAME)
    if watch is not None:
        summary = {
            "failed": list(watch.failed),
            "measured": watch.measured,
            "stopped": watch.stopped,
        }
        _write_json(Path(os.environ["LLENERGY_AB_SUMMARY"]), summary)


def _write_imported_modules() -> None:
    """Write where each top-level module was imported from. Each pytest-xdist worker writes its own file."""
    found: dict[str, list[str]] = {}
    # Ranks may import modules that this process has not imported, from the same path.
    for name in _importable_names(Path(os.environ["LLENERGY_AB_ROOT"], "src")):
        with suppress(Exception):
            spec = importlib.util.find_spec(name)
            if spec is not None:
                found[name] = _locations(spec.origin if spec.has_location else None, spec)
    for name, module in sorted(sys.modules.items()):
        if name not in (__name__, "__main__", "__mp_main__") and _is_top_level(name):
            # sys.modules may contain arbitrary objects.
            with suppress(Exception):
                found[name] = _locations(getattr(module, "__file__", None), module)
    place = Path(os.environ["LLENERGY_AB_MODULES"])
    place.mkdir(exist_ok=True)
    modules = {name: places for name, places in found.items() if places}
    _write_json(place / f"{os.getpid()}.json", {"prefix": sys.prefix, "modules": modules})


def _is_top_level(name: str) -> bool:
    """Whether a module is not inside a package. Parts of a namespace count, as they may be anywhere."""
    parent, _, last = name.rpartition(".")
    return bool(last) and (not parent or getattr(sys.modules.get(parent), "__file__", "") is None)


def _locations(file: object, found: Any) -> list[str]:
    """Return the file of a module, or the directories of a namespace."""
    if isinstance(file, str):
        return [str(Path(file).resolve())]
    paths = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None) or []
    return [str(Path(path).resolve()) for path in paths if isinstance(path, str)]


def _importable_names(directory: Path) -> list[str]:
    """Return the names of modules and packages in a directory."""
    with suppress(OSError):
        packages = [each.parent.name for each in directory.glob("*/__init__.py")]
        return sorted([*packages, *(each.stem for each in directory.glob("*.py"))])
    return []


def _encodable(nodeid: str) -> str:
    return nodeid.encode("utf-8", "replace").decode()


def _read_json(variable: str) -> Any:
    return json.loads(Path(os.environ[variable]).read_text(encoding="utf-8"))


def _write_json(place: Path, content: object) -> None:
    """Write atomically: processes in different containers may have the same process id."""
    scratch = place.with_name(f".{place.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content), encoding="utf-8")
    scratch.replace(place)
