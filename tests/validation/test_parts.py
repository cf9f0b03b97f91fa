# SPDX-License-Identifier: Apache-2.0
"""Status and stored results of parts, however they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from validation import machine, markdown, part, pictures
from validation.part import Notebook, SkippedError
from validation.results import Check, Figure, Line, Machine, Part, Report, Table, decode, encode
from validation.runner import Validation

from .conftest import ROOT


def run(body: part.Body, out: Path, budget_s: float = 20.0) -> Part:
    """Run a part in this process."""
    return part.run("some", body, out, budget_s, dry=True)


def stored(out: Path) -> Part:
    """Read the stored result."""
    return msgspec.json.decode((out / "some.json").read_bytes(), type=Part)


def test_part_passes_if_no_check_fails(tmp_path: Path) -> None:
    def body(notebook: Notebook) -> None:
        notebook.check("one", True)
        notebook.check("two", None, "no such board")
        notebook.table("t", ["a"], [[1.23456789], ["x"], [None]])

    assert run(body, tmp_path).status == "passed"
    found = stored(tmp_path)
    assert [check.ok for check in found.checks] == [True, None]
    assert found.tables[0].rows == [[1.2346], ["x"], [None]]
    assert found.dry


def test_failed_check_fails_the_part(tmp_path: Path) -> None:
    found = run(lambda notebook: notebook.check("J/token is stable", False, "12 % off"), tmp_path)
    assert (found.status, found.reason) == ("failed", "checks failed: J/token is stable")


def test_error_fails_the_part_and_keeps_its_findings(tmp_path: Path) -> None:
    def body(notebook: Notebook) -> None:
        notebook.find("found before")
        raise ZeroDivisionError("no load")

    found = run(body, tmp_path)
    assert (found.status, found.reason) == ("failed", "ZeroDivisionError: no load")
    assert stored(tmp_path).findings == ["found before"]
    assert "in body" in (tmp_path / "some" / "traceback.txt").read_text()


def test_part_that_does_not_apply_is_skipped(tmp_path: Path) -> None:
    def body(_: Notebook) -> None:
        raise SkippedError("needs CUDA: no torch")

    assert (run(body, tmp_path).status, stored(tmp_path).reason) == ("skipped", "needs CUDA: no torch")


def test_part_is_stopped_when_its_time_is_up(tmp_path: Path) -> None:
    def body(notebook: Notebook) -> None:
        notebook.find("before")
        try:
            time.sleep(30)
        except Exception:
            notebook.find("caught like an error of the work")

    begin_s = time.monotonic()
    found = run(body, tmp_path, budget_s=0.3)
    assert time.monotonic() - begin_s < 20
    assert (found.status, found.findings) == ("stopped", ["before"])


def test_killed_part_is_stored_as_stopped(tmp_path: Path) -> None:
    Notebook("some", tmp_path, 1.0, True).find("found before it was killed")
    assert (stored(tmp_path).status, stored(tmp_path).findings) == ("stopped", ["found before it was killed"])


@pytest.fixture(scope="module")
def here() -> Machine:
    """Describe this machine; skips if it has CUDA."""
    found = machine.describe_machine()
    if found.cuda is None:
        pytest.skip("these are for machines without CUDA")
    return found


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment variable that tells the parts of a validation whether there is CUDA."""
    monkeypatch.setenv(machine.CUDA_VARIABLE, "")


@pytest.mark.slow
def test_skipped_or_failed_part_has_a_reason_and_the_next_one_runs(tmp_path: Path, here: Machine) -> None:
    validation = Validation(tmp_path, tmp_path, dry=False, total_s=600.0, here=here)
    # A module that exits without writing a result, then two parts.
    for name in ("results", "workers", "sensor"):
        validation.run(name, 120.0)
    died, workers, sensor = validation.parts
    assert (died.status, died.reason) == ("failed", "it ended with exit code 0; it printed nothing")
    for found in (workers, sensor):
        assert (found.status, found.reason) == ("skipped", f"needs CUDA: {here.cuda}")
    report = decode((tmp_path / "report.json").read_bytes())
    assert [one.name for one in report.parts] == ["results", "workers", "sensor"]
    assert report.finished_at is None
    assert "**Not finished.**" in (tmp_path / "summary.md").read_text()


def test_part_without_time_left_is_not_started(tmp_path: Path, here: Machine) -> None:
    validation = Validation(tmp_path, tmp_path, dry=False, total_s=6.0, here=here)
    validation.run("sensor", 50.0)
    assert validation.parts[0].reason == "out of time: not started"


def test_report_round_trips_and_other_versions_are_rejected(here: Machine) -> None:
    report = Report(
        schema_version=1, started_at="2026-01-02T03:04:05+00:00", finished_at=None, duration_s=1.0, dry=True,
        machine=here, parts=[],
    )  # fmt: skip
    assert decode(encode(report)) == report
    later = msgspec.structs.replace(report, schema_version=2)
    with pytest.raises(msgspec.ValidationError, match="schema_version 2"):
        decode(encode(later))


def test_summary_shows_machine_and_failed_checks(here: Machine) -> None:
    some = Part(
        name="sensor", status="failed", reason="checks failed: a|b", dry=True, budget_s=1.0, duration_s=0.5,
        findings=["ticks every 100 ms"],
        checks=[Check(name="holds", ok=True), Check(name="a|b", ok=False, detail="two\nlines")],
        tables=[Table(title="Ticks", columns=["ms", "what"], rows=[[100.04321, "a|b"], [None, "none"]])],
    )  # fmt: skip
    report = Report(
        schema_version=1, started_at="2026-01-02T03:04:05+00:00", finished_at="later", duration_s=1.0,
        dry=True, machine=here, parts=[some],
    )  # fmt: skip
    text = markdown.summary(report)
    assert text.startswith("# Validation: no GPU, 2026-01-02\n")
    assert "**Dry run: the parts ran without a GPU. It validates no hardware.**" in text
    assert "| sensor | failed | 1 of 2 | 0 | checks failed: a\\|b |" in text
    assert "- **FAILED**: a\\|b — two lines" in text
    assert "| 100 | a\\|b |\n|  | none |" in text


def test_pictures_are_drawn_in_every_style(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    styles = ("line", "steps", "points", "dots")
    lines = [Line(label=style, x=[1, 2, 3], y=[1, 4, 9], style=style, errors=[1, 1, 1]) for style in styles]
    figure = Figure(title="t", x_label="x", y_label="y", lines=lines, log_x=True)
    some = Part(
        name="sensor", status="passed", reason=None, dry=True, budget_s=1, duration_s=1, figures=[figure]
    )
    assert pictures.draw([some, msgspec.structs.replace(some, name="bare", figures=[])], tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["sensor.png"]
    assert (tmp_path / "sensor.png").read_bytes().startswith(b"\x89PNG")


INSTALL = ROOT / "benchmarks" / "validation" / "install.py"


def test_install_without_wheels_lists_missing_packages_and_a_remedy(tmp_path: Path) -> None:
    given = {**os.environ, "LLENERGY_VALIDATION_WHEELS": str(tmp_path)}
    command = [sys.executable, "-I", "-S", str(INSTALL), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 1
    assert "lacks cloudpickle, filelock, msgspec" in done.stderr
    assert "benchmarks/validation/wheels.sh" in done.stderr


def test_checkout_acts_as_installed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, INSTALL, tmp_path], check=True)
    script = (
        "import json, sys\nfrom importlib.metadata import distributions\n"
        "found = list(distributions(path=[sys.argv[1]]))\n"
        "print(json.dumps([[d.name, d.version, [e.value for e in d.entry_points]] for d in found]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    )
    ((name, version, entries),) = json.loads(done.stdout)
    assert (name, entries) == ("pytest-llenergy", ["pytest_llenergy.plugin"])
    assert f'__version__ = "{version}"' in (ROOT / "pytest_llenergy" / "__init__.py").read_text()
