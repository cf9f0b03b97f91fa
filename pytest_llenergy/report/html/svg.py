# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures as small inline SVG, coloured by the page.

Figures are drawn in placeholder colours. These become variables of the style sheet, whose values differ in
dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.text import one_line, shorten

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Colours of tests that differ in one fact, such as the backend.
SERIES = tuple(f"series{number}" for number in range(1, 7))

#: Variables of the style sheet. Figures are drawn in their placeholders, see ``COLOURS``.
COLOUR_NAMES = (
    "text",
    "muted",
    "grid",
    "band",
    "base",
    "head",
    "hot",
    "phase",
    "regressed",
    "improved",
    "inconclusive",
    "unchanged",
    "invalid",
    "page",
    *SERIES,
)
COLOURS = {name: f"#0000{index:02x}" for index, name in enumerate(COLOUR_NAMES, 16)}

#: Width of a figure (CSS pixels): that of a phone, so that its text is there as large as other text.
WIDTH = 340

#: Width of the figures that are also drawn for wider screens (CSS pixels).
WIDE = 880

#: Distance from the top and bottom edges of a figure to its axes (CSS pixels).
ABOVE, BELOW = 20, 36

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    # Names and units may contain a dollar sign.
    "text.parse_math": False,
    "font.size": 11,
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.5,
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": COLOURS["text"],
    "lines.linewidth": 1.5,
    "path.simplify": False,
}

#: Metadata to leave out; a figure without a date is reproducible.
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

#: Style properties that the SVG keeps.
KEPT_STYLES = frozenset(
    {
        "fill",
        "fill-opacity",
        "stroke",
        "stroke-opacity",
        "stroke-width",
        "stroke-dasharray",
        "opacity",
        "font-size",
        "font-weight",
        "text-anchor",
    }
)

NUMBER = re.compile(r"-?\d+\.\d{2,}")
REFERENCE = re.compile(r"url\(#([^)]+)\)")

#: Most characters of a test's name that fit into the width of a figure.
MAX_LABEL_LENGTH = 48


def require_html_extra() -> None:
    """Raise ``ReportError`` if the libraries of the extra ``html`` are not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        why = str(error).partition("\n")[0]
        raise ReportError(
            f"HTML needs jinja2 and matplotlib ({why}): pip install 'pytest-llenergy[html]'"
        ) from None


class Sheet:
    """The figures of one page, and their common styles. Use it only within ``open_sheet``."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    @property
    def css(self) -> str:
        """The style rules of the figures so far."""
        return "".join(f".{name}{{{style}}}\n" for style, name in self._classes.items())

    def figure(
        self, height: int, *, left: int = 50, right: int = 14, width: int = WIDTH
    ) -> tuple[Figure, Axes]:
        """Create an empty figure and its axes; all sizes are CSS pixels.

        Args:
            height: Height of the figure.
            left: Margin left of the axes.
            right: Margin right of the axes.
            width: Width of the figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        figure.subplots_adjust(
            left=left / width, right=1 - right / width, top=1 - ABOVE / height, bottom=BELOW / height
        )
        axes = figure.subplots()
        axes.tick_params(length=0)
        # The lowest number of the other axis is at the same corner.
        axes.tick_params(axis="x", pad=7)
        return figure, axes

    def inline(
        self, drawn: Figure, name: str, label: str, tips: Mapping[str, Sequence[str]] | None = None
    ) -> Markup:
        """Convert a figure to markup for the body of the page.

        Args:
            name: Unique in the page.
            label: Description for screen readers.
            tips: Tooltips for the marks of each artist, by its gid, in drawing order.
        """
        import matplotlib
        from markupsafe import Markup
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.text import Text

        # Control characters would break the XML, and direction marks would take effect.
        for text in drawn.findobj(Text):
            assert isinstance(text, Text)
            text.set_text(one_line(text.get_text()))
        drawn.patch.set_visible(False)
        for axes in drawn.axes:
            axes.patch.set_visible(False)
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            FigureCanvasSVG(drawn).print_svg(out, metadata=NO_METADATA)
        # Safe to parse: matplotlib wrote it, and it declares no entities.
        root = ElementTree.fromstring(out.getvalue())
        _strip_namespaces(root)
        for gid, texts in (tips or {}).items():
            _add_tooltips(root, gid, texts)
        _make_ids_unique(root, name)
        self._shorten(root)
        view = root.get("viewBox", "")
        root.attrib.clear()
        root.attrib.update({"class": "plot", "viewBox": view, "role": "img", "aria-label": one_line(label)})
        return Markup(ElementTree.tostring(root, encoding="unicode"))

    def _shorten(self, parent: ElementTree.Element) -> None:
        """Drop empty groups and invisible digits, and replace styles by classes."""
        children: list[ElementTree.Element] = []
        for child in parent:
            self._shorten(child)
            child.tail = None
            if child.tag == "g" and not child.attrib:
                children += list(child)
            elif child.tag not in ("g", "defs") or len(child):
                children.append(child)
        parent[:] = children
        if parent.tag not in ("text", "title"):
            parent.text = None
        for key, value in list(parent.attrib.items()):
            parent.attrib[key] = " ".join(NUMBER.sub(lambda found: f"{float(found[0]):.1f}", value).split())
        if "d" in parent.attrib:
            parent.set("d", _shorten_path(parent.attrib["d"]))
        if parent.get("transform", "").startswith("rotate(-0 "):
            del parent.attrib["transform"]
        style = _convert_style(parent.attrib.pop("style", ""))
        if style:
            parent.set("class", self._classes.setdefault(style, f"s{len(self._classes)}"))


@contextmanager
def open_sheet() -> Iterator[Sheet]:
    """Yield the sheet of a page. Matplotlib uses the page's settings until the block ends."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser uses other fonts than matplotlib.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield Sheet()


def label_axes(axes: Axes, below: str, above: str = "", right: str = "") -> None:
    """Label the axes ``below`` (x), ``above`` (y) and at the ``right`` (second y).

    Matplotlib's axis labels would need its slow layout.
    """
    drawn = axes.get_figure(root=True)
    assert drawn is not None
    width, height = (size * 72 for size in drawn.get_size_inches())
    box = axes.get_position()
    drawn.text((box.x0 + box.x1) / 2, 6 / height, below, color=COLOURS["muted"], fontsize=10, ha="center")
    drawn.text(4 / width, 1 - 12 / height, above, color=COLOURS["muted"], fontsize=10)
    drawn.text(1 - 4 / width, 1 - 12 / height, right, color=COLOURS["hot"], fontsize=10, ha="right")


def _strip_namespaces(root: ElementTree.Element) -> None:
    """Remove namespaces, metadata and style sheets."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if key.startswith("{")]:
            element.attrib[key.rpartition("}")[2]] = element.attrib.pop(key)
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)


def _add_tooltips(root: ElementTree.Element, gid: str, texts: Sequence[str]) -> None:
    group = root.find(f".//g[@id='{gid}']")
    if group is None:
        return
    inside = {id(mark) for defs in group.iter("defs") for mark in defs.iter()}
    marks = [mark for mark in group.iter() if mark.tag in ("use", "path") and id(mark) not in inside]
    # Marks outside the axes are not drawn; it is then unknown which text belongs to which mark.
    if len(marks) == len(texts):
        for mark, text in zip(marks, texts, strict=True):
            ElementTree.SubElement(mark, "title").text = one_line(text)


def _make_ids_unique(root: ElementTree.Element, name: str) -> None:
    """Prefix referenced ids with the name of the figure, and drop the others."""
    new_ids: dict[str, str] = {}
    for element in root.iter():
        for value in element.attrib.values():
            for found in REFERENCE.findall(value):
                new_ids.setdefault(found, f"{name}-{len(new_ids)}")
        if element.get("href", "").startswith("#"):
            new_ids.setdefault(element.attrib["href"][1:], f"{name}-{len(new_ids)}")
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in new_ids:
            element.set("id", new_ids[old])
        for key, value in element.attrib.items():
            element.attrib[key] = REFERENCE.sub(lambda found: f"url(#{new_ids[found[1]]})", value)
        if "href" in element.attrib:
            element.set("href", f"#{new_ids[element.attrib['href'][1:]]}")


def _shorten_path(text: str) -> str:
    """Shorten horizontal and vertical lines, which make up step plots."""
    words = text.split()
    if not set(words[::3]) <= {"M", "L", "z"}:
        return text
    parts = []
    at: tuple[str, str] | None = None
    for letter, x, y in zip(words[::3], words[1::3], words[2::3], strict=False):
        if letter == "L" and at is not None and at != (x, y):
            parts.append(f"V{y}" if at[0] == x else f"H{x}" if at[1] == y else f"L{x} {y}")
        elif letter == "M":
            parts.append(f"M{x} {y}")
        at = (x, y)
    return "".join(parts) + ("z" if words[-1] == "z" else "")


def _convert_style(text: str) -> str:
    """Keep the styles that matter, with colours of the style sheet."""
    parts: dict[str, Any] = dict(
        [half.strip() for half in part.split(":", 1)] for part in text.split(";") if ":" in part
    )
    kept = [f"{key}:{_convert_colour(value)}" for key, value in parts.items() if key in KEPT_STYLES]
    return ";".join(kept)


def _convert_colour(value: str) -> str:
    for name, number in COLOURS.items():
        if value == number:
            return f"var(--{name})"
    return value


def plot_label(name: str, most: int = MAX_LABEL_LENGTH) -> str:
    """Return a test id without its path, shortened in the middle, since ids differ at the end."""
    path, bracket, params = one_line(name).partition("[")
    plain = f"{path.rpartition('/')[2].partition('::')[2] or path.rpartition('/')[2]}{bracket}{params}"
    return shorten(plain, most)
