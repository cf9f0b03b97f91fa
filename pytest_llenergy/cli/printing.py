# SPDX-License-Identifier: Apache-2.0
"""Tables on standard output, in what its encoding has."""

from __future__ import annotations

import sys

from pytest_llenergy.model.text import writable


def show(text: str, end: str = "\n") -> None:
    """Print a text for people; a program's must be written as it is."""
    print(writable(text, sys.stdout.encoding or "utf-8"), end=end)
