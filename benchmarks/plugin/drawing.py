# SPDX-License-Identifier: Apache-2.0
"""Style of the documentation's pictures, and reproducible output files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

#: Okabe-Ito colours, distinguishable with colour blindness.
BLUE, LIGHT_BLUE, ORANGE, RED, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#777777"


def configure_pyplot(salt: str) -> Any:
    """Return ``matplotlib.pyplot`` configured to draw into files. ``salt`` makes the SVG ids reproducible."""
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


def save_picture(figure: Any, picture: Path) -> None:
    """Save without a date, so that the same picture gives the same file."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None, dpi=150)
