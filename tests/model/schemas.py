# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas held against each other."""

from __future__ import annotations

import json
from typing import Any


def in_order(schema: Any) -> Any:
    """The schema with alternatives in one order: it means nothing, and versions of msgspec differ in it."""
    if isinstance(schema, list):
        return [in_order(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    ordered = {name: in_order(each) for name, each in schema.items()}
    if "anyOf" in ordered:
        ordered["anyOf"] = sorted(ordered["anyOf"], key=json.dumps)
    return ordered
