# SPDX-License-Identifier: Apache-2.0
"""Any value of any option or ini key, and any file that one names: a run, or one line and exit code 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.options.table import OPTIONS, Option

from ..cli.damages import DAMAGES, restore

#: Values that no option expects.
VALUES = ("\x1b[31m\u202e\u2028" + "x" * 5000, "-1")

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


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_any_value_is_a_run_or_one_line(pytester: pytest.Pytester, option: Option) -> None:
    pytester.makepyfile("def test_it(): pass")
    for value in VALUES if not option.is_switch else ():
        _check(pytester.runpytest(f"{option.flag}={value}"), (option.flag, value))
    pytester.makeini(f"[pytest]\n{option.ini} = {VALUES[1]}\n")
    _check(pytester.runpytest("-p", "no:cacheprovider"), (option.ini, VALUES[1]))


@pytest.mark.parametrize("flag", ["--energy-compare", "--energy-prompts"])
def test_any_damage_of_a_file_is_one_line(pytester: pytest.Pytester, flag: str) -> None:
    pytester.makepyfile("def test_it(): pass")
    path = Path("some.json")
    for damage, make in DAMAGES.items():
        path.write_bytes(b"")
        make(path, b"{}\n")
        result = pytester.runpytest(f"{flag}=./some.json")
        _check(result, damage)
        assert flag == "--energy-prompts" or result.ret == pytest.ExitCode.USAGE_ERROR, damage
        restore(path, b"")
