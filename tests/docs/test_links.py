# SPDX-License-Identifier: Apache-2.0
"""Every link and picture of a page that names a file of this repository names one that is there."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from .links import ELSEWHERE, anchors, links
from .pages import PAGES, ROOT, name_of

OTHERS = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_what_is_linked_is_there(page: Path) -> None:
    for line, link in links(page):
        if ELSEWHERE.match(link):
            continue
        place, _, anchor = unquote(link).partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.is_relative_to(ROOT), f"{name_of(page)}:{line}: {link} is outside"
        assert target.exists(), f"{name_of(page)}:{line}: there is no {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)}:{line}: no heading is {link}"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *title*, here\n[a](b.md) ![c](d.png)\n\n<p><img src='e.svg'></p>\n\n<!-- <img src='no'> -->\n"
        "- `[f](g)` <a href='h#i'>x</a>\n\n```\n[j](k)\n```\n\n```{image} l.png\n```\n"
    )
    assert [link for _, link in links(page)] == ["b.md", "d.png", "e.svg", "h#i", "l.png"]
    assert anchors(page) == {"a-title-here"}
