# SPDX-License-Identifier: Apache-2.0
"""The pytest command: what is understood, what is refused, and what a session is started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_llenergy.ab.command import check_environment, parse_command
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.ab.session import SessionFiles, session_arguments
from pytest_llenergy.errors import PlanError


@pytest.mark.parametrize(
    ("text", "interpreter", "args"),
    [
        ("pytest", (), ()),
        ("/opt/venv/bin/pytest benchmarks -k x", (), ("benchmarks", "-k", "x")),
        ("python -m pytest -n 2", (), ("-n", "2")),
        ("python3.12 -X dev -m pytest -q", ("-X", "dev"), ("-q",)),
    ],
)
def test_what_is_understood(text: str, interpreter: tuple[str, ...], args: tuple[str, ...]) -> None:
    command = parse_command(text.split())
    assert (command.interpreter, command.args, command.gpus) == (interpreter, args, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("python -m unittest", "'python -m unittest' is no pytest command; "),
        ("python pytest", "'python pytest' is no pytest command; "),
        ("tox run", "'tox run' is no pytest command; "),
        (
            "pytest --energy-report",
            "--energy-report cannot be in the pytest command: ab writes the reports; ",
        ),
        ("pytest --energy-report=x.json", "--energy-report cannot be in the pytest command: "),
        ("pytest --energy-rounds 3", "--energy-rounds cannot be in the pytest command: use --pairs and "),
        (
            "pytest --energy-save=main",
            "--energy-save cannot be in the pytest command: use -o FILE.json of ab",
        ),
        (
            "pytest --energy-compare=main",
            "--energy-compare cannot be in the pytest command: ab compares the ",
        ),
        (
            "pytest --energy-fail-on=energy_j:3%",
            "--energy-fail-on cannot be in the pytest command: use --fail-on ",
        ),
        ("pytest --energy-inconclusive=fail", "--energy-inconclusive cannot be in the pytest command: use "),
        ("pytest --lf", "--lf cannot be in the pytest command: every session runs the same tests"),
        ("pytest -x", "-x cannot be in the pytest command: every session runs the same tests"),
        ("pytest --maxfail=2", "--maxfail cannot be in the pytest command: every session runs the same "),
    ],
)
def test_what_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_command(text.split())
    assert str(raised.value).startswith(told)


def test_the_environment_may_not_say_it_either() -> None:
    check_environment({"PYTEST_ADDOPTS": "-q --energy-target=5%"})
    with pytest.raises(PlanError, match=r"^PYTEST_ADDOPTS: --energy-save cannot be"):
        check_environment({"PYTEST_ADDOPTS": "-q --energy-save=x"})


SIDE = Side(
    name="head",
    origin="HEAD",
    short="abc",
    root=Path("/w"),
    directory=Path("/w"),
    python=Path(sys.executable),
    environment={},
    options=("--energy-backend=openvino",),
)
FILES = SessionFiles(Path("/s"), "002-head.1")


def test_a_session_gets_ours_first_so_that_the_user_decides() -> None:
    words = session_arguments(
        SIDE, parse_command(["python", "-Xdev", "-m", "pytest", "-k", "x"]), FILES, 3, []
    )
    assert words[:6] == [sys.executable, "-Xdev", "-m", "pytest", "-p", "llenergy_ab_session"]
    assert words[6:8] == ["--energy-report=/s/002-head.1.json", "--energy-rounds=3"]
    assert words[-3:] == ["-k", "x", "--energy-backend=openvino"]


def test_later_sessions_are_told_the_boards_of_the_first() -> None:
    words = session_arguments(SIDE, parse_command(["pytest"]), FILES, 1, ["GPU-a", "MIG-b"])
    assert "--energy-gpus=GPU-a,MIG-b" in words
    assert parse_command(["pytest", "--energy-gpus=0"]).gpus
