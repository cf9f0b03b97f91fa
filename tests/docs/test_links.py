# SPDX-License-Identifier: Apache-2.0
"""Links and pictures of a page lead to files and headings of this repository that exist."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from .links import ELSEWHERE, anchors, links
from .pages import PAGES, ROOT, name_of

OTHERS = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "benchmarks").rglob("README.md"))]


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    wrong = [problem for page in [*PAGES, *OTHERS] for problem in broken_links(page)]
    assert not wrong, "\n".join(wrong)


def broken_links(page: Path) -> list[str]:
    """Return what is wrong with the links of a page."""
    wrong = []
    for line, link in links(page):
        if ELSEWHERE.match(link):
            continue
        place, _, anchor = unquote(link).partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{name_of(page)}:{line}: {link} does not exist in the repository")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{name_of(page)}:{line}: no heading for {link}")
    return wrong


def test_links_pictures_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *title*, here\n[a](b.md) ![c](d.png)\n\n<p><img src='e.svg'></p>\n\n<!-- <img src='no'> -->\n"
        "- `[f](g)` <a href='h#i'>x</a>\n\n```\n[j](k)\n```\n\n```{image} l.png\n```\n"
    )
    assert [link for _, link in links(page)] == ["b.md", "d.png", "e.svg", "h#i", "l.png"]
    assert anchors(page) == {"a-title-here"}
