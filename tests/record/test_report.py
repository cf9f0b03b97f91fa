# SPDX-License-Identifier: Apache-2.0
"""Writing and reading reports: nothing is lost, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import pytest_llenergy.record
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.report import (
    SCHEMA_VERSION,
    decode_report,
    encode_report,
    json_schema,
)

from .reports import RECORD, REPORT
from .schemas import in_order

PUBLISHED = Path(pytest_llenergy.record.__file__).parent / "schema" / f"report-{SCHEMA_VERSION}.json"


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(encode_report(REPORT))
    return loaded


def refusal(data: bytes | dict[str, Any]) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(ReportError) as caught:
        decode_report(raw, "base.json")
    return str(caught.value)


def test_a_report_survives_encoding() -> None:
    assert decode_report(encode_report(REPORT), "base.json") == REPORT


def test_the_file_is_indented_utf_8_and_ends_with_a_newline() -> None:
    text = encode_report(REPORT).decode("utf-8")
    assert text.startswith('{\n  "schema_version": 1,\n')
    assert text.endswith("}\n")
    assert "ünïcode" in text


@pytest.mark.parametrize("reason", ['"records": []', '\n"records": []\n', '\\"records\\": []'])
def test_each_record_is_one_line_whatever_its_content(reason: str) -> None:
    records = [msgspec.structs.replace(RECORD, id=f"t{index}", reason=reason) for index in range(3)]
    source = msgspec.structs.replace(REPORT.source, branch=reason)
    report = msgspec.structs.replace(REPORT, records=records, source=source)
    lines = [line.rstrip(b",") for line in encode_report(report).splitlines() if line.startswith(b'{"')]
    assert [json.loads(line)["id"] for line in lines] == ["t0", "t1", "t2"]
    assert decode_report(encode_report(report), "x") == report


def test_a_report_without_records_is_valid() -> None:
    report = msgspec.structs.replace(REPORT, records=[])
    assert decode_report(encode_report(report), "x") == report


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_lacks_become_null(value: float) -> None:
    metric = msgspec.structs.replace(RECORD.metrics["energy_j"], value=value)
    record = msgspec.structs.replace(RECORD, metrics={"energy_j": metric})
    written = encode_report(msgspec.structs.replace(REPORT, records=[record]))
    assert json.loads(written)["records"][0]["metrics"]["energy_j"]["value"] is None
    assert decode_report(written, "base.json").records[0].metrics["energy_j"].value is None


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_an_empty_file_is_refused(data: bytes) -> None:
    assert refusal(data) == "base.json: empty, expected a JSON report of pytest --energy-report"


def test_an_impossible_version_is_refused() -> None:
    assert refusal({"schema_version": 0}) == "base.json: schema version 0 does not exist; versions start at 1"


def test_a_newer_version_is_refused() -> None:
    newer = {"schema_version": 2, "whatever": "the future holds"}
    assert refusal(newer) == (
        "base.json: schema version 2 is newer than 1, the newest this pytest-llenergy reads; "
        "upgrade pytest-llenergy"
    )


def test_a_truncated_file_is_refused() -> None:
    whole = encode_report(REPORT)
    # Not within a number, which the decoder would name.
    for length in (1, whole.rindex(b",", 0, len(whole) // 2), len(whole) - 3):
        assert refusal(whole[:length]) == (
            "base.json: not a report of pytest --energy-report (Input data was truncated)"
        )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field `schema_version`"),
        (b'{"schema_version": "1"}', "Expected `int`, got `str` - at `$.schema_version`"),
        (b"\xff\xfe", "JSON is malformed: invalid character (byte 0)"),
        (b"benchmarks,1.0", "JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, why: str) -> None:
    assert refusal(data) == f"base.json: not a report of pytest --energy-report ({why})"


def test_an_unknown_field_is_refused() -> None:
    data = document()
    data["records"][0]["joules"] = 1
    assert refusal(data) == (
        "base.json: broken report (Object contains unknown field `joules` - at `$.records[0]`)"
    )


def test_a_missing_field_or_a_wrong_type_is_refused() -> None:
    data = document()
    del data["records"][0]["rounds"][0]["energy_j"]
    assert refusal(data) == (
        "base.json: broken report (Object missing required field `energy_j` - at `$.records[0].rounds[0]`)"
    )
    data = document()
    data["records"][0]["status"] = "fine"
    assert refusal(data) == "base.json: broken report (Invalid enum value 'fine' - at `$.records[0].status`)"


def test_the_schema_accepts_written_reports() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document())


@pytest.mark.parametrize(("field", "value"), [("joules", 1), ("status", "fine"), ("attempt", "once")])
def test_the_schema_refuses_data_that_cannot_be_read(field: str, value: object) -> None:
    data = document()
    data["records"][0][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(data)


def test_the_published_schema_matches_the_types() -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert in_order(published) == in_order(json_schema()), "the types changed: run python docs/reference.py"


def test_one_estimated_domain_makes_a_record_an_estimate() -> None:
    measured = RECORD.meters[0]
    estimated = msgspec.structs.replace(measured, kind="estimated")
    for meters, kind in (([], None), ([measured], "measured"), ([measured, estimated], "estimated")):
        assert msgspec.structs.replace(RECORD, meters=meters).kind == kind
