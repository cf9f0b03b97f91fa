# SPDX-License-Identifier: Apache-2.0
"""The pytest command: parsing, refused options, and the command line of a session."""

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
def test_pytest_command_is_parsed(text: str, interpreter: tuple[str, ...], args: tuple[str, ...]) -> None:
    command = parse_command(text.split())
    assert (command.interpreter, command.args, command.gpus) == (interpreter, args, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python -m unittest", "'python -m unittest' is not a pytest command; "),
        ("python pytest", "'python pytest' is not a pytest command; "),
        ("tox run", "'tox run' is not a pytest command; "),
        (
            "pytest --energy-report",
            "--energy-report is not allowed in the pytest command: ab writes the reports; ",
        ),
        ("pytest --energy-report=x.json", "--energy-report is not allowed in the pytest command: "),
        (
            "pytest --energy-rounds 3",
            "--energy-rounds is not allowed in the pytest command: ",
        ),
        (
            "pytest --energy-save=main",
            "--energy-save is not allowed in the pytest command: use -o FILE.json of ab",
        ),
        (
            "pytest --energy-compare=main",
            "--energy-compare is not allowed in the pytest command: ab compares the ",
        ),
        (
            "pytest --energy-fail-on=energy_j:3%",
            "--energy-fail-on is not allowed in the pytest command: use --fail-on ",
        ),
        (
            "pytest --energy-inconclusive=fail",
            "--energy-inconclusive is not allowed in the pytest command: ",
        ),
        ("pytest --lf", "--lf is not allowed in the pytest command: every session must run the same tests"),
        ("pytest -x", "-x is not allowed in the pytest command: every session must run the same tests"),
        (
            "pytest --maxfail=2",
            "--maxfail is not allowed in the pytest command: every session must run ",
        ),
    ],
)
def test_unsuitable_command_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_command(text.split())
    assert str(raised.value).startswith(message)


def test_unsuitable_options_in_the_environment_are_refused() -> None:
    check_environment({"PYTEST_ADDOPTS": "-q --energy-target=5%"})
    with pytest.raises(PlanError, match=r"^PYTEST_ADDOPTS: --energy-save is not allowed"):
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


def test_options_of_the_user_come_last_and_win() -> None:
    words = session_arguments(
        SIDE, parse_command(["python", "-Xdev", "-m", "pytest", "-k", "x"]), FILES, 3, []
    )
    assert words[:6] == [sys.executable, "-Xdev", "-m", "pytest", "-p", "llenergy_ab_session"]
    assert words[6:8] == ["--energy-report=/s/002-head.1.json", "--energy-rounds=3"]
    assert words[-3:] == ["-k", "x", "--energy-backend=openvino"]


def test_later_sessions_use_the_gpus_of_the_first() -> None:
    words = session_arguments(SIDE, parse_command(["pytest"]), FILES, 1, ["GPU-a", "MIG-b"])
    assert "--energy-gpus=GPU-a,MIG-b" in words
    assert parse_command(["pytest", "--energy-gpus=0"]).gpus
