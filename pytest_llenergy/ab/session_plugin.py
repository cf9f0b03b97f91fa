# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for sessions: skips finished tests, and writes a summary and where modules came from.

It is copied to a separate directory, because a side may have another version of this package, and therefore
imports only the standard library. ``LLENERGY_AB_SESSION`` names the directory of the session.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Options that sessions must ignore if the settings of a project give them, because ``ab`` compares.
CLEARED_OPTIONS = tuple(
    f"energy_{name}" for name in ("compare", "fail_on", "save", "html", "disable", "skip")
)

WATCH_NAME = "llenergy-ab-watch"


class Watch:
    """Collects the summary of a session in the controller process."""

    def __init__(self) -> None:
        self.failed: bool = False
        self.measured: bool = False
        self.stopped: bool = False

    def pytest_collectreport(self, report: Any) -> None:
        # Even if pytest continues on collection errors, the tests of this file are missing.
        self.stopped = self.stopped or report.failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or report.failed
        self.measured = self.measured or hasattr(report, "llenergy")

    # pytest.exit() calls this too, with any exit code.
    def pytest_keyboard_interrupt(self) -> None:
        self.stopped = True

    def pytest_sessionfinish(self, session: Any) -> None:
        self.stopped = self.stopped or bool(session.shouldstop or session.shouldfail)


def pytest_cmdline_main(config: Any) -> None:
    """Clear options before other plugins read them."""
    # pytest-xdist sends options to its workers. A mark or call then does not override --energy-rounds.
    config.option.llenergy_ab = True
    config.option.llenergy_ab_devices = _read_earlier()["devices"]
    for name in CLEARED_OPTIONS:
        if getattr(config.option, name, None) is not None:
            setattr(config.option, name, None)


def pytest_configure(config: Any) -> None:
    """Watch the session in the controller; a worker of pytest-xdist sees only its own tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch(), WATCH_NAME)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect finished tests by node id.

    ``--deselect`` would match prefixes, and a command line is limited in length.
    """
    done = set(_read_earlier()["done"])
    kept = [item for item in items if item.nodeid.encode("utf-8", "replace").decode() not in done]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_unconfigure(config: Any) -> None:
    """Write where modules came from, in each process, and the summary."""
    _write(f"modules-{os.getpid()}.json", _locate_modules())
    watch = config.pluginmanager.get_plugin(WATCH_NAME)
    if watch is not None:
        _write("summary.json", vars(watch))


def _locate_modules() -> dict[str, str]:
    """Return where this process imported modules and packages from."""
    found = {}
    for name, module in list(sys.modules.items()):
        # sys.modules may contain arbitrary objects.
        with suppress(Exception):
            if "." not in name and isinstance(module.__file__, str):
                found[name] = str(Path(module.__file__).resolve())
    return found


def _directory() -> Path:
    return Path(os.environ["LLENERGY_AB_SESSION"])


def _read_earlier() -> Any:
    return json.loads((_directory() / "earlier.json").read_text(encoding="utf-8"))


def _write(name: str, content: object) -> None:
    """Write atomically, since the session may be killed."""
    scratch = _directory() / f".{name}.{os.getpid()}"
    scratch.write_text(json.dumps(content), encoding="utf-8")
    scratch.replace(_directory() / name)
