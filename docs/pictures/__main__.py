# SPDX-License-Identifier: Apache-2.0
"""Generate all pictures or the named ones: python -m docs.pictures [terminal] [pages]."""

from __future__ import annotations

import sys
from pathlib import Path

from .pages import photograph
from .recording import record
from .svg import still

#: Next to the pages that show them.
IMAGES = Path(__file__).parents[1] / "images"

PROJECT = Path(__file__).parent / "project"

#: Runs real models. Without counters the joules are an estimate, and the table says so.
COMMAND = "pytest --energy-report"


def terminal() -> None:
    """Record a run as a still picture and a playable cast."""
    recording = record(COMMAND, PROJECT, columns=80, rows=34)
    (IMAGES / "terminal.cast").write_text(recording.cast())
    (IMAGES / "summary.svg").write_text(still(recording))


def pages() -> None:
    """Photograph the pages of a run, a comparison and a history."""
    photograph(IMAGES)


KINDS = {"terminal": terminal, "pages": pages}

if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        KINDS[name]()
