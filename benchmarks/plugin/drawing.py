# SPDX-License-Identifier: Apache-2.0
"""How the pictures of the documentation look, and that the same figures give the same file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

#: Colours of Okabe and Ito, safe for colour blindness.
BLUE, LIGHT_BLUE, ORANGE, RED, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#777777"


def plotting(salt: str) -> Any:
    """``matplotlib.pyplot``, set up to draw into files. ``salt`` is a word of the picture's own."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    return import_module("matplotlib.pyplot")


def save(figure: Any, picture: Path) -> None:
    """Without the date, which would make every file another one."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None, dpi=150)
