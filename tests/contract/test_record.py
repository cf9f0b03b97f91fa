# SPDX-License-Identifier: Apache-2.0
"""The JSON report: its published schema, units, reasons, and what is estimated."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from .project import Project

SUITE = """
import time
import pytest

@pytest.mark.parametrize("size, name", [(8, "ünïcode"), (16, None)])
def test_measured(energy, size, name):
    energy(time.sleep, 0.3)

def test_window(energy_meter):
    with energy_meter("load"):
        time.sleep(0.3)

def test_fails(energy):
    assert energy(time.sleep, 0.1).energy_j < 0, "too much"

def test_skips(energy):
    pytest.skip("not today")

@pytest.mark.xfail(reason="known")
def test_expected(energy):
    energy(time.sleep, 0.05)
    assert False

def test_unmeasured():
    pass
"""

ESTIMATED = """
def test_busy(energy):
    energy(lambda: sum(range(2_000_000)))
"""


def schema(name: str) -> dict[str, Any]:
    """Return a schema that is published in the package, wherever it is there."""
    spec = importlib.util.find_spec("pytest_llenergy")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (found,) = Path(spec.submodule_search_locations[0]).rglob(f"{name}.json")
    loaded: dict[str, Any] = json.loads(found.read_text())
    return loaded


@pytest.fixture(scope="module")
def ran(module_project: Project) -> Project:
    """A project with a report of a measured run, and another of an estimated one."""
    module_project.write("test_some.py", SUITE)
    module_project.write("estimated/test_busy.py", ESTIMATED)
    run = module_project.pytest("test_some.py", "--energy-report", module_project.meter())
    run.check(passed=4, failed=1, skipped=1, xfailed=1)
    estimated = ["--energy-report=estimated.json", "--energy-meter=estimate"]
    module_project.pytest("estimated", *estimated).check(passed=1)
    return module_project


def test_the_report_follows_the_published_schema(ran: Project) -> None:
    published = schema("report-1")
    jsonschema.Draft202012Validator.check_schema(published)
    for name in ("energy.json", "estimated.json"):
        jsonschema.validate(ran.report(name), published)
    report = ran.report()
    del report["records"][0]["status"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, published)


def test_the_run_is_described(ran: Project) -> None:
    report = ran.report()
    assert report["schema_version"] == 1
    assert report["tool"]["name"] == "pytest-llenergy"
    assert (report["run"]["complete"], report["run"]["exit_status"]) == (True, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*Z", report["run"]["started_at"])
    assert report["environment"]["host"]["logical_cpus"] >= 1
    assert "pytest" in report["environment"]["packages"]
    assert not list(ran.path.glob("*.journal.jsonl"))


def test_every_test_that_measures_has_a_record_and_a_failure_says_why(ran: Project) -> None:
    found = {name: record["status"] for name, record in ran.records().items()}
    sized = [name for name in found if name.startswith("test_measured[")]
    assert len(sized) == 2
    assert all(found.pop(name) == "measured" for name in sized)
    expected = found.pop("test_expected")
    assert expected in ("failed", "measured", "invalid")
    assert found == {"test_window": "measured", "test_fails": "failed", "test_skips": "skipped"}
    records = ran.records()
    # Parameters are values, not texts.
    params = [record["params"] for name, record in records.items() if "measured" in name]
    assert params == [{"size": 8, "name": "ünïcode"}, {"size": 16, "name": None}]
    assert "too much" in records["test_fails"]["reason"]
    assert "not today" in records["test_skips"]["reason"]


def test_energy_is_power_times_time_with_an_uncertainty(ran: Project) -> None:
    """The meter shows ten watts all the time."""
    for name, record in ran.records().items():
        for part in (*record["rounds"], *record["windows"]):
            if part["energy_j"] is not None:
                assert part["energy_j"] == pytest.approx(10 * part["duration_s"], abs=4 * part["energy_u_j"])
                assert 0 < part["energy_u_j"] <= part["energy_u_absolute_j"]
                parts = [each["energy_j"] for each in part["by_domain"].values()]
                assert sum(parts) == pytest.approx(part["energy_j"])
        if name.startswith("test_measured"):
            metrics = record["metrics"]
            u = metrics["energy_j"]["uncertainty"] + metrics["energy_j"]["uncertainty_absolute"]
            assert metrics["energy_j"]["value"] == pytest.approx(3.0, abs=4 * u + 0.5)
            assert metrics["mean_power_w"]["value"] == pytest.approx(10, rel=0.3)
            assert metrics["duration_s"]["value"] == pytest.approx(0.3, abs=0.1)


def test_a_value_has_a_unit_and_a_missing_one_is_null_with_a_reason(ran: Project) -> None:
    units = {"_j": "J", "_w": "W", "_s": "s", "_js": "J s", "_bytes": "B", "token_j": "J/token"}
    missing = 0
    for record in ran.records().values():
        for name, metric in record["metrics"].items():
            assert metric["unit"], name
            ending = name[name.rindex("_") :]
            if "_per_" not in name and ending in units:
                assert metric["unit"].replace("·", " ") in (units[ending], "bytes"), name
            if metric["value"] is None:
                missing += 1
                assert metric["reason"], name
                assert metric["uncertainty"] is None
            else:
                assert metric["value"] > 0 or "net" in name
    assert missing > 0
    assert "NaN" not in ran.text("energy.json")
    per_token = ran.records()["test_measured[8-\\xfcn\\xefcode]"]["metrics"]["energy_per_output_token_j"]
    assert per_token["unit"] == "J/token"


def test_measured_and_estimated_are_told_apart(ran: Project) -> None:
    measured = ran.records()["test_measured[16-None]"]
    assert {meter["kind"] for meter in measured["meters"]} == {"measured"}
    (estimated,) = ran.records("estimated.json").values()
    assert {meter["kind"] for meter in estimated["meters"]} == {"estimated"}
    for part in estimated["rounds"]:
        assert {each["kind"] for each in part["by_domain"].values()} == {"estimated"}
    energy = estimated["metrics"]["energy_j"]
    # The coefficients differ by processor family: half of the value or more.
    assert energy["uncertainty_absolute"] > 0.4 * energy["value"]
    assert "estimated" in ran.llenergy("report", "estimated.json").out
    assert "estimated" in ran.llenergy("report", "estimated.json", "--format=markdown").out
    assert "estimated" not in ran.llenergy("report", "energy.json").out
    refused = ran.pytest("estimated", "--energy-meter=estimate", "--energy-require=measured")
    assert refused.ret != 0
    assert "measure" in refused.text
    assert "1 passed" not in refused.out


def test_the_reason_of_a_failure_is_of_a_readable_length(ran: Project) -> None:
    source = "def test_it(energy):\n    energy(sum, [1])\n    assert 0, 'y' * 3_000_000\n"
    ran.write("long/test_long.py", source)
    ran.pytest("long", "--energy-report=long.json", "--tb=no", ran.meter()).check(failed=1)
    assert "yyy" in ran.records("long.json")["test_it"]["reason"]
    assert (ran.path / "long.json").stat().st_size < 500_000


def test_a_newer_or_damaged_report_is_refused_in_one_line(ran: Project) -> None:
    newer = ran.report() | {"schema_version": 99}
    ran.write("newer.json", json.dumps(newer))
    ran.write("cut.json", ran.text("energy.json")[:500])
    ran.write("empty.json", "")
    for name in ("newer.json", "cut.json", "empty.json", "missing.json"):
        refused = ran.llenergy("report", name)
        assert refused.ret == 2
        assert len(refused.err.strip().splitlines()) == 1, refused.err
        assert name in refused.err


def test_exports_have_the_energy_of_each_measured_test(ran: Project) -> None:
    value = ran.records()["test_measured[16-None]"]["metrics"]["energy_j"]["value"]
    exported = ran.llenergy("export", "energy.json")
    assert exported.ret == 0
    rows = list(csv.DictReader(io.StringIO(exported.out)))
    (energy,) = (
        row for row in rows if row["id"].endswith("test_measured[16-None]") and row["metric"] == "energy_j"
    )
    assert float(energy["value"]) == pytest.approx(value, rel=1e-3)
    assert [row["value"] for row in rows if row["id"].endswith("test_skips")] == [""]


def test_files_of_ci_have_the_figures_and_no_password(ran: Project) -> None:
    env = {"GITHUB_STEP_SUMMARY": str(ran.path / "summary.md"), "GITHUB_ACTIONS": "true"}
    env["HF_TOKEN"] = "hunter2-secret"
    options = ["test_some.py", "-k", "16", "--energy-report=ci.json", "--junitxml=ci.xml", ran.meter()]
    ran.pytest(*options, **env).check(passed=1)
    value = ran.records("ci.json")["test_measured[16-None]"]["metrics"]["energy_j"]["value"]
    properties = {
        each.get("name"): each.get("value")
        for each in ElementTree.parse(ran.path / "ci.xml").iter("property")
    }
    assert float(str(properties["llenergy.energy_j"])) == pytest.approx(value, rel=1e-3)
    assert properties["llenergy.kind"] == "measured"
    assert "test_measured" in ran.text("summary.md")
    assert not any("hunter2" in ran.text(name) for name in ("ci.json", "ci.xml", "summary.md"))


def test_parts_of_a_run_are_merged_once_each(ran: Project) -> None:
    for part in ("measured", "window"):
        ran.pytest("test_some.py", "-k", part, f"--energy-report={part}.json", ran.meter())
    merged = ran.llenergy("merge", "measured.json", "window.json", "measured.json", "-o", "all.json")
    assert merged.ret == 0, merged.err
    jsonschema.validate(ran.report("all.json"), schema("report-1"))
    assert len(ran.report("all.json")["records"]) == 3
