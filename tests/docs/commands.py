# SPDX-License-Identifier: Apache-2.0
"""Check whether a program would accept a command, with the program's own parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pytest_llenergy.cli import build_parser, main
from pytest_llenergy.compare.gate import USAGE
from pytest_llenergy.compare.stages import parse_pairs
from pytest_llenergy.plugin.settings import settings_of

from .config import read_toml
from .pages import ROOT
from .shell import commands

#: Third-party programs whose arguments are not checked.
OTHERS = {"docker", "git", "mkdir", "pre-commit", "python", "sudo", "tee", "echo"}

#: Commands of ``llenergy`` that only read and write files.
FILES_ONLY = {"compare", "export", "history", "merge", "report"}

#: Options of pip that take a value.
OF_PIP = {"-c": "constraints", "-e": "requirement", "-r": "requirements", "--index-url": "address"}

#: The path of a checkout of this project.
CHECKOUT = re.compile(r"^(\.|/path/to/checkout)(?=\[|$)")


def try_command(words: Sequence[str], pytester: pytest.Pytester) -> None:
    """Check a command, or run it if it only reads and writes files. Raises ``AssertionError``."""
    program, arguments = Path(words[0]).name, list(words[1:])
    if program in ("python", "python3") and arguments[:1] == ["-m"]:
        program, arguments = arguments[1], arguments[2:]
    # A script or an interpreter of the user's own.
    if program in OTHERS or words[0].endswith(f"/{program}"):
        return
    assert program in CHECKS, f"{program}: unknown program; add it to OTHERS, or say why the block is not run"
    CHECKS[program](arguments, pytester)


def _pytest(arguments: list[str], pytester: pytest.Pytester) -> None:
    try:
        config = pytester.parseconfigure(*arguments)
    except pytest.UsageError as error:
        raise AssertionError(f"pytest {' '.join(arguments)}: {error}") from None
    for path in config.option.file_or_dir:
        name = path.partition("::")[0]
        found = [place for place in (pytester.path, ROOT) if (place / name).exists()]
        assert found, f"pytest {' '.join(arguments)}: there is no {name}, on this page or in the repository"
    if config.option.keyword and all((pytester.path / path).exists() for path in config.option.file_or_dir):
        result = pytester.runpytest_inprocess(*arguments, "--collect-only", "-q")
        assert result.ret != pytest.ExitCode.NO_TESTS_COLLECTED, (
            f"pytest {' '.join(arguments)}: -k selects none"
        )
    report = settings_of(config).report
    if report is not None:
        _write_stand_in("energy.json", report, pytester)


def _llenergy(arguments: list[str], pytester: pytest.Pytester) -> None:
    command_line = f"llenergy {' '.join(arguments)}"
    try:
        parsed = build_parser().parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"{command_line}: ends with {error.code}") from None
    if arguments[0] == "ab":
        parse_pairs(parsed.pairs)
        for words in commands(parsed.setup, pytester.path) if parsed.setup else ():
            try_command(words, pytester)
        command = [word for word in parsed.command if word != "--"]
        sides = [shlex.split(getattr(parsed, side) or "") for side in ("a", "b")]
        assert command or all(sides), f"{command_line}: names no command"
        for options in sides:
            try_command([*command, *options], pytester)
        _write_stand_in(".llenergy/ab/ab.json", parsed.output or ".llenergy/ab/ab.json", pytester)
    if arguments[0] in FILES_ONLY:
        assert main(arguments) != USAGE, command_line


def _write_stand_in(like: str, path: str | Path, pytester: pytest.Pytester) -> None:
    """Write the file that the command would have written, for later blocks."""
    text = (pytester.path / like).read_bytes()
    (pytester.path / path).write_bytes(text)


def _tox(arguments: list[str], pytester: pytest.Pytester) -> None:
    assert arguments[:1] in (["run"], ["list"]), arguments
    known = re.findall(r"^\[testenv:(.+)\]$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    names = {name for text in known for name in _expand(text)}
    named = [name for word in arguments[1:] if not word.startswith("-") for name in word.split(",")]
    assert set(named) <= names, f"tox has no {', '.join(sorted(set(named) - names))}"


def _expand(text: str) -> list[str]:
    """Expand ``base{,-py310}`` to ``base`` and ``base-py310``."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
    return [f"{found[1]}{each}{found[3]}" for each in found[2].split(",")] if found else [text]


def _pip(arguments: list[str], pytester: pytest.Pytester) -> None:
    project = read_toml((ROOT / "pyproject.toml").read_text())["project"]
    words = iter(arguments[1:])
    for word in words:
        if word in OF_PIP:
            value = next(words)
            if OF_PIP[word] == "address":
                continue
            if OF_PIP[word] != "requirement":
                assert (ROOT / value).is_file(), f"there is no {value}"
                continue
            word = value
        if word.startswith("-"):
            continue
        wanted = Requirement(CHECKOUT.sub(project["name"], word))
        if wanted.name == project["name"]:
            unknown = wanted.extras - set(project["optional-dependencies"])
            assert not unknown, f"{word}: there is no extra {', '.join(sorted(unknown))}"


CHECKS: dict[str, Callable[[list[str], pytest.Pytester], None]] = {
    "pytest": _pytest,
    "llenergy": _llenergy,
    "tox": _tox,
    "pip": _pip,
}
