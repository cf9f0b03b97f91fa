# SPDX-License-Identifier: Apache-2.0
"""``extra_info``: values of the test in its record, and in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_llenergy.compare.comparability import workload_differences, workload_key
from pytest_llenergy.record.report import json_schema

from ..record.reports import RECORD

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

TEST = """
    import enum, time
    class Size(enum.IntEnum): SMALL = 1
    def test_it(energy, energy_meter):
        energy.extra_info = {"accuracy": 0.75}
        energy(time.sleep, 0.02)
        energy.extra_info["late"] = {"shape": (1, 2), "size": Size.SMALL, "none": None}
        energy_meter.extra_info["text"] = "<b>\\udc80"
        energy.extra_info["energy_j"] = "mine"
"""


def test_values_reach_report_and_page(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(TEST)
    quick.runpytest("--energy-report", "--energy-html").assert_outcomes(passed=1)
    report = read_report()
    jsonschema.validate(report, json_schema())
    (record,) = report["records"]
    assert record["extra_info"] == {
        "accuracy": 0.75,
        "late": {"shape": [1, 2], "size": 1, "none": None},
        "text": "<b>\\udc80",
        "energy_j": "mine",
    }
    page = (quick.path / "energy.html").read_text()
    for shown in ("extra info accuracy", "0.75", "&lt;b&gt;"):
        assert shown in page


#: Values, and why JSON cannot hold them.
WRONG = {
    "object()": "Object of type object is not JSON serializable",
    "pathlib.Path()": "Object of type PosixPath is not JSON serializable",
    "float('nan')": "Out of range float values are not JSON compliant*",
    "{(1, 2): 3}": "keys must be str, int, float, bool or None, not tuple",
    "loop": "Circular reference detected",
    "{1, 2}": "Object of type set is not JSON serializable",
}


def test_other_values_are_refused_in_one_line(quick: pytest.Pytester, read_report: Read) -> None:
    tests = (
        f"""
def test_{number}(energy):
    energy.extra_info.update(good=1, bad={value})
    energy(int)
"""
        for number, value in enumerate(WRONG)
    )
    quick.makepyfile("import pathlib\nloop = []\nloop.append(loop)\n" + "".join(tests))
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(failed=len(WRONG))
    line = "LLEnergyError: extra_info[[]'bad'[]] cannot be stored as JSON: "
    result.stdout.fnmatch_lines([f"{line}{why}" for why in WRONG.values()])
    found = [(record["status"], record["extra_info"]) for record in read_report()["records"]]
    assert found == [("failed", {"good": 1})] * len(WRONG)


def test_failed_test_keeps_what_can_be_kept(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        def test_it(energy):
            energy.extra_info.update(good=1, bad=object())
            energy(int)
            assert 0, "on purpose"
        """
    )
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(failed=1)
    (record,) = read_report()["records"]
    assert (record["reason"], record["extra_info"]) == ("AssertionError: on purpose", {"good": 1})


def test_values_do_not_make_records_incomparable() -> None:
    other = msgspec.structs.replace(RECORD, extra_info={"accuracy": 0.25})
    assert workload_differences(RECORD, other) == []
    assert workload_key(RECORD) == workload_key(other)
