# SPDX-License-Identifier: Apache-2.0
"""Comparisons as JUnit XML: one test case a comparison."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

from pytest_llenergy.model.comparison import ComparedReports, Comparison, State

#: What cannot stand in XML 1.0, not even as a reference (https://www.w3.org/TR/xml/#charsets).
ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: What a verdict is for a test case; of what is not here it is a pass.
OUTCOMES: dict[State, str] = {
    "regressed": "failure",
    "not comparable": "error",
    "invalid": "error",
    "inconclusive": "skipped",
    "new": "skipped",
    "removed": "skipped",
}


def junit_xml(compared: ComparedReports) -> str:
    """The document. What nobody has asked to be gated, and could not be judged, is skipped."""
    outcomes = [_outcome(each) for each in compared.comparisons]
    counts = Counter(outcomes)
    numbers = {
        "tests": str(len(outcomes)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
    }
    root = ElementTree.Element("testsuites", {"name": "llenergy", **numbers})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "llenergy", **numbers})
    for comparison, outcome in zip(compared.comparisons, outcomes, strict=True):
        _case(suite, comparison, outcome)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _outcome(comparison: Comparison) -> str:
    outcome = OUTCOMES.get(comparison.verdict, "passed")
    return "skipped" if outcome == "error" and not comparison.gated else outcome


def _case(suite: ElementTree.Element, comparison: Comparison, outcome: str) -> None:
    path, bracket, params = comparison.id.partition("[")
    file, *classes, function = path.split("::") if "::" in path else ("", path)
    classname = ".".join([file.removesuffix(".py").replace("/", "."), *classes])
    name = f"{function}{bracket}{params} {comparison.metric}"
    case = ElementTree.SubElement(suite, "testcase", {"classname": _legal(classname), "name": _legal(name)})
    properties = ElementTree.SubElement(case, "properties")
    for key, told in _facts(comparison).items():
        ElementTree.SubElement(properties, "property", {"name": f"llenergy.{key}", "value": _legal(told)})
    if outcome != "passed":
        about = {"message": _legal(f"{comparison.metric} {comparison.verdict}: {comparison.reason}")}
        if outcome != "skipped":
            about["type"] = f"llenergy.{comparison.verdict.replace(' ', '_')}"
        ElementTree.SubElement(case, outcome, about).text = _legal("\n".join(comparison.notes)) or None


def _facts(comparison: Comparison) -> dict[str, str]:
    """What is known of it, unrounded; what is not is absent."""
    facts = {
        "metric": comparison.metric,
        "verdict": comparison.verdict,
        "unit": comparison.unit,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "base": comparison.base,
        "head": comparison.head,
        "noise": comparison.noise,
        "kind": comparison.kind,
    }
    return {name: str(fact) for name, fact in facts.items() if fact is not None}


def _legal(text: str) -> str:
    return ILLEGAL.sub(lambda found: f"#x{ord(found.group()):02X}", text)
