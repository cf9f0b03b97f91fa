# SPDX-License-Identifier: Apache-2.0
"""Write the pages of reference, and the table of options: python docs/reference.py."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
# Sphinx and the tests import this file from elsewhere, so the package beside it is found only from here on.
sys.path.insert(0, str(DOCS))

from describe.commands import commands_page  # noqa: E402
from describe.fixtures import fixtures_page  # noqa: E402
from describe.hooks import hooks_page  # noqa: E402
from describe.marks import marks_page  # noqa: E402
from describe.options import options_page  # noqa: E402
from describe.schema import schema_page  # noqa: E402


def pages() -> dict[Path, str]:
    """Each page as the code is now."""
    options = DOCS / "options.md"
    there = DOCS / "reference"
    return {
        options: options_page(options.read_text()),
        there / "commands.md": commands_page(),
        there / "fixtures.md": fixtures_page(),
        there / "hooks.md": hooks_page(),
        there / "marks.md": marks_page(),
        there / "schema.md": schema_page(),
    }


def stale() -> list[Path]:
    """Pages that say something else than the code."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
