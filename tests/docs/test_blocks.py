# SPDX-License-Identifier: Apache-2.0
"""Every block of code on every page does what CONTRIBUTING says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .config import READERS
from .pages import PAGES, blocks, name_of
from .project import set_up
from .trying import failures_of

LANGUAGES = ("python", "sh", "console", "text", *READERS)

#: How a command would begin that nobody looks at.
COMMAND = re.compile(r"^(\$ )?(pytest|llenergy|pip|tox|python3?) [-\w./'\"]", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language or 'no language'}; known: {LANGUAGES}"
        if block.language == "text":
            assert not COMMAND.search(block.code), f"{block}: commands are sh or console"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_every_block_of_the_page_works(
    page: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(pytester, monkeypatch)
    failures = failures_of(page, pytester)
    assert not failures, "\n\n".join(failures)
