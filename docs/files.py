# SPDX-License-Identifier: Apache-2.0
"""Write the files in architecture.md, each with its docstring's first sentence: python docs/files.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PAGE = Path(__file__).parent / "architecture.md"
PACKAGE = Path(__file__).parents[1] / "pytest_llenergy"

BEGIN = "<!-- Begin of what `python docs/files.py` has generated; do not edit. -->"
END = "<!-- End of what `python docs/files.py` has generated. -->"

#: Files that cannot say it themselves.
OTHERS = {
    "model/schema/ab-1.json": "JSON Schema of the files of `llenergy ab`, version 1.",
    "model/schema/report-1.json": "JSON Schema of reports, version 1.",
    "py.typed": "Tells type checkers that the package has types (PEP 561).",
    "report/html/templates/page.css": "The one style sheet of a page, light and dark.",
    "report/html/templates/page.html.j2": "The frame of a page; every value in it is escaped.",
}

#: The package itself, which is no room.
FRONT = ("__init__.py", "py.typed")


def rooms(page: str) -> list[str]:
    """Rooms in the order of the table, which is that of the floors: ``devices/``, ``plugin``."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([a-z]+/?)`", row)]


def sentence(path: Path) -> str:
    """What a file is, in its own words. Raises ``ValueError`` where it has none."""
    name = path.relative_to(PACKAGE).as_posix()
    if name in OTHERS:
        return OTHERS[name]
    text = (ast.get_docstring(ast.parse(path.read_text())) or "") if path.suffix == ".py" else ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    found = re.match(r".*?[.?!](?= |$)", paragraph)
    if found is None:
        raise ValueError(f"{name} does not say in a sentence what it is")
    return found[0].replace("``", "`")


def files() -> list[Path]:
    """Every file of the package, those of a folder before its folders."""
    found = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(found, key=lambda path: (path.parent, path.name))


def lines(names: Sequence[str]) -> Iterator[str]:
    """A heading for each room, and a line for each file. Raises ``ValueError`` for one in no room."""
    left = {path.relative_to(PACKAGE).as_posix(): path for path in files()}
    folders = [name for name in names if name.endswith("/")]
    parts = {f"`{room}`": [name for name in left if name.startswith(room)] for room in folders}
    single = [f"{name}.py" for name in names if name not in folders]
    for title, held in {"The package itself": [*FRONT, *single], **parts}.items():
        yield from ("", f"### {title}", "")
        yield from (f"- `{name}`: {sentence(left.pop(name))}" for name in held)
    if left:
        raise ValueError(f"in no room of the table: {', '.join(left)}")


def page(text: str) -> str:
    """The page with the list as the package is now. Raises ``ValueError`` where it cannot be made."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("the page does not say where the list begins and ends")
    return "\n".join([before + BEGIN, *lines(rooms(text)), "", END + after])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
