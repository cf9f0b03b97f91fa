# SPDX-License-Identifier: Apache-2.0
"""Reports that ``--energy-save=NAME`` has kept, by name, and what the commands accept in place of a file."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.defaults import SAVED
from pytest_llenergy.record.text import relative_path
from pytest_llenergy.report.store import JOURNAL_SUFFIX, find_journals


def is_saved_name(text: str) -> bool:
    """Whether a text is a name, not a path: paths contain a slash or a suffix."""
    return "/" not in text and not text.endswith((".json", JOURNAL_SUFFIX))


def find_saved(directory: Path, name: str) -> Path:
    """Return the file of a saved report, or raise ``ReportError`` with the names that exist."""
    path = directory / f"{name}.json"
    # ``Path.exists`` raises for a name that is too long for a file; ``os.path.exists`` returns False.
    if os.path.exists(path):  # noqa: PTH110
        return path
    missing = f"there is no {SAVED}/{name}.json"
    if journals := [relative_path(each) for each in find_journals(path)]:
        raise ReportError(
            f"{missing}, only the journal of a killed or running run; "
            f"llenergy merge {' '.join(journals)} -o {relative_path(path)} writes it"
        )
    names = ", ".join(sorted(each.stem for each in directory.glob("*.json")))
    known = f"saved: {names}" if names else f"nothing is saved in {directory}"
    raise ReportError(
        f"{missing}; {known} (--energy-save={name} writes it; the name of a file ends in .json)"
    )


def locate(text: str) -> Path:
    """Return the file that an argument of a command names, by its path or a saved name.

    Saved reports are those of the current directory, or of its nearest parent that has any.
    """
    if not text:
        raise ReportError("the name of the report is empty")
    if not is_saved_name(text) or os.path.exists(text):  # noqa: PTH110 - as above
        return Path(text)
    here = Path.cwd()
    found = (each / SAVED for each in (here, *here.parents) if (each / SAVED).is_dir())
    try:
        return find_saved(next(found, here / SAVED), text)
    except ReportError as error:
        raise ReportError(f"{text}: {error}") from None
