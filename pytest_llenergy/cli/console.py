# SPDX-License-Identifier: Apache-2.0
"""Console output shared by the commands."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

from pytest_llenergy.model.text import encodable

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


# Whether what is printed has colours.


def wants_color() -> bool:
    """On a terminal that has some, or with ``FORCE_COLOR``; never with ``NO_COLOR``."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


# What a command gets to add itself to.


# Tables on standard output, in what its encoding has.


def print_encodable(text: str, end: str = "\n") -> None:
    """Print a text for people; a program's must be written as it is."""
    print(encodable(text, sys.stdout.encoding or "utf-8"), end=end)
