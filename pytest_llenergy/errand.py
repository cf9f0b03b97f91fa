# SPDX-License-Identifier: Apache-2.0
"""What the controller of pytest-xdist gives its workers along, and what they send back beside test reports.

The way back is a channel of execnet, which a worker finds in its ``workerinput``. What is sent has left the
worker when the call returns, so nothing that was said is lost when it dies.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_llenergy

if TYPE_CHECKING:
    # A process that measures nothing pays for no import.
    from pytest_llenergy.model.record import Flag

#: Our place in ``workerinput``.
KEY = "llenergy"

#: What a worker tells: its version of this package, tests that it has and that measure, one that begins,
#: what it runs on.
VERSION, HAS, BEGINS, RUNS_ON = "version", "has", "begins", "runs-on"

#: The flag of what was not measured where its run was started.
ELSEWHERE = "elsewhere"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Errand:
    """One worker's. ``label`` tells its records from those of others that run the same tests.

    ``baseline`` is the name and the content of the one to compare with, where the worker may not have the
    file. ``home`` is where the controller runs.
    """

    channel: Any = None
    label: str | None = None
    grouped: bool = False
    home: tuple[str, ...] = ()
    baseline: tuple[str, bytes] | None = None
    _told_where: bool = field(default=False, init=False)

    def packed(self) -> dict[str, object]:
        """As execnet carries it."""
        return {
            "channel": self.channel,
            "label": self.label,
            "grouped": self.grouped,
            "home": self.home,
            "baseline": self.baseline,
        }

    def tell_tests(self, node_ids: Sequence[str]) -> None:
        """That these will measure, as far as can be seen. Where that is first: it may die here."""
        self._send(VERSION, pytest_llenergy.__version__)
        self._tell_where()
        self._send(HAS, list(node_ids))

    def tell_begin(self, node_id: str, attempt: int) -> None:
        """That one begins which measures."""
        self._tell_where()
        self._send(BEGINS, [node_id, attempt])

    def _tell_where(self) -> None:
        """Once, before anything that makes a record of this worker."""
        if self.elsewhere is None or self._told_where:
            return
        import msgspec

        from pytest_llenergy.report.provenance import environment

        self._told_where = True
        self._send(RUNS_ON, msgspec.json.encode(environment()))

    @property
    def elsewhere(self) -> str | None:
        """Where this process runs; ``None`` where its controller does, in the same Python."""
        if not self.home or self.home == whereabouts():
            return None
        host, _, version, prefix = whereabouts()
        return f"on {host} with Python {version} in {prefix}"

    @property
    def flags(self) -> list[Flag]:
        """What a record must say of it."""
        if self.elsewhere is None:
            return []
        from pytest_llenergy.model.record import Flag

        detail = (
            f"measured {self.elsewhere}; the run was started on {self.home[0]} with Python {self.home[2]}"
        )
        return [Flag(name=ELSEWHERE, severity="note", detail=detail)]

    def _send(self, kind: str, content: object) -> None:
        # A controller that is gone wants to know nothing.
        with suppress(OSError):
            if self.channel is not None:
                self.channel.send((kind, content))


NONE = Errand()
ERRAND = pytest.StashKey[Errand]()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for a controller."""
    return hasattr(config, "workerinput")


def errand_of(config: pytest.Config) -> Errand:
    """That of this process; an empty one where it is no worker."""
    if not hasattr(config, "workerinput"):
        return NONE
    if ERRAND not in config.stash:
        packed = config.workerinput.get(KEY)
        # A controller of another version may give more along. It refuses the worker when that says its own.
        known = {name: value for name, value in (packed or {}).items() if name in NONE.packed()}
        config.stash[ERRAND] = Errand(**known)
    return config.stash[ERRAND]


@lru_cache(maxsize=1)
def whereabouts() -> tuple[str, ...]:
    """Host, boot, version of Python and environment: equal for two processes that are at one place."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return platform.node(), boot, platform.python_version(), sys.prefix


def record_id(node_id: str, *, label: str | None = None, grouped: bool = False) -> str:
    """How the record of a test is called: by its node id, as it is without ``--dist=loadgroup``.

    The label follows the name of the function: ``test_x.py::test_it@gw0[8]``.
    """
    if grouped:
        node_id = _ungrouped(node_id)
    if label is None:
        return node_id
    bracket = node_id.find("[", node_id.find("::"))
    end = len(node_id) if bracket < 0 else bracket
    return f"{node_id[:end]}@{label}{node_id[end:]}"


def _ungrouped(node_id: str) -> str:
    """Without the ``@group`` that xdist adds: after the parameters, or the name where there are none."""
    begin = node_id.rfind("]") if "[" in node_id[node_id.find("::") :] else node_id.rfind("::")
    at = node_id.find("@", begin)
    return node_id if at < 0 else node_id[:at]
