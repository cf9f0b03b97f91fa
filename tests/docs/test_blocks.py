# SPDX-License-Identifier: Apache-2.0
"""Every block of code on every page does what CONTRIBUTING.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .config import READERS
from .pages import PAGES, ROOT, blocks, name_of
from .project import set_up
from .trying import find_failures

LANGUAGES = ("python", "sh", "console", "text", *READERS)

#: The beginning of a command that nothing would check.
COMMAND = re.compile(r"^(\$ )?(pytest|llenergy|pip|tox|python3?) [-\w./'\"]", re.MULTILINE)

#: Pages that the default run tries: they use every kind of block. The others are slow together.
QUICK = {
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("comparing", "gating", "report", "writing-a-meter")),
}


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        for block in blocks(page):
            known = f"{block}: {block.language or 'no language'}; known: {LANGUAGES}"
            assert block.language in LANGUAGES, known
            if block.language == "text":
                assert not COMMAND.search(block.code), f"{block}: commands are sh or console"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in PAGES if blocks(page)],
    ids=name_of,
)
def test_every_block_of_the_page_works(
    page: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, no_xdist: None
) -> None:
    set_up(pytester, monkeypatch)
    failures = find_failures(page, pytester)
    assert not failures, "\n\n".join(failures)
