# SPDX-License-Identifier: Apache-2.0
"""What a checkout has of what was imported, and what merely has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.ab.imported_code import ImportableCode

PACKAGE = Path("/site-packages/thing/__init__.py")
MODULE = Path("/site-packages/thing.py")
NAMESPACE = Path("/site-packages/thing")


@pytest.mark.parametrize(
    ("file", "place", "own"),
    [
        ("thing/__init__.py", PACKAGE, "thing"),
        ("packages/one/src/thing/__init__.py", PACKAGE, "packages/one/src/thing"),
        ("src/thing.py", MODULE, "src/thing.py"),
        # It was one or the other in another commit.
        ("src/thing.py", PACKAGE, "src/thing.py"),
        ("src/thing/deep/work.py", NAMESPACE, "src/thing"),
        ("src/thing/deep/__init__.py", NAMESPACE, "src/thing"),
        # What others have made, or a fake of it.
        ("third_party/thing/__init__.py", PACKAGE, None),
        ("tests/stubs/thing/__init__.py", PACKAGE, None),
        # A script is called as what it uses, and so is a directory of tests.
        ("examples/thing.py", PACKAGE, None),
        ("tests/thing/test_it.py", PACKAGE, None),
        ("tests/thing/test_it.py", NAMESPACE, None),
    ],
)
def test_what_has_its_name(file: str, place: Path, own: str | None) -> None:
    assert ImportableCode([file]).of("thing", place) == own


def test_what_lies_in_a_package_is_imported_below_its_name() -> None:
    code = ImportableCode(["src/thing/__init__.py", "src/thing/numpy/__init__.py", "src/thing/six.py"])
    assert code.of("numpy", Path("/site-packages/numpy/__init__.py")) is None
    assert code.of("six", Path("/site-packages/six.py")) is None


def test_the_standard_library_is_nobodys_own() -> None:
    assert ImportableCode(["tools/queue.py"]).of("queue", Path("/usr/lib/python3/queue.py")) is None


def test_a_project_below_the_top_has_its_packages_beside_or_below_it() -> None:
    code = ImportableCode(
        ["libs/one/pyproject.toml", "libs/one/thing/__init__.py", "libs/two/code/thing/__init__.py"]
    )
    assert code.of("thing", PACKAGE) == "libs/one/thing"


@pytest.mark.parametrize("file", ["src/acme/thing/__init__.py", "acme/thing.py", "python/acme/thing.py"])
def test_a_part_of_a_namespace_is_its_projects_own(file: str) -> None:
    code = ImportableCode([file])
    assert code.of("acme.thing", PACKAGE if "__init__" in file else MODULE) is not None
    assert code.of("acme.other", Path("/site-packages/acme/other.py")) is None
    assert code.of("other.thing", PACKAGE) is None
