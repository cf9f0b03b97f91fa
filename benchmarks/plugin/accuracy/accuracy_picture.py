# SPDX-License-Identifier: Apache-2.0
"""Draw the errors of a run of ``accuracy_run.py``: ``accuracy_picture.py RESULTS.json PICTURE.svg``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from accuracy_figures import SENSOR_NAMES, TOOLS

#: Colour (Okabe-Ito, distinguishable with colour blindness), line and marker of each tool.
STYLES = dict(
    zip(
        TOOLS,
        (
            ("#0072B2", "-", "o"),
            ("#56B4E9", "-", "s"),
            ("#D55E00", "-", "^"),
            ("#D55E00", "--", "v"),
            ("#009E73", "-", "D"),
            ("#777777", "-", "x"),
        ),
        strict=True,
    )
)

#: Smaller errors are drawn here (per cent).
FLOOR = 0.01


def main(results: Path, picture: Path) -> None:
    """Draw one panel per sensor: lines for the mean error of a single reading, dots for the largest."""
    found = json.loads(results.read_text())
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accuracy", "font.size": 9})
    plot = import_module("matplotlib.pyplot")
    figure, panels = plot.subplots(1, 2, figsize=(9, 4.2), sharey=True)
    for panel, (sensor, by_time) in zip(panels, found["figures"].items(), strict=True):
        _draw(panel, by_time)
        panel.set_title(f"sensor that {SENSOR_NAMES[sensor]}")
        panel.set_xlabel("length of the work (ms)")
    panels[0].set_ylabel("error of the joules of one reading (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=3, frameon=False)
    figure.suptitle(
        f"Lines: mean |error| of {found['repeats']} readings; dots: largest. The counter ticks every 100 ms.",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None, dpi=150)


def _draw(panel: Any, by_time: dict[str, Any]) -> None:
    for tool, (colour, line, marker) in STYLES.items():
        with_result = [
            (float(s) * 1e3, by_tool[tool]) for s, by_tool in by_time.items() if by_tool[tool]["with_result"]
        ]
        times = [ms for ms, _ in with_result]
        for kind, style in (("mean_error", {"label": tool, "linestyle": line, "marker": marker}),):
            panel.plot(
                times, [_percent(each[kind]) for _, each in with_result], color=colour, markersize=5, **style
            )
        largest = [_percent(each["max_error"]) for _, each in with_result]
        panel.plot(times, largest, color=colour, linestyle="", marker=".", markersize=4)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks([float(seconds) * 1e3 for seconds in by_time])
    panel.set_xticklabels([f"{float(seconds) * 1e3:g}" for seconds in by_time])
    panel.minorticks_off()
    ticks = (0.01, 0.1, 1, 10, 100)
    panel.set_yticks(ticks)
    panel.set_yticklabels([f"{tick:g}" for tick in ticks])
    panel.grid(visible=True, color="#dddddd", linewidth=0.6)


def _percent(share: float) -> float:
    return max(abs(share) * 100, FLOOR)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
