# SPDX-License-Identifier: Apache-2.0
"""Matplotlib figures as inline SVG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.text import one_line, shorten

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Figures of matplotlib as inline SVG: small, coloured by the page, and with ids that no other figure has.
#
# Figures are drawn in colours that stand for those of the page's style sheet, which differ in the dark.

#: Variables of the style sheet. Figures use the numbers, which are no colours that anybody sees.
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
    "page",
)
COLOURS = {name: f"#0000{index:02x}" for index, name in enumerate(COLOUR_NAMES, 16)}

#: Width of a figure: that of a phone, so that its text is as large there as other text (CSS pixels).
WIDTH = 340

#: From the edges of a figure to its axes (CSS pixels).
ABOVE, BELOW = 20, 32

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    # Of names and units, none is a formula.
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

#: Nobody dates a figure, or asks what has drawn it.
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

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


def require_html_extra() -> None:
    """Raise ``ReportError`` where the libraries of the extra ``html`` are not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        why = str(error).partition("\n")[0]
        raise ReportError(
            f"HTML needs jinja2 and matplotlib ({why}): pip install 'pytest-llenergy[html]'"
        ) from None


class Sheet:
    """The figures of one page, and the styles that they have in common.

    Used within ``drawing`` only.
    """

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    @property
    def css(self) -> str:
        """The rules that the figures so far need in the page."""
        return "".join(f".{name}{{{style}}}\n" for style, name in self._classes.items())

    def figure(self, height: int, *, left: int = 50, right: int = 14) -> tuple[Figure, Axes]:
        """An empty figure of a height with its axes, so far from its left and right edge (CSS pixels)."""
        from matplotlib.figure import Figure

        made = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        made.subplots_adjust(
            left=left / WIDTH, right=1 - right / WIDTH, top=1 - ABOVE / height, bottom=BELOW / height
        )
        axes = made.subplots()
        axes.tick_params(length=0)
        return made, axes

    def inline(
        self, drawn: Figure, name: str, label: str, tips: Mapping[str, Sequence[str]] | None = None
    ) -> Markup:
        """The figure as markup for the body of a page.

        ``name`` is the figure's own in the page, ``label`` what it shows, for those who do not see it.
        ``tips`` are texts for the marks of an artist, by its gid, in the order in which they are drawn.
        """
        import matplotlib
        from markupsafe import Markup
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.text import Text

        # What XML has no place for would break the figure, and marks of direction are obeyed in it too.
        for text in drawn.findobj(Text):
            assert isinstance(text, Text)
            text.set_text(one_line(text.get_text()))
        drawn.patch.set_visible(False)
        for axes in drawn.axes:
            axes.patch.set_visible(False)
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            FigureCanvasSVG(drawn).print_svg(out, metadata=NO_METADATA)
        # Of our own making; it declares no entities.
        root = ElementTree.fromstring(out.getvalue())
        _plain_tags(root)
        for gid, texts in (tips or {}).items():
            _tell(root, gid, texts)
        _name_apart(root, name)
        self._shorten(root)
        view = root.get("viewBox", "")
        root.attrib.clear()
        root.attrib.update({"class": "plot", "viewBox": view, "role": "img", "aria-label": one_line(label)})
        return Markup(ElementTree.tostring(root, encoding="unicode"))

    def _shorten(self, parent: ElementTree.Element) -> None:
        """Without groups that group nothing, with the digits that can be seen, and classes for styles."""
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
            parent.set("d", _path(parent.attrib["d"]))
        if parent.get("transform", "").startswith("rotate(-0 "):
            del parent.attrib["transform"]
        style = _style(parent.attrib.pop("style", ""))
        if style:
            parent.set("class", self._classes.setdefault(style, f"s{len(self._classes)}"))


@contextmanager
def open_sheet() -> Iterator[Sheet]:
    """Draw with the settings of this page, whatever those of the user are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has other fonts than matplotlib.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield Sheet()


def label_axes(axes: Axes, below: str, above: str = "", right: str = "") -> None:
    """Say what the axes are of, ``right`` of a second one. Titles that make room for themselves are dear."""
    drawn = axes.get_figure(root=True)
    assert drawn is not None
    height = drawn.get_figheight() * 72
    box = axes.get_position()
    drawn.text((box.x0 + box.x1) / 2, 6 / height, below, color=COLOURS["muted"], fontsize=10, ha="center")
    drawn.text(4 / WIDTH, 1 - 12 / height, above, color=COLOURS["muted"], fontsize=10)
    drawn.text(1 - 4 / WIDTH, 1 - 12 / height, right, color=COLOURS["hot"], fontsize=10, ha="right")


def _plain_tags(root: ElementTree.Element) -> None:
    """Names as HTML has them, and nothing that would style the page or describe the file."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if key.startswith("{")]:
            element.attrib[key.rpartition("}")[2]] = element.attrib.pop(key)
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)


def _tell(root: ElementTree.Element, gid: str, texts: Sequence[str]) -> None:
    group = root.find(f".//g[@id='{gid}']")
    if group is None:
        return
    inside = {id(mark) for defs in group.iter("defs") for mark in defs.iter()}
    marks = [mark for mark in group.iter() if mark.tag in ("use", "path") and id(mark) not in inside]
    # One that lies outside the axes is not drawn: then nobody knows which is which.
    if len(marks) == len(texts):
        for mark, text in zip(marks, texts, strict=True):
            ElementTree.SubElement(mark, "title").text = one_line(text)


def _name_apart(root: ElementTree.Element, name: str) -> None:
    """Ids that are referred to, named after the figure; no others."""
    named: dict[str, str] = {}
    for element in root.iter():
        for value in element.attrib.values():
            for found in REFERENCE.findall(value):
                named.setdefault(found, f"{name}-{len(named)}")
        if element.get("href", "").startswith("#"):
            named.setdefault(element.attrib["href"][1:], f"{name}-{len(named)}")
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in named:
            element.set("id", named[own])
        for key, value in element.attrib.items():
            element.attrib[key] = REFERENCE.sub(lambda found: f"url(#{named[found[1]]})", value)
        if "href" in element.attrib:
            element.set("href", f"#{named[element.attrib['href'][1:]]}")


def _path(text: str) -> str:
    """With the short forms for level and upright lines, of which steps are made."""
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


def _style(text: str) -> str:
    """What differs from the style sheet, in its colours."""
    parts: dict[str, Any] = dict(
        [half.strip() for half in part.split(":", 1)] for part in text.split(";") if ":" in part
    )
    kept = [f"{key}:{_coloured(value)}" for key, value in parts.items() if key in KEPT_STYLES]
    return ";".join(kept)


def _coloured(value: str) -> str:
    for name, number in COLOURS.items():
        if value == number:
            return f"var(--{name})"
    return value


# A figure as it stands in the page: drawing, legend, caption.

#: Characters of a test's name that fit over the width of a figure.
MAX_LABEL_LENGTH = 48


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend: how the mark looks (a class of the style sheet) and what it means."""

    look: str
    text: str


@dataclass(frozen=True)
class Plot:
    """``caption`` says what is seen, ``keys`` what the marks mean."""

    svg: Markup
    title: str
    caption: str
    keys: Sequence[LegendEntry] = ()


def plot_label(name: str, most: int = MAX_LABEL_LENGTH) -> str:
    """A test id without its path, cut in the middle: what tells tests apart is at the end."""
    path, bracket, params = one_line(name).partition("[")
    plain = f"{path.rpartition('/')[2].partition('::')[2] or path.rpartition('/')[2]}{bracket}{params}"
    return shorten(plain, most)
