# SPDX-License-Identifier: Apache-2.0
"""Draw a screen as SVG, without scripts or fonts."""

from __future__ import annotations

from xml.sax.saxutils import escape

from .recording import Recording, Stretch

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
