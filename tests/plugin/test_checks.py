# SPDX-License-Identifier: Apache-2.0
"""What options name is checked before collection: one line, exit code 4, and nothing is collected."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.options.values import gpus

COLLECTED = "raise SystemExit('collected')"


def refusal(pytester: pytest.Pytester, *args: str) -> str:
    """Return the one line with which a run ends before it collects any test."""
    pytester.makepyfile(COLLECTED)
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = (line for line in result.stderr.lines if line.startswith("ERROR: "))
    return error.removeprefix("ERROR: ")


def test_servers_have_names_of_their_own(pytester: pytest.Pytester) -> None:
    told = refusal(pytester, "--energy-server=python {port}", "--energy-server=python3 {port}")
    assert told == (
        "--energy-server: two servers for the backend server; name them: NAME=URL or NAME=COMMAND"
    )


@pytest.mark.parametrize("key", ["report", "html", "compare"])
def test_ini_key_is_named_in_errors_about_files(pytester: pytest.Pytester, key: str) -> None:
    value = {"report": "none/e.json", "html": "none/e.html", "compare": "none.json"}[key]
    pytester.makeini(f"[pytest]\nenergy_{key} = {value}\n")
    # No folder can have this name.
    Path("none").touch()
    assert refusal(pytester).startswith(f"ini key energy_{key}={'' if key == 'compare' else pytester.path}")


class TestBackend:
    def test_named_backend_must_be_installed(self, pytester: pytest.Pytester) -> None:
        pytester.makeconftest(
            "from pytest_llenergy.backends.base import BackendSpec, Capabilities\n"
            "def pytest_llenergy_backends(config):\n"
            "    return [BackendSpec('absent', 'none:none', ('no_such_module',), 'pip install absent', "
            "Capabilities(framework='torch'))]\n"
        )
        pytester.makepyfile("def test_it(backend): pass")
        message = "absent is not available: no module no_such_module; pip install absent"
        assert refusal(pytester, "--energy-backend=absent") == f"--energy-backend: {message}"
        result = pytester.runpytest("--energy-backend=transformers,absent")
        assert result.ret == pytest.ExitCode.USAGE_ERROR


class TestGpus:
    @pytest.mark.parametrize("text", ["0,,1", ",", "all,0", "0,all"])
    def test_list_that_cannot_be_parsed(self, pytester: pytest.Pytester, text: str) -> None:
        assert refusal(pytester, f"--energy-gpus={text}") == (
            f"--energy-gpus={text}: needs all, or indices and UUIDs separated by commas, such as 0,2"
        )

    def test_blanks_are_dropped(self) -> None:
        assert gpus(" 0 , GPU-a ") == "0,GPU-a"


class TestMeters:
    def test_program_that_does_not_exist(self, pytester: pytest.Pytester) -> None:
        assert refusal(pytester, "--energy-meter=command:no-such-meter -v") == (
            "--energy-meter: command: 'no-such-meter' is not a program on PATH; install it, or write its "
            "whole path"
        )

    def test_unbalanced_quotes(self, pytester: pytest.Pytester) -> None:
        told = refusal(pytester, "--energy-meter=command:sh -c 'echo 5")
        assert (
            told == '--energy-meter: command: "sh -c \'echo 5" is not a command line (No closing quotation)'
        )

    def test_sensor_that_does_not_exist(self, pytester: pytest.Pytester) -> None:
        told = refusal(pytester, "--energy-meter=hwmon:no-such-chip@2%")
        assert told.startswith(
            "--energy-meter: hwmon: no sensor 'no-such-chip' under /sys/class/hwmon; found: "
        )

    def test_check_of_a_third_party_meter(self, pytester: pytest.Pytester) -> None:
        pytester.makeconftest(
            """
            from pytest_llenergy.errors import MeterError
            from pytest_llenergy.energy.meters.base import MeterSpec

            def check(argument):
                raise MeterError(f"plug: {argument} is no file")

            def pytest_llenergy_meters(config):
                return [MeterSpec("plug", "measured", print, True, check=check)]
            """
        )
        told = refusal(pytester, "--energy-meter=plug:/run/plug")
        assert told == "--energy-meter: plug: /run/plug is no file"


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/a", "-a", "a b"])
def test_save_refuses_what_is_no_plain_name(pytester: pytest.Pytester, name: str) -> None:
    assert refusal(pytester, f"--energy-save={name}").startswith("--energy-save=")


def test_several_processes_of_a_launcher_are_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    refused = refusal(pytester, "--energy-report")
    assert refused.startswith("torchrun or the like has started 2 pytest")
    assert "@pytest.mark.gpus(" in refused
    # A pod of several hosts, where no launcher has run yet.
    monkeypatch.delenv("LOCAL_RANK")
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest("--energy-report").assert_outcomes(passed=1)


def test_idle_run_does_not_import_the_checks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\ndef test_it():\n    assert 'pytest_llenergy.plugin.checks' not in sys.modules\n"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
