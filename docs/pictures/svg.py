# SPDX-License-Identifier: Apache-2.0
"""Draw screens as SVG, still or animated, without scripts or fonts; reduced motion is respected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from .recording import Frame, Recording, Stretch

#: Size of a character, the margin and the title bar (pixels).
WIDTH, HEIGHT, MARGIN, BAR = 8.4, 18.0, 14.0, 34.0

COLORS = {
    "default": "#d7dae0",
    "black": "#7f848e",
    "red": "#f47067",
    "green": "#8ddb8c",
    "brown": "#e5c07b",
    "yellow": "#e5c07b",
    "blue": "#6cb6ff",
    "magenta": "#dcbdfb",
    "cyan": "#76e3ea",
    "white": "#ffffff",
}

STYLE = """\
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.b{font-weight:700}
"""


def still(recording: Recording) -> str:
    """Draw the last screen, without empty rows at the end."""
    rows = recording.frames()[-1].rows
    while rows and not rows[-1]:
        rows = rows[:-1]
    body = "".join(_text(row, number) for number, row in enumerate(rows))
    return _window(recording, len(rows), STYLE, body)


def animated(recording: Recording) -> str:
    """Draw every screen at its time, in a loop. A row that stays is drawn once."""
    frames, length_s = recording.frames(), recording.length_s
    rules, body = [STYLE], []
    steps: dict[tuple[float, float], list[str]] = defaultdict(list)
    for number, stretches, begin_s, end_s in _stays(frames, length_s):
        steps[begin_s, end_s].append(_text(stretches, number))
    for name, ((begin_s, end_s), texts) in enumerate(steps.items()):
        begin, end = (f"{100 * at / length_s:.2f}%" for at in (begin_s, end_s))
        ends = end_s >= length_s
        if begin_s > 0 or not ends:
            hidden = "" if begin_s <= 0 else "0%{visibility:hidden}"
            over = "" if ends else f"{end}{{visibility:hidden}}"
            rules.append(f"@keyframes k{name}{{{hidden}{begin}{{visibility:visible}}{over}}}\n")
            rules.append(f"#k{name}{{animation:k{name} {length_s:.2f}s step-end infinite}}\n")
        body.append(f'<g id="k{name}"{"" if ends else " class=" + quoteattr("m")}>{"".join(texts)}</g>\n')
    rules.append("@media(prefers-reduced-motion:reduce){g{animation:none!important}.m{visibility:hidden}}\n")
    return _window(recording, recording.rows, "".join(rules), "".join(body))


def _stays(frames: list[Frame], length_s: float) -> Iterator[tuple[int, tuple[Stretch, ...], float, float]]:
    """Yield each row with the times between which it does not change."""
    timed = list(zip(frames, [*(frame.at_s for frame in frames[1:]), length_s], strict=True))
    for number in range(len(frames[0].rows)):
        for row, same in groupby(timed, key=lambda each: each[0].rows[number]):
            stay = list(same)
            if row:
                yield number, row, stay[0][0].at_s, stay[-1][1]


def _text(row: tuple[Stretch, ...], number: int) -> str:
    y = BAR + MARGIN + HEIGHT * (number + 0.75)
    return "".join(_stretch(each, y) for each in row)


def _stretch(stretch: Stretch, y: float) -> str:
    text = stretch.text
    lead = len(text) - len(text.lstrip())
    x = MARGIN + WIDTH * (stretch.column + lead)
    text = text.strip()
    color = COLORS.get(stretch.color, f"#{stretch.color}")
    bold = ' class="b"' if stretch.bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" textLength="{WIDTH * len(text):.1f}"{bold}>'
        f"{escape(text)}</text>"
    )


def _window(recording: Recording, rows: int, style: str, body: str) -> str:
    width, height = 2 * MARGIN + WIDTH * recording.columns, BAR + 2 * MARGIN + HEIGHT * rows
    lights = "".join(
        f'<circle cx="{20 + 20 * place}" cy="{BAR / 2}" r="6" fill="{color}"/>'
        for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    title = escape(recording.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#22272e"/>\n{lights}\n'
        f'<text x="50%" y="{BAR / 2 + 5}" fill="#9da5b4" text-anchor="middle">{title}</text>\n{body}</svg>\n'
    )
