# SPDX-License-Identifier: Apache-2.0
"""Generate the reference pages, the table of options and the published schemas: python docs/reference.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parent
# Sphinx and the tests import this file from elsewhere, and ``describe`` lies beside it.
sys.path.insert(0, str(DOCS))

from describe.backends import backends_page  # noqa: E402
from describe.commands import commands_page  # noqa: E402
from describe.fixtures import fixtures_page  # noqa: E402
from describe.hooks import hooks_page  # noqa: E402
from describe.marks import marks_page  # noqa: E402
from describe.options import options_page  # noqa: E402
from describe.schema import schema_page  # noqa: E402

from pytest_llenergy.backends.registry import BUILTIN  # noqa: E402
from pytest_llenergy.record import report  # noqa: E402


def pages() -> dict[Path, str]:
    """Return each page and schema with the text that the code now gives."""
    options = DOCS / "options.md"
    directory = DOCS / "reference"
    schemas = Path(report.__file__).parent / "schema"
    return {
        options: options_page(options.read_text()),
        directory / "backends.md": backends_page(BUILTIN),
        directory / "commands.md": commands_page(),
        directory / "fixtures.md": fixtures_page(),
        directory / "hooks.md": hooks_page(),
        directory / "marks.md": marks_page(),
        directory / "schema.md": schema_page(),
        schemas / "report-1.json": json.dumps(report.json_schema(), indent=2, sort_keys=True) + "\n",
        schemas / "ab-1.json": json.dumps(report.paired_schema(), indent=2, sort_keys=True) + "\n",
    }


def stale() -> list[Path]:
    """Return the pages that differ from what the code gives."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
