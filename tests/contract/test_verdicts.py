# SPDX-License-Identifier: Apache-2.0
"""Verdicts on made reports, with gates, exit codes and the comment for a pull request."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.nvml_sim import Board, World

from .conftest import GiveBoards, open_project
from .made import BACKEND, BOARD, METER, at, record, write_report
from .project import BOARDS_ALONE, Outcome, Project, too_long
from .test_record import schema

GATE = "--fail-on=energy_j:3%"

NOISY = [80, 120, 95, 112, 88, 109, 101, 93, 117, 84, 106, 98]

#: By name of the test: base and head, and the verdict on joules per token.
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, str]] = {
    "regressed": (at(100), at(110), "regressed"),
    "improved": (at(100), at(90), "improved"),
    "unchanged": (at(100), at(100.2), "unchanged"),
    "noisy": (record(NOISY), record([1.04 * each for each in NOISY]), "inconclusive"),
    "new": (None, at(100, source_digest="n"), "new"),
    "removed": (at(100, source_digest="r"), None, "removed"),
    "failed": (at(100), {"attempt": 1, "status": "failed", "reason": "assert 0"}, "invalid"),
    "few": (at(100), at(110, rounds=3), "invalid"),
    "other_meter": (at(100), at(110, meters=[METER | {"kind": "estimated"}]), "not comparable"),
    "other_backend": (at(100), at(110, backend=BACKEND | {"name": "vllm"}), "not comparable"),
    "other_length": (at(100), at(110, tokens=50), "not comparable"),
    "other_code": (at(100), at(110, source_digest="def"), "not comparable"),
    "other_device": (
        at(100),
        at(110, boards=[BOARD | {"uuid": "GPU-b", "name": "NVIDIA L4"}], devices=["GPU-b"]),
        "not comparable",
    ),
}


@pytest.fixture(scope="module")
def compared(module_project: Project) -> Project:
    """A project with both reports of all cases, and of each case."""
    path = module_project.path
    write_report(path / "base.json", {name: base for name, (base, _, _) in CASES.items() if base})
    write_report(path / "head.json", {name: head for name, (_, head, _) in CASES.items() if head})
    for name, (base, head, _) in CASES.items():
        write_report(path / f"{name}-base.json", {"test_it": base} if base else {"test_o": at(1)})
        write_report(path / f"{name}-head.json", {"test_it": head} if head else {"test_o": at(1)})
    return module_project


@pytest.fixture(scope="module")
def verdicts(compared: Project) -> dict[str, dict[str, Any]]:
    done = compared.llenergy("compare", "base.json", "head.json", "--format=json")
    found = json.loads(done.out)["comparisons"]
    return {each["id"].rpartition("::")[2]: each for each in found}


def test_each_case_has_its_verdict(compared: Project, verdicts: dict[str, dict[str, Any]]) -> None:
    for name in ("base.json", "head.json"):
        jsonschema.validate(compared.report(name), schema("report-1"))
    assert {name: verdicts[name]["verdict"] for name in CASES} == {
        name: verdict for name, (_, _, verdict) in CASES.items()
    }
    assert {each["metric"] for each in verdicts.values()} == {"energy_per_output_token_j"}
    # A ratio is head over base.
    for name, truth in (("regressed", 1.1), ("improved", 0.9), ("unchanged", 1.002)):
        each = verdicts[name]
        assert each["ratio"] == pytest.approx(truth, rel=0.005)
        assert each["low"] <= each["ratio"] <= each["high"]
        assert each["low"] < truth < each["high"]


def test_limits_hold_the_truth_nine_times_in_ten(compared: Project) -> None:
    """Limits of 5 % each, for sessions whose level differs by 1.5 %, as the documentation says."""
    draw = random.Random(0)
    for name, joules in (("sessions-base", 100.0), ("sessions-head", 105.0)):
        levels = {f"test_{number}": joules * draw.gauss(1, 0.015) for number in range(60)}
        records = {
            test: record([level * draw.gauss(1, 0.005) for _ in range(12)]) for test, level in levels.items()
        }
        write_report(compared.path / f"{name}.json", records)
    sides = ["sessions-base.json", "sessions-head.json"]
    done = compared.llenergy("compare", *sides, "--metric=energy_j", "--format=json")
    found = json.loads(done.out)["comparisons"]
    assert len(found) == 60
    assert 50 <= sum(each["low"] <= 1.05 <= each["high"] for each in found) <= 58


def test_what_cannot_be_compared_says_what_differs(verdicts: dict[str, dict[str, Any]]) -> None:
    for name, word in (
        ("other_meter", "estimated"),
        ("other_backend", "vllm"),
        ("other_device", "L4"),
        ("few", "3"),
        ("failed", "failed"),
    ):
        told = json.dumps([verdicts[name][key] for key in ("reason", "differences", "notes")])
        assert word in told, told


#: Exit codes of compare: case, options, exit code.
EXITS: tuple[tuple[str, list[str], int], ...] = (
    ("regressed", [], 1),
    ("regressed", [GATE], 1),
    ("improved", [GATE], 0),
    ("unchanged", [GATE], 0),
    ("noisy", [GATE], 0),
    ("noisy", [GATE, "--inconclusive=fail"], 4),
    ("other_backend", [GATE], 3),
    ("failed", [GATE], 5),
    ("removed", [GATE], 5),
    ("regressed", ["--fail-on=energy_j:20%"], 0),
    ("regressed", ["--fail-on=energy_j:3%+50J"], 0),
    ("regressed", ["--fail-on=energy_j:3%+5J"], 1),
    ("regressed", ["--metric=duration_s"], 0),
    ("other_backend", ["--across", GATE], 1),
)


def test_exit_codes_of_compare(compared: Project) -> None:
    for case, options, ret in EXITS:
        done = compared.llenergy("compare", f"{case}-base.json", f"{case}-head.json", *options)
        assert done.ret == ret, (case, options, done.text)


#: Wrong command lines, and a word of the line about each.
WRONG = (
    (["base.json", "nowhere.json"], "nowhere.json"),
    (["base.json", "watts.py"], "watts.py"),
    (["base.json", "head.json", "--fail-on=energi_j:3%"], "energy_j"),
    (["base.json", "head.json", "--fail-on=energy_j"], "energy_j"),
    (["base.json", "head.json", "--fail-on=energy_j:much"], "much"),
    (["base.json", "head.json", "-o", "base.json"], "base.json"),
)


def test_a_wrong_command_line_is_2_and_one_line(compared: Project) -> None:
    for args, word in WRONG:
        done = compared.llenergy("compare", *args)
        assert done.ret == 2
        *usage, message = done.err.strip().splitlines()
        assert word in message
        assert all(line.startswith(("usage:", " ")) for line in usage), done.err
        assert done.out == ""


def test_the_table_fits_80_columns_and_has_every_verdict(compared: Project) -> None:
    done = compared.llenergy("compare", "base.json", "head.json")
    assert not list(too_long(done.lines))
    for _, _, verdict in CASES.values():
        assert verdict in done.text
    assert "+10" in done.text


def test_the_comment_for_a_pull_request_is_markdown_that_names_cannot_break(compared: Project) -> None:
    done = compared.llenergy("compare", "base.json", "head.json", "--format=markdown")
    assert done.ret == 1
    assert "regressed" in done.out
    assert "test_m.py" in done.out or "regressed" in done.out
    table = [line for line in done.lines if line.startswith("|")]
    assert re.fullmatch(r"\|[\s:|-]+\|", table[1])
    assert len(done.out) < 65_536
    name = "test_<img src=x onerror=alert(1)>|`@someone`](http://x)"
    write_report(compared.path / "x-base.json", {name: at(100)})
    write_report(compared.path / "x-head.json", {name: at(110)})
    done = compared.llenergy("compare", "x-base.json", "x-head.json", "--format=markdown")
    assert done.ret == 1
    assert "<img" not in done.out
    assert not re.search(r"(?<!`)@someone", done.out.replace("\\`", ""))


def test_a_worse_median_of_lower_is_worse_metrics(compared: Project) -> None:
    """Fewer tokens per second are worse, unlike joules."""
    write_report(compared.path / "t-base.json", {"test_it": at(100, tokens=100)})
    slower = at(100)
    for each in slower["rounds"]:
        each["duration_s"] = 2.4
    write_report(compared.path / "t-head.json", {"test_it": slower})
    done = compared.llenergy("compare", "t-base.json", "t-head.json", "--metric=output_tokens_per_s")
    assert done.ret == 1
    assert "regressed" in done.out


def test_the_values_of_a_parameter_are_compared_and_what_else_differs_is_labelled(compared: Project) -> None:
    half = BACKEND | {"dtype": "bfloat16"}
    records = {
        f"test_it[{dtype}-{size}]": at(joules, params={"dtype": dtype, "size": size}, backend=backend)
        for dtype, size, joules, backend in (
            ("float32", 1, 100, BACKEND),
            ("float32", 8, 200, BACKEND),
            ("bfloat16", 1, 80, half),
            ("bfloat16", 8, 260, half),
            ("float32", 64, 1, BACKEND),
        )
    }
    write_report(compared.path / "types.json", records)
    done = compared.llenergy("compare", "types.json", "--between=dtype", "--format=json")
    found = {each["id"].rpartition("::")[2]: each for each in json.loads(done.out)["comparisons"]}
    assert done.ret == 0
    assert {name: (each["verdict"], round(each["ratio"], 2)) for name, each in found.items()} == {
        "test_it[float32 -> bfloat16, size=1]": ("improved", 0.8),
        "test_it[float32 -> bfloat16, size=8]": ("regressed", 1.3),
    }
    for each in found.values():
        assert any("dtype: float32 -> bfloat16" in note for note in each["notes"])
    table = compared.llenergy("compare", "types.json", "--between=dtype=bfloat16", GATE)
    assert table.ret == 1
    assert "dtype: bfloat16 -> float32" in table.out
    assert not list(too_long(table.lines))
    for options, word in ((["--between=dtipe"], "dtype"), (["--between=dtype=int8"], "int8")):
        refused = compared.llenergy("compare", "types.json", *options)
        assert refused.ret == 2
        assert word in refused.err


def test_ids_that_change_in_each_run_are_explained(compared: Project) -> None:
    """As pytest makes them from objects without a name of their own: with an address."""
    for side, start in (("base", "0x7f"), ("head", "0x8a")):
        records = {f"test_it[<Shape object at {start}{n}>]": at(100 + n) for n in range(2)}
        write_report(compared.path / f"ids-{side}.json", records)
    done = compared.llenergy("compare", "ids-base.json", "ids-head.json")
    assert re.search(r"\bids?\b|address", done.text.replace("ids-", ""))


def test_a_stopped_run_is_named(compared: Project) -> None:
    write_report(compared.path / "stopped.json", {"test_it": at(100)}, complete=False)
    done = compared.llenergy("compare", "stopped.json", "unchanged-head.json")
    assert re.search("incomplete|stopped|complete", done.text)


# Gates in pytest: the same rule, on the counter of a simulated board, whose power stands for the code.

GATED = """
import time

def test_gated(energy):
    energy(time.sleep, 0.3)
"""

COMPARE = ("--energy-compare=main", "--energy-fail-on=mean_power_w:5%")

Gated = tuple[Project, World]


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, give_boards: GiveBoards) -> Iterator[Gated]:
    """A project with a baseline of 100 W, named main."""
    with open_project(tmp_path_factory.mktemp("gated")) as project:
        world = give_boards(project, [Board(power_w=100.0, latch_ns=20_000_000)])
        project.write("pytest.ini", BOARDS_ALONE.replace("rounds = 2", "rounds = 6"))
        project.write("main/test_g.py", GATED)
        project.pytest("main", "--energy-save=main").check(passed=1)
        yield project, world


def run_at(gated: Gated, watts: float, *args: str) -> Outcome:
    project, world = gated
    world.set_power(0, watts)
    # The second before is part of averages.
    time.sleep(0.3)
    return project.pytest("main", *args)


def test_a_regression_fails_the_test_and_the_run(gated: Gated) -> None:
    ended = run_at(gated, 300, *COMPARE, "--energy-report").check(failed=1)
    assert ended.ret == 1
    assert "regressed" in ended.text
    (found,) = gated[0].records().values()
    assert (found["status"], found["failed_gate"]) == ("failed", True)
    (comparison,) = (each for each in found["comparisons"] if each["gated"])
    assert comparison["verdict"] == "regressed"
    assert comparison["ratio"] == pytest.approx(3, rel=0.1)
    ended = run_at(gated, 300, *COMPARE, "-q")
    assert ended.ret == 1
    assert "regressed" in ended.text


def test_no_gate_no_change_and_a_saving_fail_nothing(gated: Gated) -> None:
    ended = run_at(gated, 300, "--energy-compare=main").check(passed=1)
    assert ended.ret == 0
    assert "mean_power" in ended.text or "regressed" in ended.text
    for watts in (100, 40):
        assert run_at(gated, watts, *COMPARE).check(passed=1).ret == 0


def test_a_mark_gates_one_test(gated: Gated) -> None:
    project, world = gated
    world.set_power(0, 300)
    mark = "@pytest.mark.energy_gate(metric='mean_power_w', threshold='5%')\n"
    project.write("main/test_g.py", GATED.replace("def", f"import pytest\n{mark}def"))
    try:
        ended = project.pytest("main", "--energy-compare=main")
    finally:
        project.write("main/test_g.py", GATED)
    assert ended.ret == 1


def test_a_gate_that_compares_nothing_is_not_green(gated: Gated) -> None:
    gated[0].write("other/test_o.py", GATED.replace("gated", "another"))
    ended = gated[0].pytest("other", *COMPARE)
    assert ended.ret != 0


def test_a_removed_test_is_named_and_fails_the_run_on_request(gated: Gated) -> None:
    project, _ = gated
    project.write("two/test_g.py", GATED + GATED.replace("gated", "second"))
    project.write("two/test_h.py", GATED.replace("gated", "third_gated"))
    project.pytest("two", "--energy-save=two").check(passed=3)
    options = ["-k", "gated", "--energy-compare=two", "--energy-fail-on=mean_power_w:50%"]
    removed = project.pytest("two", *options)
    assert removed.ret == 0
    assert "test_second" in removed.text
    assert project.pytest("two", *options, "--energy-inconclusive=fail").ret == 1


@pytest.mark.slow
def test_a_skipped_test_of_the_baseline_fails_the_run(gated: Gated) -> None:
    project, _ = gated
    project.write("three/test_g.py", GATED + GATED.replace("gated", "second"))
    project.write("three/test_h.py", GATED.replace("gated", "third_gated"))
    project.pytest("three", "--energy-save=three").check(passed=3)
    options = ["--energy-compare=three", "--energy-fail-on=mean_power_w:50%"]
    skipped = GATED.replace("gated", "second").replace("def", "import pytest\n@pytest.mark.skip\ndef")
    project.write("three/test_g.py", GATED + skipped)
    assert project.pytest("three", *options).ret == 1
    # A file may skip itself.
    project.write("three/test_g.py", GATED + GATED.replace("gated", "second"))
    absent = "import pytest\npytest.importorskip('no_such_library')\n"
    project.write("three/test_h.py", absent + GATED.replace("gated", "third_gated"))
    ended = project.pytest("three", *options)
    assert ended.ret == 1
    assert "test_third_gated (its file was skipped)" in ended.text


def test_a_budget_of_a_mark(gated: Gated) -> None:
    for budget, ret in (("1 kJ", 0), ("1 mJ", 1)):
        mark = f"import pytest\n@pytest.mark.energy_gate(budget='{budget}')\n"
        gated[0].write("budget/test_b.py", GATED.replace("def", f"{mark}def"))
        ended = gated[0].pytest("budget", "--energy-rounds=2")
        assert ended.ret == ret
        assert ("1 mJ" in ended.text) == bool(ret)


def test_a_wrong_gate_ends_the_run_before_anything_is_measured(gated: Gated) -> None:
    for options in (
        ["--energy-fail-on=energy_j:3%"],
        ["--energy-compare=nowhere.json"],
        ["--energy-compare=main", "--energy-fail-on=energi_j:3%"],
    ):
        ended = gated[0].pytest("main", *options)
        assert ended.ret == pytest.ExitCode.USAGE_ERROR
        assert "passed" not in ended.out
        assert len([line for line in ended.err.splitlines() if line.startswith("ERROR")]) == 1


def test_a_saved_report_keeps_tests_until_they_are_gone(project: Project) -> None:
    second = GATED.replace("gated", "second")
    project.write("test_s.py", GATED + second)
    for options, passed in (([], 2), (["-k", "gated"], 1)):
        project.pytest("--energy-save=main", project.meter(), *options).check(passed=passed)
        assert sorted(project.records(".llenergy/main.json")) == ["test_gated", "test_second"]
    assert list(project.records(".llenergy/main.partial.json")) == ["test_gated"]
    project.write("test_s.py", GATED)
    project.pytest("--energy-save=main", project.meter()).check(passed=1)
    assert list(project.records(".llenergy/main.json")) == ["test_gated"]
