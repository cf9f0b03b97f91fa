# SPDX-License-Identifier: Apache-2.0
"""What a test ends with where an error of ours ends it."""

from __future__ import annotations

import traceback

import pytest

from pytest_llenergy.errors import LLEnergyError


def failure(item: pytest.Item, when: str, error: LLEnergyError) -> BaseException:
    """Errors of ours speak for themselves: no traceback, and what ranks have printed as sections."""
    for title, text in getattr(error, "sections", ()):
        item.add_report_section(when, title, text)
    told = [f"{type(error).__name__}: {error}"]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(item.path)
    ]
    if frames:
        told.append(f"{item.path.name}:{frames[-1].lineno}: in {frames[-1].name}")
    # With its traceback, for --pdb.
    return pytest.fail.Exception("\n".join(told), pytrace=False).with_traceback(error.__traceback__)
