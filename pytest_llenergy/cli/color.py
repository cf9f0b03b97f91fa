# SPDX-License-Identifier: Apache-2.0
"""Whether what is printed has colours."""

from __future__ import annotations


def wants_color() -> bool:
    """On a terminal that has some, or with ``FORCE_COLOR``; never with ``NO_COLOR``."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color
