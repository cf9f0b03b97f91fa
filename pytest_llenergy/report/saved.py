# SPDX-License-Identifier: Apache-2.0
"""Reports that ``--energy-save=NAME`` has kept, by name, and what the commands accept in place of a file."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.defaults import SAVED
from pytest_llenergy.record.text import did_you_mean, relative_path
from pytest_llenergy.report.store import JOURNAL_SUFFIX, find_journals


def is_saved_name(text: str) -> bool:
    """Whether a text is a name, not a path: paths contain a slash or end in ``.json``."""
    return "/" not in text and not text.endswith((".json", JOURNAL_SUFFIX))


def saved_directory() -> Path:
    """Return the directory of saved reports of the current directory, or of its nearest parent with one."""
    here = Path.cwd()
    found = (each / SAVED for each in (here, *here.parents) if (each / SAVED).is_dir())
    return next(found, here / SAVED)


def list_names(directory: Path) -> list[str]:
    """Return the names of the reports in a directory, in alphabetical order.

    Raises:
        ReportError: If the directory cannot be read.
    """
    try:
        return sorted(each.stem for each in directory.iterdir() if each.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReportError(f"{directory}: {error.strerror}") from None


def find_saved(directory: Path, name: str) -> Path:
    """Return the file of a saved report.

    Raises:
        ReportError: There is none; the message names those that exist.
    """
    path = directory / f"{name}.json"
    # ``Path.exists`` raises for a name that is too long for a file; ``os.path.exists`` returns False.
    if os.path.exists(path):  # noqa: PTH110
        return path
    missing = f"there is no {SAVED}/{name}.json"
    journals = [relative_path(each) for each in find_journals(path)]
    if journals:
        raise ReportError(
            f"{missing}, only the journal of a killed or running run; "
            f"llenergy merge {' '.join(journals)} -o {relative_path(path)} writes it"
        )
    names = list_names(directory)
    known = f"saved: {', '.join(names)}" if names else f"nothing is saved in {directory}"
    meant = did_you_mean([name], names)
    raise ReportError(
        f"{missing}; {f'{meant} ' if meant else ''}{known} (--energy-save={name} writes it; the name of a "
        "file ends in .json)"
    )


def locate(text: str) -> Path:
    """Return the file that an argument of a command names: by its path or a saved name.

    Raises:
        ReportError: It is neither a file nor a saved name.
    """
    if not text:
        raise ReportError("the name of the report is empty")
    # ``Path.exists`` raises for a name that is too long for a file; ``os.path.exists`` returns False.
    if not is_saved_name(text) or os.path.exists(text):  # noqa: PTH110
        return Path(text)
    try:
        return find_saved(saved_directory(), text)
    except ReportError as error:
        raise ReportError(f"{text}: {error}") from None
