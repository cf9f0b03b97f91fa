# SPDX-License-Identifier: Apache-2.0
"""What cannot be compared is told in one line, and before hours are spent wherever it can be."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from .project import Project

CHANGED = (
    "so that both sides measure the same; give each an environment of its own: --setup 'pip install -e .'"
)


def error(project: Project, *args: str) -> str:
    outcome = project.ab(*args)
    assert (outcome.status, outcome.out) == (2, "")
    last = outcome.lines[-1]
    assert last.startswith("llenergy ab: ")
    return last.removeprefix("llenergy ab: ")


def sessions(project: Project) -> list[str]:
    return sorted(path.name for path in (project.path / ".llenergy").rglob("*.log"))


def install(project: Project, place: Path, name: str) -> Path:
    """An empty module where the sessions of a project find it."""
    module = place / name
    module.parent.mkdir(parents=True)
    module.write_text("")
    project.environment["PYTHONPATH"] += f":{place}"
    return module


class TestSameCode:
    """With the project installed from the user's checkout both sides would run what is there."""

    def test_an_editable_installation_is_refused(self, project: Project, tmp_path: Path) -> None:
        site = tmp_path / "site"
        info = site / "thing-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        url = project.path.as_uri()
        (info / "direct_url.json").write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')
        project.environment["PYTHONPATH"] += f":{site}"
        told = (
            f"base would import its code from {project.path} (editable thing) and not from its own checkout, "
        )
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == told + CHANGED
        assert sessions(project) == []

    def test_a_copy_that_was_installed_from_it_is_refused(self, project: Project, tmp_path: Path) -> None:
        info = tmp_path / "site" / "thing-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        (info / "direct_url.json").write_text(f'{{"url": "{project.path.as_uri()}", "dir_info": {{}}}}')
        project.environment["PYTHONPATH"] += f":{tmp_path / 'site'}"
        assert "(installed thing)" in error(project, "--base=HEAD", "--head=HEAD", "--", "pytest")

    def test_a_finder_of_setuptools_is_refused(self, project: Project, tmp_path: Path) -> None:
        site = tmp_path / "site"
        site.mkdir()
        mapping = f"MAPPING: dict[str, str] = {{'thing': {str(project.path / 'src' / 'thing')!r}}}\n"
        (site / "__editable___thing_1_0_finder.py").write_text(mapping)
        project.environment["PYTHONPATH"] += f":{site}"
        told = f"base would import its code from {project.path / 'src' / 'thing'} (editable thing) and not "
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest").startswith(told)

    @pytest.mark.parametrize("below", ["", "/src"])
    def test_a_path_into_the_checkout_is_refused(self, project: Project, below: str) -> None:
        project.environment["PYTHONPATH"] += f":{project.path}{below}"
        told = f"base would import its code from {project.path}{below} (PYTHONPATH) and not from its own "
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == f"{told}checkout, {CHANGED}"

    def test_a_file_of_paths_is_refused(self, project: Project, tmp_path: Path) -> None:
        """As an editable installation without metadata leaves it."""
        site = tmp_path / "site"
        for directory in (site, project.path / "src"):
            directory.mkdir()
        (site / "thing.pth").write_text(f"{project.path}/src\n")
        (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
        project.environment["PYTHONPATH"] += f":{site}"
        told = f"base would import its code from {project.path}/src (sys.path) and not from its own checkout"
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == f"{told}, {CHANGED}"

    def test_what_was_imported_from_elsewhere_is_refused_and_forgotten(
        self, project: Project, tmp_path: Path
    ) -> None:
        """Installed from an index, and with its source below src/: nothing names the checkout."""
        project.write("src/thing/__init__.py", "")
        project.edit("test_some.py", "from work", "import thing\nfrom work")
        project.commit()
        installed = install(project, tmp_path / "site-packages", "thing/__init__.py")
        told = f"base has imported thing from {installed}, although it has src/thing, {CHANGED}"
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == told
        # Nothing of it is taken for a measurement of the base later.
        assert sessions(project) == []

    @pytest.mark.parametrize("own", ["src/thing/__init__.py", "python/thing/__init__.py", "src/thing.py"])
    @pytest.mark.parametrize("place", ["site-packages", "clone/src"])
    def test_its_own_code_from_anywhere_else_is_refused(
        self, project: Project, tmp_path: Path, own: str, place: str
    ) -> None:
        """A copy that is installed, or an editable installation of another clone."""
        project.write(own, "")
        project.edit("test_some.py", "from work", "import thing\nfrom work")
        project.commit()
        other = install(project, tmp_path / place, own.split("/", 1)[1])
        shown = own.removesuffix("/__init__.py")
        told = f"base has imported thing from {other}, although it has {shown}, {CHANGED}"
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == told

    def test_what_ranks_alone_import_is_refused(self, project: Project, tmp_path: Path) -> None:
        project.write("src/thing/__init__.py", "")
        project.commit()
        installed = install(project, tmp_path / "site-packages", "thing/__init__.py")
        told = f"base has imported thing from {installed}, although it has src/thing, {CHANGED}"
        assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == told

    @pytest.mark.parametrize("args", [[], ["--base=main"], ["--head=HEAD"], ["--base=main", "--head=."]])
    def test_the_same_commit_is_compared_where_both_were_named_only(
        self, project: Project, args: list[str]
    ) -> None:
        outcome = project.ab(*args, "--pairs=4", "--rounds-per-session=4", "--", "pytest")
        if len(args) == 2:
            assert outcome.status == 0
            return
        assert outcome.status == 2
        told = f"are the same commit {project.git('rev-parse', 'HEAD')[:10]}, nothing can differ; name "
        assert told in outcome.lines[-1]
        assert sessions(project) == []


class TestSessions:
    def test_a_usage_error_of_pytest_stops_everything(self, project: Project) -> None:
        told = error(project, "--base=HEAD", "--head=HEAD", "--", "pytest", "--no-such-option")
        (log,) = (project.path / ".llenergy").rglob("001-base.1.log")
        commit = project.git("rev-parse", "HEAD")[:7]
        assert told.startswith(f"session 1 (base {commit}) ended with exit code 4: '")
        assert told.endswith(f"; the whole log: {log}")

    def test_a_session_that_dies_stops_everything(self, project: Project) -> None:
        project.write("test_some.py", "import os\ndef test_a(): os.kill(os.getpid(), 9)")
        project.commit()
        told = error(project, "--base=HEAD", "--head=HEAD", "--", "pytest")
        assert "was ended by signal 9: " in told

    def test_tests_that_cannot_be_collected_stop_everything(self, project: Project) -> None:
        project.write("test_some.py", "import no_such_module")
        project.commit()
        outcome = project.ab("--base=HEAD", "--head=HEAD", "--", "pytest", "-q")
        assert "ended with exit code 2: " in outcome.lines[-1]
        assert "  | ERROR test_some.py" in outcome.err

    def test_where_nothing_is_measured_there_is_nothing_to_compare(self, project: Project) -> None:
        project.write("test_some.py", "def test_a(): pass")
        project.commit()
        for _ in range(2):
            assert "has measured no test; the whole log: " in error(
                project, "--base=HEAD", "--head=HEAD", "--", "pytest"
            )

    @pytest.mark.parametrize(
        ("option", "told"), [("-qx", "--maxfail (-x) is set, "), ("--sw", "--stepwise is set, ")]
    )
    def test_settings_that_stop_sessions_are_refused(self, project: Project, option: str, told: str) -> None:
        project.environment["PYTEST_ADDOPTS"] = "-p pytest_llenergy.plugin"
        project.write("pytest.ini", f"[pytest]\naddopts = {option}\n")
        project.commit()
        found = error(project, "--base=HEAD", "--head=HEAD", "--", "pytest")
        assert f"ended with exit code 4: 'ERROR: {told}" in found.replace('"', "'")

    def test_a_setup_that_fails_shows_why(self, project: Project) -> None:
        outcome = project.ab("--base=HEAD", "--head=HEAD", "--setup", "echo no luck; exit 3", "--", "pytest")
        assert outcome.lines[-2] == "  | no luck"
        told = outcome.lines[-1].removeprefix("llenergy ab: ")
        (log,) = (project.path / ".llenergy").rglob("setup-base.log")
        assert told == (
            "base: --setup 'echo no luck; exit 3' failed with exit code 3: 'no luck'; the whole log: "
            + str(log)
        )

    def test_an_interpreter_without_pytest_says_so(self, project: Project, tmp_path: Path) -> None:
        venv.create(tmp_path / "bare")
        python = tmp_path / "bare" / "bin" / "python"
        told = error(project, f"--b-python={python}", "--", "pytest")
        assert told == (
            f"head: pytest is not installed for {python}; install it, with --setup as one of its commands"
        )


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["--base=HEAD", "--head=HEAD"],
            "no command to run; write it after --, such as: llenergy ab --base origin/main -- ",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--", "make", "bench"],
            "'make bench' is no pytest command; write it after --, ",
        ),
        (["--base=nothing", "--", "pytest"], "'nothing' is no commit that git knows here"),
        (["--head=-x", "--", "pytest"], "'-x' is no commit that git knows here"),
        (
            ["--base=HEAD", "--head=HEAD", "--pairs=2", "--", "pytest"],
            "invalid pairs '2'; the first stage needs at least 4 pairs",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--rounds-per-session=0", "--", "pytest"],
            "--rounds-per-session=0 needs a whole number",
        ),
        (["--base=HEAD", "--head=HEAD", "--metric=joules", "--", "pytest"], "unknown metric 'joules'"),
        (
            ["--base=HEAD", "--head=HEAD", "-o", "no/where.json", "--", "pytest"],
            "--output=no/where.json: no directory no; make it",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--a=-q", "--", "pytest"],
            "--base, --head and --setup compare two commits, --a and --b ",
        ),
        (["--a='", "--", "pytest"], "--a=': No closing quotation"),
        (["--a-python=nothing", "--", "pytest"], "--a-python=nothing: no such program"),
    ],
)
def test_usage(project: Project, args: list[str], told: str) -> None:
    assert error(project, *args).startswith(told)


def test_a_path_into_the_checkout_itself(project: Project) -> None:
    told = error(project, "--base=HEAD", "--head=HEAD", "--", "pytest", f"{project.path}/test_some.py")
    assert told.endswith(
        "names the checkout itself, and each side has its own: write it relative to this directory"
    )


def test_outside_git(project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    project.path = outside
    assert error(project, "--base=HEAD", "--head=HEAD", "--", "pytest") == (
        f"{outside} is in no git checkout; compare two option sets: --a='…' --b='…'"
    )
