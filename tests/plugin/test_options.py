# SPDX-License-Identifier: Apache-2.0
"""Options: command line over ini file over default, and one line for an invalid value."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_llenergy.backends.registry import BUILTIN
from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.table import OPTIONS, option_row
from pytest_llenergy.plugin.settings import read_settings

BACKENDS = ", ".join(spec.name for spec in BUILTIN)

MEASURED = "def test_it(energy):\n    energy(lambda: sum(range(10**6)))\n"


def usage_error(pytester: pytest.Pytester, *args: str) -> str:
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.stderr.lines if line.startswith("ERROR: ")]
    assert len(errors) == 1, result.stderr.lines
    return errors[0].removeprefix("ERROR: ")


def test_ini_key_has_the_default_and_the_command_line_none(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    assert {option.name: config.getoption(option.ini) for option in OPTIONS} == dict.fromkeys(
        option.name for option in OPTIONS
    )
    assert {option.name: config.getini(option.ini) for option in OPTIONS} == {
        option.name: option.default or "" for option in OPTIONS
    }


def test_blank_gpus_in_an_ini_file_are_unset(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini("[pytest]\nenergy_gpus =  \n")
    assert read_settings(pytester.parseconfig()).gpus is None
    assert read_settings(pytester.parseconfig("--energy-gpus= all ")).gpus == "all"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--energy-rounds=0"], '--energy-rounds=0: needs a whole number from 1 to 1000000, or "auto"'),
        (["--energy-rounds=six"], '--energy-rounds=six: needs a whole number from 1 to 1000000, or "auto"'),
        (["--energy-rounds=²"], '--energy-rounds=²: needs a whole number from 1 to 1000000, or "auto"'),
        (
            ["--energy-rounds=1000001"],
            '--energy-rounds=1000001: needs a whole number from 1 to 1000000, or "auto"',
        ),
        (["--energy-report="], "--energy-report= has no value; add one, or leave the option out"),
        (["--energy-gpus="], "--energy-gpus= has no value; add one, or leave the option out"),
        (["--energy-gpus= "], "--energy-gpus= has no value; add one, or leave the option out"),
        (["--energy-backend=,"], "--energy-backend=,: no name given"),
        (["--energy-warmup=some"], '--energy-warmup=some: needs a whole number from 0 to 1000000, or "auto"'),
        (["--energy-target=0"], "--energy-target=0: needs a share between 0 and 1, such as 2% or 0.02"),
        (["--energy-target=2%%"], "--energy-target=2%%: needs a share between 0 and 1, such as 2% or 0.02"),
        (["--energy-budget=0"], "--energy-budget=0: needs a number of seconds above 0"),
        (["--energy-budget=nan"], "--energy-budget=nan: needs a number of seconds above 0"),
        (["--energy-busy=run"], "--energy-busy=run: must be fail or skip"),
        (["--energy-lease-timeout=0"], "--energy-lease-timeout=0: needs a number of seconds above 0"),
        (["--energy-columns=,"], "--energy-columns=,: no name given"),
        (["--energy-require=all"], "--energy-require=all: must be measured"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_value_is_a_usage_error(pytester: pytest.Pytester, args: list[str], message: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        read_settings(pytester.parseconfig(*args))
    assert str(refused.value) == message


def test_unknown_names_are_usage_errors(pytester: pytest.Pytester) -> None:
    known = "known: auto, nvml, rapl, estimate, amd, hwmon, command"
    assert usage_error(pytester, "--energy-meter=nvlm") == f"--energy-meter: unknown meter 'nvlm'; {known}"
    told = usage_error(pytester, "--energy-backend=tranformers")
    assert told == f"--energy-backend: unknown backend 'tranformers'; known: {BACKENDS}"


@pytest.mark.parametrize(
    ("text", "value"), [(" 2.5 % ", 0.025), ("8%", 0.08), ("0%", 0.0), ("0", 0.0), ("0.02", 0.02)]
)
def test_floor_is_a_share_in_pytest_and_in_commands(
    pytester: pytest.Pytester, text: str, value: float
) -> None:
    assert read_settings(pytester.parseconfig(f"--energy-floor={text}")).floor == pytest.approx(value)
    assert option_row("floor").read_argument(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["2", "-1%", "100%", "nan%", "2%%", "much"])
def test_malformed_floor_is_refused_in_pytest_and_in_commands(pytester: pytest.Pytester, text: str) -> None:
    message = f"floor={text}: needs a share from 0 to 25%, such as 1% or 0.01"
    with pytest.raises(pytest.UsageError) as of_pytest:
        read_settings(pytester.parseconfig(f"--energy-floor={text}"))
    with pytest.raises(PlanError) as of_command:
        option_row("floor").read_argument(text)
    assert (str(of_pytest.value), str(of_command.value)) == (f"--energy-{message}", f"--{message}")


def test_commands_do_not_import_pytest() -> None:
    code = "import sys; from pytest_llenergy import cli; cli.build_parser(); print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unknown_column_names_the_known_ones(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MEASURED)
    reported = usage_error(pytester, "--energy-columns=energyj")
    assert reported.startswith("--energy-columns=energyj: unknown: energyj; known: backend, model, device, ")
    assert "energy_per_output_token_j" in reported


def test_help_fits_80_columns_with_whole_words(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = pytester.runpytest("--help")
    text = " ".join(result.stdout.str().split())
    for option in OPTIONS:
        assert option.help in text, "a word is broken"
        assert f"Default of {option.flag}" in text
    section = result.stdout.str().partition("energy of LLM inference:")[2].partition("\n\n")[0]
    assert len(section.splitlines()) <= 70
    result.stdout.fnmatch_lines(["  --energy-report=[[]FILE.json]", "  --energy-busy={fail,skip}"])


def test_invalid_ini_value_names_the_ini_key(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MEASURED)
    pytester.makeini("[pytest]\nenergy_rounds = many\n")
    assert (
        usage_error(pytester)
        == 'ini key energy_rounds=many: needs a whole number from 1 to 1000000, or "auto"'
    )


@pytest.mark.parametrize(
    ("spec", "is_path"),
    [("models/mine", True), ("models/other", False), ("random:llama-tiny", False), ("", False)],
)
def test_model_path_in_an_ini_file_is_relative_to_the_root(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, spec: str, is_path: bool
) -> None:
    pytester.mkdir("models")
    pytester.mkdir("models/mine")
    pytester.makeini(f"[pytest]\nenergy_model = {spec}\n")
    monkeypatch.chdir(pytester.mkdir("tests"))
    model = read_settings(pytester.parseconfig("--rootdir=..", "-c", "../tox.ini")).model
    assert model == (str(pytester.path / spec) if is_path else spec)


def test_test_path_as_report_suggests_the_command(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_some=MEASURED)
    pytester.mkdir("benchmarks")
    assert "did you mean: pytest benchmarks --energy-report" in usage_error(
        pytester, "--energy-report", "benchmarks"
    )
    assert "did you mean: pytest test_some.py --energy-report" in usage_error(
        pytester, "--energy-report", "test_some.py"
    )
    assert "did you mean: pytest test_some.py::test_it --energy-report" in usage_error(
        pytester, "--energy-report", "test_some.py::test_it"
    )
    assert "did you mean result.json?" in usage_error(pytester, "--energy-report=result")
