# SPDX-License-Identifier: Apache-2.0
"""Verdicts on what pytest-benchmark writes: its own JSON, and made files whose medians are known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from .project import Project


def write_session(
    path: Path, seconds: dict[str, list[float]], *, data: bool = True, cpu: str = "AMD EPYC"
) -> Path:
    """Write the JSON of a session, with the rounds of each test."""
    benchmarks = []
    for name, rounds in seconds.items():
        middle = sorted(rounds)[len(rounds) // 2]
        stats: dict[str, Any] = {"median": middle, "mean": middle, "rounds": len(rounds), "iterations": 1}
        stats |= {"data": rounds} if data else {}
        benchmarks.append({"name": name, "fullname": f"test_p.py::{name}", "params": None, "stats": stats})
    content = {
        "machine_info": {"node": "ci", "machine": "x86_64", "cpu": {"brand_raw": cpu, "count": 2}},
        "commit_info": {"id": "a" * 40, "branch": "main", "dirty": False},
        "benchmarks": benchmarks,
        "datetime": "2026-01-02T03:04:05+00:00",
        "version": "5.1.0",
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_sessions(folder: Path, seconds: float, count: int, seed: int, spread: float = 0.01) -> None:
    """Write sessions whose levels differ; the rounds of one scatter by only 0.1 %."""
    draw = random.Random(seed)
    for number in range(count):
        level = seconds * draw.gauss(1, spread)
        rounds = {"test_p": [level * draw.gauss(1, 0.001) for _ in range(40)]}
        write_session(folder / f"{number}.json", rounds, data=number % 2 > 0)


def verdict(project: Project, *args: str) -> tuple[int, dict[str, Any]]:
    done = project.llenergy("compare", *args, "--format=json")
    (found,) = json.loads(done.out)["comparisons"]
    return done.ret, found


@pytest.fixture
def sides(project: Project) -> Project:
    """A project with a single session of two sides, of which the head takes 10 % longer."""
    draw = random.Random(1)
    for name, seconds in (("base", 0.1), ("head", 0.11)):
        rounds = {"test_p": [seconds * draw.gauss(1, 0.002) for _ in range(2000)]}
        write_session(project.path / f"{name}.json", rounds)
        write_session(project.path / f"{name}-no-data.json", rounds, data=False)
    return project


def test_one_session_a_side_is_at_most_inconclusive(sides: Project) -> None:
    ret, found = verdict(sides, "base.json", "head.json")
    assert (ret, found["verdict"], found["metric"], found["unit"]) == (0, "inconclusive", "duration_s", "s")
    assert found["ratio"] == pytest.approx(1.1, rel=0.002)
    assert "session" in found["reason"]
    told = sides.llenergy("compare", "base.json", "head.json", "--inconclusive=warn")
    assert "folders with several sessions" in told.err
    # A floor says how much sessions differ.
    assert verdict(sides, "base.json", "head.json", "--floor=2%")[1]["verdict"] == "regressed"
    assert verdict(sides, "base.json", "head.json", "--floor=20%")[1]["verdict"] == "unchanged"
    # Without data it says so.
    ret, found = verdict(sides, "base-no-data.json", "head-no-data.json", "--floor=2%")
    assert (ret, found["verdict"]) == (0, "inconclusive")
    assert "--benchmark-save-data" in found["reason"]
    assert found["ratio"] == pytest.approx(1.1, rel=0.002)


def test_what_sessions_differed_by_decides(sides: Project) -> None:
    """Sessions in the history that differ by 0.5 % decide on 10 %."""
    draw = random.Random(2)
    names = [f"h{number}.json" for number in range(10)]
    for day, name in enumerate(names, 10):
        level = 0.1 * draw.gauss(1, 0.005)
        path = write_session(sides.path / name, {"test_p": [level * draw.gauss(1, 1e-3) for _ in range(9)]})
        path.write_text(path.read_text().replace("01-02T", f"01-{day}T"))
    assert sides.llenergy("history", "add", *names).ret == 0
    shown = sides.llenergy("history", "show")
    assert "duration_s" in shown.out
    ret, found = verdict(sides, "base.json", "head.json")
    assert (ret, found["verdict"]) == (1, "regressed")
    assert 0.002 < found["session_spread"] < 0.01


def test_sessions_are_what_is_compared(project: Project) -> None:
    """Rounds scatter by a tenth of what sessions differ by, which a comparison of rounds would miss."""
    for name, seconds, seed in (("base", 0.1, 1), ("same", 0.1, 2), ("worse", 0.11, 3), ("better", 0.09, 4)):
        write_sessions(project.path / name, seconds, 10, seed)
    for head, code, expected in (
        ("same", 0, "unchanged"),
        ("worse", 1, "regressed"),
        ("better", 0, "improved"),
    ):
        ret, found = verdict(project, "base", head)
        assert (ret, found["verdict"]) == (code, expected), found
        assert (found["n_base"], found["n_head"]) == (10, 10)
    assert found["low"] < 0.9 < found["high"]
    comment = project.llenergy("compare", "base", "worse", "--format=markdown")
    assert comment.ret == 1
    assert "### ❌ Time: fail, 1 of 1 test regressed" in comment.out
    project.llenergy("compare", "base", "worse", "--format=json", "--output=time.json")
    posted = project.llenergy("comment", "time.json", "--dry-run")
    assert posted.ret == 0, posted.err
    assert comment.out.splitlines()[1:] == posted.out.splitlines()[1:]
    # Few sessions and other machines are named.
    write_sessions(project.path / "few", 0.1, 3, 1)
    write_sessions(project.path / "head", 0.11, 3, 2)
    ret, found = verdict(project, "few", "head")
    assert (ret, found["verdict"]) == (0, "inconclusive")
    assert "3 base and 3 head sessions" in found["reason"]
    write_session(project.path / "other.json", {"test_p": [0.1] * 5}, cpu="Intel")
    ret, found = verdict(project, str(project.path / "few" / "1.json"), "other.json")
    assert (ret, found["verdict"]) == (3, "not comparable")
    write_session(project.path / "head" / "9.json", {"test_p": [0.1] * 5}, cpu="Intel")
    # A session that counts twice.
    write_sessions(project.path / "twice", 0.1, 3, 6)
    (project.path / "twice" / "9.json").write_bytes((project.path / "twice" / "1.json").read_bytes())
    # A session that a script has left in the folder of the other side.
    write_sessions(project.path / "left", 0.1, 3, 5)
    (project.path / "left" / "9.json").write_bytes((project.path / "few" / "1.json").read_bytes())
    for args in (["few", "head"], ["few", "other.json"], ["few", "left"], ["few", "twice"]):
        refused = project.llenergy("compare", *args)
        assert refused.ret == 2
        assert len(refused.err.splitlines()) == 1


def test_what_pytest_benchmark_itself_writes(project: Project) -> None:
    pytest.importorskip("pytest_benchmark")
    # The text of a function in the JSON has its address, which differs in each run.
    project.write(
        "test_w.py",
        "import pytest\n@pytest.mark.parametrize('function', [lambda each: sum(each)])\n"
        "def test_w(benchmark, function):\n    benchmark(function, range(100))\n",
    )
    for name in ("one", "two"):
        options = [
            "-p",
            "pytest_benchmark.plugin",
            "--benchmark-max-time=0.02",
            f"--benchmark-json={name}.json",
        ]
        project.pytest("test_w.py", *options).check(passed=1)
    _, found = verdict(project, "one.json", "two.json")
    assert found["verdict"] == "inconclusive"
    assert 0.2 < found["ratio"] < 5
    report = project.llenergy("report", "one.json")
    assert report.ret == 0
    assert "test_w" in report.out
