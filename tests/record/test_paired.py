# SPDX-License-Identifier: Apache-2.0
"""The file of ``llenergy ab``: strict like a report, and not to be taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

import pytest_llenergy.record
from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.report import (
    SCHEMA_VERSION,
    PairedReport,
    Session,
    decode_paired_report,
    encode_paired_report,
    encode_report,
    is_paired_report,
    paired_schema,
)
from pytest_llenergy.report.store import read_paired_report, read_report

from .reports import REPORT
from .schemas import in_order

PAIRED = PairedReport(
    schema_version=SCHEMA_VERSION,
    tool=REPORT.tool,
    pairs="6+6",
    complete=True,
    sessions=[
        Session(
            side="base", run_id="r", started_at="2026-01-01T00:00:00Z", finished_at=None, exit_status=None
        )
    ],
    base=REPORT,
    head=REPORT,
    compared=compare_reports(REPORT, REPORT, ("a", "b"), [Criterion()]),
)


def test_a_paired_report_survives_encoding() -> None:
    assert decode_paired_report(encode_paired_report(PAIRED), "x") == PAIRED
    assert is_paired_report(encode_paired_report(PAIRED))
    assert not is_paired_report(encode_report(REPORT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "x: schema version 99 is newer than 1, "),
        ({"pairs": 12}, "x: broken report of llenergy ab (Expected `str`, got `int` - at `$.pairs`)"),
        ({"unknown": 1}, "x: broken report of llenergy ab (Object contains unknown field `unknown`)"),
    ],
)
def test_data_that_is_not_a_paired_report_is_refused(change: dict[str, object], message: str) -> None:
    data = json.dumps({**json.loads(encode_paired_report(PAIRED)), **change}).encode()
    with pytest.raises(ReportError) as raised:
        decode_paired_report(data, "x")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            encode_report(REPORT),
            "a single report; name two to compare, or a file of llenergy ab",
        ),
        (b"", "empty, expected a JSON report of pytest --energy-report"),
        (
            encode_paired_report(PAIRED)[:-90],
            "not a report of pytest --energy-report (Input data was truncated)",
        ),
    ],
)
def test_a_file_without_two_sides_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ReportError) as raised:
        read_paired_report(path)
    assert str(raised.value) == f"{path}: {message}"


def test_a_paired_report_is_refused_as_a_report_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(encode_paired_report(PAIRED))
    with pytest.raises(ReportError, match="holds both sides of llenergy ab; one run is needed here"):
        read_report(path)
    assert msgspec.structs.replace(read_paired_report(path), pairs="12").pairs == "12"


@pytest.mark.parametrize(
    ("form", "mark"),
    [("html", "<!DOCTYPE html>"), ("markdown", "<!-- llenergy:compare -->")],
)
def test_every_format_can_be_written_to_a_file(form: str, mark: str, tmp_path: Path) -> None:
    if form == "html":
        pytest.importorskip("jinja2")
    path, output = tmp_path / "ab.json", tmp_path / "out"
    path.write_bytes(encode_paired_report(PAIRED))
    main(["compare", str(path), "--format", form, "--output", str(output)])
    assert output.read_text("utf-8").startswith(mark)


def test_a_file_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ab.json"
    path.write_bytes(encode_paired_report(PAIRED))
    output = tmp_path / "nowhere" / "out"
    assert main(["compare", str(path), "--output", str(output)]) == 2
    message = f"llenergy compare: {output}: could not be written (No such file or directory)\n"
    assert capsys.readouterr().err == message


def test_the_published_schema_matches_the_types() -> None:
    published = Path(pytest_llenergy.record.__file__).parent / "schema" / f"ab-{SCHEMA_VERSION}.json"
    written = json.loads(published.read_text("utf-8"))
    assert in_order(written) == in_order(paired_schema()), "the types changed: run python docs/reference.py"


def test_the_schema_accepts_written_reports_and_no_further_field() -> None:
    data = json.loads(encode_paired_report(PAIRED))
    validator = jsonschema.Draft202012Validator(paired_schema())
    validator.validate(data)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**data, "unknown": 1})
