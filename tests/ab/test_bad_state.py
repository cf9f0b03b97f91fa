# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a comparison: it measures again, or says in one line which file is at fault."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_llenergy.ab.floors import LearnedFloor, device_key, load_floors, save_floors
from pytest_llenergy.ab.imported_code import _read_imports
from pytest_llenergy.ab.state import State
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import encode_report

from ..cli.bad_files import FUZZ, WHOLE, spoiled
from ..compare.runs import record_of, report_of
from .test_state import ASKED, FIRST, ended

REPORT = report_of(record_of())


class Comparison:
    """A comparison with one finished session, its imports and a floor."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = State(root, ASKED)
        ended(self.state, 0, measured=REPORT)
        attempt = self.state._attempts(FIRST)[0]
        self.modules = attempt.modules
        self.modules.mkdir()
        (self.modules / "1.json").write_text(json.dumps({"torch": ["/site-packages/torch/__init__.py"]}))
        floor = LearnedFloor(floor=0.02, comparisons=20, estimates=40, date="2026-01-02", devices="CPU")
        floors = save_floors(root, device_key(REPORT.records[0], REPORT.environment), {"energy_j": floor})
        self.paths = {
            "end": attempt.end,
            "summary": attempt.summary,
            "report": attempt.report,
            "imports": self.modules / "1.json",
            "floors": floors,
        }
        self.contents = {name: path.read_bytes() for name, path in self.paths.items()}

    def use(self) -> list[str]:
        """Read all files as a resumed comparison does, and return the errors."""
        readers: list[Callable[[], object]] = [
            lambda: self.state.load_finished(FIRST),
            lambda: self.state.finished_sessions,
            lambda: self.state.list_failed_tests(FIRST),
            lambda: self.state.list_skipped_modules(FIRST),
            lambda: self.state.lacks_tests(FIRST, 0, self.root),
            lambda: list(_read_imports([self.modules])),
            lambda: load_floors(self.root, REPORT),
        ]
        errors = []
        for read in readers:
            try:
                read()
            except PlanError as error:
                errors.append(str(error))
        return errors


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(tmp_path_factory.mktemp("comparison"))


def test_valid_files_are_read(comparison: Comparison) -> None:
    assert comparison.use() == []
    found = comparison.state.load_finished(FIRST)
    assert found is not None
    assert [encode_report(each) for each in found[0]] == [comparison.contents["report"]]


@pytest.mark.parametrize("examples", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_files_are_one_line_or_measured_again(comparison: Comparison, examples: int) -> None:
    def check(name: str, content: bytes) -> None:
        comparison.paths[name].write_bytes(content)
        try:
            errors = comparison.use()
        finally:
            comparison.paths[name].write_bytes(comparison.contents[name])
        for error in errors:
            assert "\n" not in error
            assert comparison.paths[name].name in error
            assert "llenergy ab --fresh discards" in error or "delete it" in error

    @settings(FUZZ, max_examples=examples)
    @given(st.sampled_from(list(comparison.paths)), st.data())
    def fuzz(name: str, data: st.DataObject) -> None:
        check(name, data.draw(spoiled(comparison.contents[name])))

    for name in comparison.paths:
        for content in WHOLE.values():
            check(name, content)
    fuzz()


@pytest.mark.parametrize("name", ["end", "summary", "report", "imports", "floors"])
def test_special_files_do_not_hang_a_comparison(comparison: Comparison, name: str) -> None:
    path = comparison.paths[name]
    kinds: list[Callable[[], object]] = [
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
    ]
    for make in kinds:
        path.unlink()
        make()
        errors = comparison.use()
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(comparison.contents[name])
        assert all("\n" not in error and path.name in error for error in errors)
