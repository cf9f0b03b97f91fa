# SPDX-License-Identifier: Apache-2.0
"""What options name is checked before collection: one line, exit code 4, and nothing is collected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.options.values import gpus
from pytest_llenergy.plugin.checks import LAUNCHERS

COLLECTED = "raise SystemExit('collected')"


def refusal(pytester: pytest.Pytester, *args: str) -> str:
    """Return the one line with which a run ends before it collects any test."""
    pytester.makepyfile(COLLECTED)
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = (line for line in result.stderr.lines if line.startswith("ERROR: "))
    return error.removeprefix("ERROR: ")


class TestServer:
    @pytest.mark.parametrize(
        ("command", "message"),
        [
            (
                "llama-server '{model} --port {port}",
                "=llama-server '{model} --port {port}: cannot be read as a command: No closing quotation",
            ),
            (
                "llama-server -m {modle} --port {port}",
                ": the command has the placeholder {modle}; known: {model}, {port}, {host}, {threads}, "
                "{gpus}",
            ),
            (
                "llama-server -m {model}",
                ": the command has no placeholder for the port; add {port}, or give the url as well",
            ),
        ],
        ids=["quotes", "placeholder", "port"],
    )
    def test_unusable_command(self, pytester: pytest.Pytester, command: str, message: str) -> None:
        told = refusal(pytester, "--energy-backend=server", f"--energy-server={command}")
        assert told == f"--energy-server{message}"

    @pytest.mark.parametrize(
        ("commands", "message"),
        [
            (
                ("python {port}", "python {port}"),
                ": two servers for the backend server; name them: NAME=URL or NAME=COMMAND",
            ),
            (
                ("fast=python {port}", "fast=python3 {port}"),
                ": two servers for the backend fast; give them different names",
            ),
            (("vllm=python {port}",), ": vllm is another backend; choose another name for the server"),
        ],
        ids=["twice", "same-name", "taken"],
    )
    def test_named_commands(self, pytester: pytest.Pytester, commands: tuple[str, ...], message: str) -> None:
        told = refusal(pytester, *(f"--energy-server={command}" for command in commands))
        assert told.startswith(f"--energy-server{message}")

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ("x=", "=x=: nothing follows the name; write NAME=URL or NAME=COMMAND"),
            (
                "a b=sleep 1",
                ": 'a b' is no valid name for a server; use letters, digits, _ and -, a letter first",
            ),
        ],
    )
    def test_command_without_program_or_with_an_invalid_name(
        self, pytester: pytest.Pytester, command: str, message: str
    ) -> None:
        name = command.partition("=")[0]
        told = refusal(pytester, f"--energy-server={command}", f"--energy-backend={name}")
        assert told == f"--energy-server{message}"

    def test_url_names_its_option(self, pytester: pytest.Pytester) -> None:
        told = refusal(pytester, "--energy-server=http://127.0.0.1/other")
        assert told == (
            "--energy-server: url 'http://127.0.0.1/other', needs a form such as http://127.0.0.1:8000"
        )

    @pytest.mark.parametrize("url", ["http://me:se same@127.0.0.1", "http://me:se/same@127.0.0.1:80/v1"])
    def test_url_with_a_password(self, pytester: pytest.Pytester, url: str) -> None:
        assert refusal(pytester, f"--energy-server={url}") == (
            "--energy-server: the url has a user or a password before its @, which servers would not "
            "get; leave it out"
        )


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
            "--energy-meter: hwmon: no chip 'no-such-chip' under /sys/class/hwmon; found: "
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


class TestRankLogs:
    @pytest.mark.parametrize("name", ["logs", "logs/deep/er"])
    def test_file(self, pytester: pytest.Pytester, name: str) -> None:
        (pytester.path / "logs").write_text("")
        told = refusal(pytester, f"--energy-rank-logs={name}")
        assert told.endswith(f"{name}: {pytester.path}/logs is a file; name a directory")

    def test_missing_directory_is_created_later(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile("def test_it(): pass")
        pytester.runpytest("--energy-rank-logs=deep/er").assert_outcomes(passed=1)
        assert not (pytester.path / "deep").exists()


class TestPython:
    @pytest.mark.parametrize("source", ["--energy-python", "ini key energy_python"])
    def test_message_names_what_was_used(self, pytester: pytest.Pytester, source: str) -> None:
        value = "vllm=/no/such/python"
        if source.startswith("ini"):
            pytester.makeini(f"[pytest]\nenergy_python =\n    {value}\n")
            args = []
        else:
            args = [f"{source}={value}"]
        assert refusal(pytester, *args) == (
            f"{source}: the Python of vllm, /no/such/python, cannot be started (No such file or directory); "
            "name a Python interpreter, such as vllm=.venvs/vllm/bin/python"
        )


@pytest.mark.parametrize("key", ["report", "html", "save", "compare"])
def test_ini_key_is_named_in_errors_about_files(pytester: pytest.Pytester, key: str) -> None:
    (pytester.path / "file").write_text("")
    value = {"report": "file/e.json", "html": "file/e.html", "save": "main", "compare": "none.json"}[key]
    if key == "save":
        (pytester.path / ".llenergy").write_text("")
    if key == "html":
        pytest.importorskip("jinja2")
    pytester.makeini(f"[pytest]\nenergy_{key} = {value}\n")
    assert refusal(pytester).startswith(f"ini key energy_{key}=")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--energy-report={}.json", "the name is too long; it may have 200 bytes"),
        ("--energy-html={}.html", "the name is too long; it may have 200 bytes"),
        ("--energy-save={}", "the name is too long; it may have 200 bytes"),
        ("--energy-report={}/energy.json", "File name too long"),
        ("--energy-html={}/energy.html", "File name too long"),
        ("--energy-rank-logs={}", "File name too long"),
        ("--energy-python=vllm=/{}", "cannot be started (File name too long)"),
        ("--energy-compare={}", "there is no .llenergy/"),
        ("--energy-compare=./{}", "File name too long"),
    ],
)
def test_name_that_is_too_long_for_a_file(pytester: pytest.Pytester, option: str, message: str) -> None:
    assert message in refusal(pytester, option.format("x" * 300))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs the file system /proc")
def test_directory_where_no_file_can_be_created(pytester: pytest.Pytester) -> None:
    """Also for root, whom permissions do not stop."""
    assert refusal(pytester, "--energy-report=/proc/energy.json").startswith(
        "--energy-report=/proc/energy.json: "
    )


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/a", "-a", "a\0b", "a b"])
def test_save_refuses_what_is_no_plain_name(pytester: pytest.Pytester, name: str) -> None:
    assert refusal(pytester, f"--energy-save={name}").startswith("--energy-save=")


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


class TestLauncher:
    @pytest.fixture(autouse=True)
    def _plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for _, variables, _ in LAUNCHERS:
            for name in variables:
                monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
                "torchrun or the like has started 2 pytest",
            ),
            ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 pytest"),
            ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "mpirun has started 3 pytest"),
            ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "mpirun has started 3 pytest"),
        ],
    )
    @pytest.mark.parametrize("option", ["--energy-report", "--energy-save=main", "--energy-cluster=slurm"])
    def test_several_processes_are_refused(
        self,
        pytester: pytest.Pytester,
        monkeypatch: pytest.MonkeyPatch,
        given: dict[str, str],
        message: str,
        option: str,
    ) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        refused = refusal(pytester, option)
        assert refused.startswith(message)
        assert "@pytest.mark.gpus(" in refused

    @pytest.mark.parametrize(
        "given",
        [
            # A shell of salloc or a script of sbatch, which no srun has started.
            {**SRUN, "SLURM_PROCID": "0"},
            {**SRUN, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            # A pod of several hosts, where no launcher has run yet.
            {"RANK": "1", "WORLD_SIZE": "2"},
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "many"},
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "9" * 5000},
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "\u0662"},
        ],
    )
    def test_a_single_process_runs(
        self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
    ) -> None:
        pytester.makepyfile("def test_it(): pass")
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        pytester.runpytest("--energy-report").assert_outcomes(passed=1)

    def test_several_nodes(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        step = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
        for name, value in step.items():
            monkeypatch.setenv(name, value)
        refused = refusal(pytester, "--energy-report")
        assert "; run srun -N1 -n1 pytest --energy-cluster=slurm, and " in refused

    @pytest.mark.parametrize("runner", ["symmetric_run.py", "launch.py"])
    def test_ray_runs_pytest_on_one_node(self, quick: pytest.Pytester, runner: str) -> None:
        """``srun -N2 ray symmetric-run … -- pytest``: two tasks, of which one runs pytest."""
        quick.makepyfile("def test_it(energy): energy(sum, [1])")
        script = quick.path / runner
        script.write_text("import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n")
        step = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, str(script), sys.executable, "-m", "pytest", "--energy-report"],
            env={**os.environ, **step},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        refused = "ERROR: srun has started 2 pytest processes" in done.stderr
        assert (done.returncode, refused) == ((0, False) if runner == "symmetric_run.py" else (4, True))

    def test_workers_of_xdist(
        self,
        quick: pytest.Pytester,
        monkeypatch: pytest.MonkeyPatch,
        read_report: Callable[..., dict[str, Any]],
    ) -> None:
        """A wrapper sets the variables for one process, and the workers inherit them."""
        pytest.importorskip("xdist")
        quick.makepyfile("def test_it(energy): energy(sum, [1])")
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **SRUN, "SLURM_STEP_NUM_TASKS": "1"}
        one["SLURM_JOB_NODELIST"] = "n1"
        for name, value in one.items():
            monkeypatch.setenv(name, value)
        quick.runpytest("-n1", "--energy-report").assert_outcomes(passed=1)
        assert [each["status"] for each in read_report()["records"]] == ["measured"]


def test_idle_run_does_not_import_the_checks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\ndef test_it():\n    assert 'pytest_llenergy.plugin.checks' not in sys.modules\n"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
