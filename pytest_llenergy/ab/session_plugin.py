# SPDX-License-Identifier: Apache-2.0
"""Loaded by the pytest of each session: leaves out tests that are done, notes where modules came from.

It is copied to a directory of its own, since a side may have another version of this package: it needs
nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect by whole node ids: ``--deselect`` takes their beginnings, and a command line has an end."""
    done = set(json.loads(Path(os.environ["LLENERGY_AB_DONE"]).read_text(encoding="utf-8")))
    kept = [item for item in items if item.nodeid.encode("utf-8", "replace").decode() not in done]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_unconfigure() -> None:
    """Where each top-level package was imported from; each process of xdist writes a file of its own."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if "." not in name and name != __name__:
            paths = [getattr(module, "__file__", None), *list(getattr(module, "__path__", []))[:1]]
            origin = next((path for path in paths if isinstance(path, str)), None)
            if origin is not None:
                found[name] = str(Path(origin).resolve())
    # In one step: two processes may have the same name in two containers.
    place = Path(os.environ["LLENERGY_AB_MODULES"])
    place.mkdir(exist_ok=True)
    scratch = place / f".{os.getpid()}"
    scratch.write_text(json.dumps(found))
    scratch.replace(place / f"{os.getpid()}.json")
