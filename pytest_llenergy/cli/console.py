# SPDX-License-Identifier: Apache-2.0
"""Console output shared by the commands."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

from pytest_llenergy.model.text import encodable

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


def wants_color() -> bool:
    """Whether to print colours: on a colour terminal or with ``FORCE_COLOR``, never with ``NO_COLOR``."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def print_encodable(text: str, end: str = "\n") -> None:
    """Print text for people, replacing characters that the encoding lacks. Not for machine output."""
    print(encodable(text, sys.stdout.encoding or "utf-8"), end=end)
