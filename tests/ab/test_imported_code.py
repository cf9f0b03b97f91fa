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
    InterpreterInfo,
    check_imported_modules,
)
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError

from .project import Project


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


@pytest.mark.parametrize(
    "own",
    [
        "src/thing/__init__.py",
        "python/thing/__init__.py",
        "packages/a/thing/__init__.py",
        "packages/b/src/thing.py",
        "src/thing.py",
        "thing.py",
    ],
)
@pytest.mark.parametrize("place", ["site-packages", "clone/src"])
def test_own_code_imported_from_elsewhere_is_refused(
    project: Project, tmp_path: Path, own: str, place: str
) -> None:
    """A copy that is installed, or an editable installation of another clone."""
    project.write(own, "")
    for project_file in ("packages/a/pyproject.toml", "packages/b/setup.py"):
        project.write(project_file, "")
    project.commit()
    module = tmp_path / place / own[own.index("thing") :]
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
