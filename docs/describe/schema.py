# SPDX-License-Identifier: Apache-2.0
"""Write the page of the JSON Schemas of reports and of ``llenergy ab``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pytest_llenergy.record.report import json_schema, paired_schema

from .text import code, lines_of, page, prose, split_attributes, table

#: The schema files, each with its schema and what it describes.
SCHEMAS = {
    "report-1.json": (json_schema, "`--energy-report` writes a `Report` ([explained](../report.md))."),
    "ab-1.json": (paired_schema, "`llenergy ab` writes a `PairedReport`, whose sides are reports as above."),
}

INTRODUCTION = """\
All fields of the files, from the [JSON Schemas](https://json-schema.org) in `pytest_llenergy/record/schema/`.
Units are in the names. A missing value is `null`, with a reason beside it."""


def schema_page() -> str:
    """Return the whole page. Objects that both files use appear once."""
    done: set[str] = set()
    parts: list[list[str]] = []
    for name, (make_schema, about) in SCHEMAS.items():
        schema = make_schema()
        parts.append(list(lines_of(f"## {name}", about)))
        for title, part in _objects(schema).items():
            if title not in done:
                done.add(title)
                parts.append(list(_object(title, part)))
    return page("# Fields of the report", INTRODUCTION, *parts)


def _objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the objects by name, the outermost first."""
    found = {name: part for name, part in schema["$defs"].items() if "properties" in part}
    first = schema.get("$ref", "").rpartition("/")[2]
    if "properties" in schema:
        return {schema["title"]: schema, **found}
    return {first: found[first], **found}


def _object(title: str, part: dict[str, Any]) -> Iterator[str]:
    required = set(part.get("required", ()))
    text, meanings = split_attributes(part.get("description", ""))
    columns = ["field", "type", "default", *(["meaning"] if meanings else [])]
    rows = [
        [
            code(name),
            _type(about),
            ""
            if name in required
            else code(json.dumps(about["default"]))
            if "default" in about
            else "absent",
            meanings.get(name, ""),
        ][: len(columns)]
        for name, about in part["properties"].items()
    ]
    yield from lines_of(f"### {title}", prose(text), table(columns, rows))


def _type(about: dict[str, Any]) -> str:
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"])
    if "enum" in about:
        return ", ".join(code(json.dumps(each)) for each in about["enum"])
    if about.get("type") == "array":
        return f"list of {_type(about['items'])}" if about.get("items") else "list"
    if about.get("type") == "object":
        inner = about.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(about.get("type", "anything"))
