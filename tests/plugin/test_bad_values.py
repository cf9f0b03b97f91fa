# SPDX-License-Identifier: Apache-2.0
"""Any value of any option or ini key, and any file that one names: a run, or one line and exit code 4."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.options.table import OPTIONS

from ..cli.bad_files import WHOLE

#: Values that no option expects.
VALUES = [
    "\x1b[31m\u202e\u2028" + "x" * 5000,
    "a\0b",
    "1000000000000",
    *(
        "-1",
        "nan",
        "1e400",
        "1" * 5000,
        "x" * 5000,
        "\x1b[31m",
        "\u202e",
        "a\x85b",
        "\u2028",
        "%s{0}",
        "..",
        "/",
        "~",
    ),
    *(
        "~nobody-here/x",
        ",",
        ":",
        "=",
        "::",
        "1,,2",
        "/dev/zero",
        "/dev/full",
        "file:///dev/zero",
        "http://",
        "\U000e0041",
    ),
]

#: They change what pytest collects, not whether it is right.
EXPECTED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR)


def _check(result: pytest.RunResult, case: object) -> None:
    assert result.ret in EXPECTED, (case, result.ret)
    text = "\n".join([*result.stdout.lines, *result.stderr.lines])
    assert "Traceback" not in text, (case, text)
    assert "INTERNALERROR" not in text, (case, text)
    if result.ret == pytest.ExitCode.USAGE_ERROR:
        (error,) = [line for line in result.stderr.lines if line.strip()][-1:]
        assert error.startswith("ERROR: "), (case, result.stderr.lines)
        assert error.isprintable(), (case, error)
        assert [line for line in result.stderr.lines if line.strip()] == [error], (case, result.stderr.lines)


@pytest.mark.parametrize("values", [VALUES[:2], pytest.param(VALUES, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_any_value_is_a_run_or_one_line(pytester: pytest.Pytester, name: str, values: list[str]) -> None:
    (option,) = (each for each in OPTIONS if each.name == name)
    pytester.makepyfile("def test_it(): pass")
    for value in values if not option.is_switch else ():
        _check(pytester.runpytest(f"{option.flag}={value}"), (option.flag, value))
    for value in values[1::3]:
        pytester.makeini(f"[pytest]\n{option.ini} = {value}\n")
        _check(pytester.runpytest("-p", "no:cacheprovider"), (option.ini, value))


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**11)


@pytest.mark.parametrize("flag", ["--energy-compare", "--energy-prompts"])
def test_any_content_of_a_file_is_one_line(pytester: pytest.Pytester, flag: str) -> None:
    pytester.makepyfile("def test_it(): pass")
    for name, content in WHOLE.items():
        Path("some.json").write_bytes(content)
        result = pytester.runpytest(f"{flag}=some.json")
        _check(result, name)
        assert flag == "--energy-prompts" or result.ret == pytest.ExitCode.USAGE_ERROR, name


@pytest.mark.parametrize("flag", ["--energy-compare", "--energy-prompts", "--energy-model"])
def test_special_files_are_one_line(pytester: pytest.Pytester, flag: str) -> None:
    pytester.makepyfile("def test_it(backend): pass")
    path = Path("some.json")
    kinds: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path.name),
        "large": lambda: make_sparse(path),
        "directory": path.mkdir,
    }
    for what, make in kinds.items():
        make()
        result = pytester.runpytest(f"{flag}=./some.json")
        _check(result, what)
        assert result.ret == pytest.ExitCode.USAGE_ERROR, (what, result.stdout.lines)
        assert re.search(r"some\.json", result.stderr.str()), what
        path.unlink(missing_ok=True) if not path.is_dir() else None
