# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of a report, one picture per part.

``python -m benchmarks.validation.pictures report.json DIRECTORY`` draws them again on any machine that has
matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import Figure, Line, Part, decode

#: Size of a plot (inches).
SIZE = (8.0, 3.6)


def draw(parts: Sequence[Part], directory: Path) -> str | None:
    """Write a PNG for each part that has figures. Returns the reason if it cannot, else None."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        return f"no pictures: {error}; python -m benchmarks.validation.pictures draws them on another machine"
    mpl.use("Agg")
    from matplotlib import pyplot

    for part in parts:
        if not part.figures:
            continue
        height = SIZE[1] * len(part.figures)
        whole, axes = pyplot.subplots(len(part.figures), squeeze=False, figsize=(SIZE[0], height))
        for figure, (ax,) in zip(part.figures, axes, strict=True):
            _plot(ax, figure)
        whole.tight_layout()
        whole.savefig(directory / f"{part.name}.png", dpi=110)
        pyplot.close(whole)
    return None


def _plot(ax: Any, figure: Figure) -> None:
    for line in figure.lines:
        _line(ax, line)
    if figure.log_x:
        ax.set_xscale("log")
    ax.set_title(figure.title, fontsize=10)
    ax.set_xlabel(figure.x_label)
    ax.set_ylabel(figure.y_label)
    ax.grid(alpha=0.3)
    if figure.lines:
        ax.legend(fontsize=8)


def _line(ax: Any, line: Line) -> None:
    if line.style == "points":
        ax.errorbar(
            line.x, line.y, yerr=line.errors or None, fmt="o", capsize=3, markersize=4, label=line.label
        )
    elif line.style == "dots":
        ax.plot(line.x, line.y, ".", alpha=0.5, label=line.label)
    elif line.style == "steps":
        ax.step(line.x, line.y, where="post", linewidth=1, label=line.label)
    else:
        ax.plot(line.x, line.y, marker=".", label=line.label)


def main(argv: Sequence[str]) -> int:
    """Draw the pictures of an existing report."""
    report, directory = map(Path, argv)
    missing = draw(decode(report.read_bytes()).parts, directory)
    if missing is not None:
        print(missing, file=sys.stderr)
    return 0 if missing is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
