# SPDX-License-Identifier: Apache-2.0
"""Make the pictures, all or those that are named: python -m docs.pictures [terminal] [pages]."""

from __future__ import annotations

import sys
from pathlib import Path

from .pages import photograph
from .recording import record
from .svg import animated, still

#: Beside the pages that show them.
IMAGES = Path(__file__).parents[1] / "images"

PROJECT = Path(__file__).parent / "project"

#: Real models, really run. On a machine without counters the joules are an estimate, and the table says so.
COMMAND = "pytest --energy-report"


def terminal() -> None:
    """The run as it is, as it goes by, and as it can be played."""
    recording = record(COMMAND, PROJECT, columns=80, rows=34)
    (IMAGES / "terminal.cast").write_text(recording.cast())
    (IMAGES / "terminal.svg").write_text(animated(recording))
    (IMAGES / "summary.svg").write_text(still(recording))


def pages() -> None:
    """The page of a comparison."""
    photograph(IMAGES)


KINDS = {"terminal": terminal, "pages": pages}

if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        KINDS[name]()
