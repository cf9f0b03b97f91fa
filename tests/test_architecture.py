# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md is about the package that there is."""

from __future__ import annotations

import re
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from .test_import_rule import FLOORS, PACKAGE, floor

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text()


@pytest.fixture
def script() -> Any:
    """The script beside the documentation."""
    found = spec_from_file_location("files", DOCS / "files.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_file_is_named_once_and_every_named_file_is_there() -> None:
    named = Counter(re.findall(r"^- `([^`]+)`: \S", PAGE, flags=re.MULTILINE))
    there = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    assert set(named) == {name for name in there if "__pycache__" not in name}
    assert [name for name, times in named.items() if times > 1] == []


def test_the_list_is_what_the_files_say_now(script: Any) -> None:
    assert script.page(PAGE) == PAGE, "files or their first sentences have changed: run python docs/files.py"


def test_the_table_has_every_room_once_and_lower_floors_first(script: Any) -> None:
    names = script.rooms(PAGE)
    rooms = [name.removesuffix("/") for name in names]
    assert sorted(rooms) == sorted(room for rooms in FLOORS for room in rooms)
    assert [floor(room) for room in rooms] == sorted(floor(room) for room in rooms)
    assert [name for name in names if (PACKAGE / name).is_dir() != name.endswith("/")] == []


@pytest.fixture
def house(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of one room, and its page."""
    monkeypatch.setattr(script, "PACKAGE", tmp_path)
    monkeypatch.setattr(script, "FRONT", ())
    monkeypatch.setattr(script, "OTHERS", {"room/data.json": "Figures."})
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "data.json").write_text("{}")
    (tmp_path / "room" / "one.py").write_text('"""It is ``one``,\nof 1.0 things.  Nothing else.\n"""\n')
    return script


def page_of(script: Any) -> str:
    return str(script.page(f"| `room/` | things |\n{script.BEGIN}\n- `gone.py`: Gone.\n{script.END}\nrest\n"))


def test_a_file_is_told_by_its_first_sentence(house: Any) -> None:
    told = "### `room/`\n\n- `room/data.json`: Figures.\n- `room/one.py`: It is `one`, of 1.0 things.\n"
    page = page_of(house)
    assert told in page
    assert "gone" not in page
    assert page.endswith(f"{house.END}\nrest\n")
    assert house.page(page) == page


@pytest.mark.parametrize("text", ["", '"""No sentence"""\n', "x = 1\n"])
def test_a_file_that_does_not_say_what_it_is_ends_the_script(house: Any, text: str) -> None:
    (house.PACKAGE / "room" / "two.py").write_text(text)
    with pytest.raises(ValueError, match=r"room/two\.py does not say in a sentence what it is"):
        page_of(house)


def test_a_file_in_no_room_ends_the_script(house: Any) -> None:
    (house.PACKAGE / "hall.py").write_text('"""A hall."""\n')
    with pytest.raises(ValueError, match=r"in no room of the table: hall\.py"):
        page_of(house)
