# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas held against each other."""

from __future__ import annotations

import json
from typing import Any


def in_order(schema: Any) -> Any:
    """The schema without what means nothing and differs from version to version.

    msgspec has alternatives in one order or another, and Python 3.13 takes the indentation from docstrings.
    """
    if isinstance(schema, list):
        return [in_order(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    ordered = {name: in_order(each) for name, each in schema.items()}
    if "anyOf" in ordered:
        ordered["anyOf"] = sorted(ordered["anyOf"], key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(ordered.get("description"), str):
        ordered["description"] = " ".join(ordered["description"].split())
    return ordered
