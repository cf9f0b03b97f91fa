# SPDX-License-Identifier: Apache-2.0
"""Results of self-checks, kept so that a board is checked once per driver, boot and version of this tool."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from pytest_llenergy import __version__
from pytest_llenergy.meters.checkresult import DISAGREEMENT, CheckResult
from pytest_llenergy.meters.refresh import ENOUGH_CHANGES
from pytest_llenergy.model.places import cache_root
from pytest_llenergy.model.record import Data

#: After so many seconds a counter that was rejected is given another chance, and one that could not be
#: compared well, on a busy board, is compared again.
PROVISIONAL_S = 3600.0


class CheckedBoard(Data, frozen=True):
    """What a result holds for: one that was found under anything else is none."""

    uuid: str
    driver: str
    boot: str
    sources: list[str]
    tool: str = __version__


class _Entry(Data, frozen=True):
    board: CheckedBoard
    result: CheckResult
    checked_s: float


class CheckCache:
    """One small file for each board. Nothing that is wrong with a file or directory is an error.

    ``directory`` is ``meters`` in ``LLENERGY_CACHE_DIR``, or in what the platform gives to caches.
    """

    #: What could not be written, by the path that it should have. It is known to this process alone.
    _unwritten: ClassVar[dict[Path, _Entry]] = {}

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory if directory is not None else cache_root() / "meters"

    def load(self, board: CheckedBoard) -> CheckResult | None:
        """The result of an earlier check; ``None`` where there is none, or it is damaged or outdated."""
        path = self._path(board)
        entry = self._unwritten.get(path) or _read(path)
        if entry is None or entry.board != board:
            return None
        result, age_s = entry.result, time.time() - entry.checked_s
        # Without a counter the power is integrated, which takes to know its refresh.
        told_nothing = result.period_s is None and result.power_changes < ENOUGH_CHANGES
        provisional = told_nothing or result.reason is not None or (result.doubt or 0.0) > DISAGREEMENT
        return None if provisional and not 0 <= age_s <= PROVISIONAL_S else result

    def store(self, board: CheckedBoard, result: CheckResult) -> None:
        """Keep a result, for other processes too where the directory can be written."""
        path = self._path(board)
        entry = _Entry(board=board, result=result, checked_s=time.time())
        try:
            _write(path, msgspec.json.encode(entry))
        except OSError:
            self._unwritten[path] = entry
        else:
            self._unwritten.pop(path, None)

    def _path(self, board: CheckedBoard) -> Path:
        return self._directory / f"nvml-{re.sub('[^A-Za-z0-9-]', '_', board.uuid)}.json"


def boot_id() -> str:
    """Linux's name for the time since it was started. Where there is none, a name for this process alone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()}"


def _read(path: Path) -> _Entry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Entry)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, content: bytes) -> None:
    """The file appears whole or not at all: other processes may read and write it meanwhile."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    scratch = Path(name)
    os.close(descriptor)
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
