# SPDX-License-Identifier: Apache-2.0
"""Which code a side imports: its own is recognised, any other is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_llenergy.ab.checkouts import session_environment
from pytest_llenergy.ab.imported_code import (
    SAME_CODE,
    ImportableCode,
    InterpreterInfo,
    check_imported_modules,
)
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError

from .project import Project

PACKAGE = Path("/site-packages/thing/__init__.py")
MODULE = Path("/site-packages/thing.py")
NAMESPACE = Path("/site-packages/thing")


@pytest.mark.parametrize(
    ("file", "place", "own"),
    [
        ("thing/__init__.py", PACKAGE, "thing"),
        ("packages/one/src/thing/__init__.py", PACKAGE, "packages/one/src/thing"),
        ("src/thing.py", MODULE, "src/thing.py"),
        # Another commit may have the other kind.
        ("src/thing.py", PACKAGE, "src/thing.py"),
        ("src/thing/deep/work.py", NAMESPACE, "src/thing"),
        ("src/thing/deep/__init__.py", NAMESPACE, "src/thing"),
        # Vendored code, or a stub.
        ("third_party/thing/__init__.py", PACKAGE, None),
        ("tests/stubs/thing/__init__.py", PACKAGE, None),
        # A script or a directory of tests may have the name of the package that it uses.
        ("examples/thing.py", PACKAGE, None),
        ("tests/thing/test_it.py", PACKAGE, None),
        ("tests/thing/test_it.py", NAMESPACE, None),
    ],
)
def test_own_code_is_found_by_name_and_kind(file: str, place: Path, own: str | None) -> None:
    assert ImportableCode([file]).find("thing", place) == own


def test_module_in_a_package_is_not_top_level() -> None:
    code = ImportableCode(["src/thing/__init__.py", "src/thing/numpy/__init__.py", "src/thing/six.py"])
    assert code.find("numpy", Path("/site-packages/numpy/__init__.py")) is None
    assert code.find("six", Path("/site-packages/six.py")) is None


def test_standard_library_is_not_own_code() -> None:
    assert ImportableCode(["tools/queue.py"]).find("queue", Path("/usr/lib/python3/queue.py")) is None


def test_nested_project_has_packages_beside_or_below_its_project_file() -> None:
    code = ImportableCode(
        ["libs/one/pyproject.toml", "libs/one/thing/__init__.py", "libs/two/code/thing/__init__.py"]
    )
    assert code.find("thing", PACKAGE) == "libs/one/thing"


@pytest.mark.parametrize("file", ["src/acme/thing/__init__.py", "acme/thing.py", "python/acme/thing.py"])
def test_part_of_a_namespace_is_own_code(file: str) -> None:
    code = ImportableCode([file])
    assert code.find("acme.thing", PACKAGE if "__init__" in file else MODULE) is not None
    assert code.find("acme.other", Path("/site-packages/acme/other.py")) is None
    assert code.find("other.thing", PACKAGE) is None


def side_at(root: Path, project: Project) -> Side:
    return Side(
        name="base",
        origin="main",
        short="abc",
        root=root,
        directory=root,
        python=Path(sys.executable),
        environment={**session_environment(), "PYTHONPATH": project.environment["PYTHONPATH"]},
    )


@pytest.mark.parametrize("own", ["src/thing/__init__.py", "python/thing/__init__.py", "src/thing.py"])
@pytest.mark.parametrize("place", ["site-packages", "clone/src"])
def test_own_code_imported_from_elsewhere_is_refused(
    project: Project, tmp_path: Path, own: str, place: str
) -> None:
    """A copy that is installed, or an editable installation of another clone."""
    project.write(own, "")
    module = tmp_path / place / own.split("/", 1)[1]
    imports = tmp_path / "imports"
    imports.mkdir()
    (imports / "1.json").write_text(json.dumps({"thing": [str(module)]}))
    info = InterpreterInfo([], [sys.prefix])
    with pytest.raises(PlanError) as caught:
        check_imported_modules(side_at(project.path, project), info, [imports], project.path, tmp_path)
    shown = own.removesuffix("/__init__.py")
    assert str(caught.value) == f"base imported thing from {module} instead of its own {shown}, {SAME_CODE}"


@pytest.mark.parametrize(("by", "place"), [("test", "copy"), ("rank", "copy"), ("test", "checkout")])
def test_session_that_imported_foreign_code_is_refused_and_discarded(
    project: Project, tmp_path: Path, by: str, place: str
) -> None:
    """It is also installed, or the environment names the user's checkout. A rank may import it later."""
    project.write("src/thing/__init__.py", "")
    if by == "test":
        project.edit("test_some.py", "from work", "import thing\nfrom work")
    project.commit()
    site = project.path / "src" if place == "checkout" else tmp_path / "site-packages"
    module = site / "thing" / "__init__.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.touch()
    project.extend_path(site)
    message = f"base imported thing from {module} instead of its own src/thing, {SAME_CODE}"
    assert project.error("--base=HEAD", "--head=HEAD", "--", "pytest") == message
    assert project.session_logs() == []
