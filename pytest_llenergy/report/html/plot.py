# SPDX-License-Identifier: Apache-2.0
"""A figure as it stands in the page: drawing, legend, caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_llenergy.model.text import cut, one_line

if TYPE_CHECKING:
    from markupsafe import Markup

#: Characters of a test's name that fit over the width of a figure.
MOST_NAME = 48


@dataclass(frozen=True)
class Key:
    """One entry of a legend: how the mark looks (a class of the style sheet) and what it means."""

    look: str
    text: str


@dataclass(frozen=True)
class Plot:
    """``caption`` says what is seen, ``keys`` what the marks mean."""

    svg: Markup
    title: str
    caption: str
    keys: Sequence[Key] = ()


def short_name(name: str, most: int = MOST_NAME) -> str:
    """A test id without its path, cut in the middle: what tells tests apart is at the end."""
    path, bracket, params = one_line(name).partition("[")
    plain = f"{path.rpartition('/')[2].partition('::')[2] or path.rpartition('/')[2]}{bracket}{params}"
    return cut(plain, most)
