# SPDX-License-Identifier: Apache-2.0
"""Broken backends and meters of third parties, from entry points and from hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.backends.registry import load_backends

ASKS = "def test_it(backend): pass\n"

SPEC = """
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
SPEC = BackendSpec("whole", "whole:Whole", (), "pip install whole", Capabilities(data=True))
"""

OF_A = (
    "entry point a = a_backend:SPEC of pytest_llenergy.backends cannot be loaded (ModuleNotFoundError: No "
    "module named 'no_such_module'); fix or uninstall a-backend"
)
OF_B = "entry point b = b_backend:SPEC of pytest_llenergy.backends is a str, not a BackendSpec; fix or "

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs packages with entry points on the path of subprocesses."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, sys.path)]))

    def make(name: str, module: str, group: str = "backends") -> None:
        metadata = site / f"{name}_backend-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-backend\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            f"[pytest_llenergy.{group}]\n{name} = {name}_backend:SPEC\n"
        )
        (site / f"{name}_backend.py").write_text(module)

    return make


def doctor(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_broken_entry_point_fails_with_one_line(quick: pytest.Pytester, install: Install) -> None:
    install("a", "import no_such_module\n")
    quick.makepyfile(ASKS)
    result = quick.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    text = " ".join(result.stdout.str().replace("\nE  ", "").split())
    assert f"::test_it: {OF_A}" in text
    assert "Traceback" not in text
    assert "a_backend.py" not in text
    result = quick.runpytest_subprocess("--energy-backend=transformers", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == f"ERROR: --energy-backend: {OF_A}"


@pytest.mark.slow
def test_broken_meter_fails_measurements_with_one_line(quick: pytest.Pytester, install: Install) -> None:
    install("a", "import no_such_module\n", "meters")
    quick.makepyfile("def test_measured(energy): energy(sum, [1])\ndef test_plain(): pass\n")
    result = quick.runpytest_subprocess("-p", "no:cacheprovider", "--energy-meter=auto", "--energy-report")
    result.assert_outcomes(passed=2)
    (record,) = json.loads((quick.path / "energy.json").read_text())["records"]
    assert record["status"] == "invalid"
    assert record["reason"] == OF_A.replace("backends", "meters")
    required = quick.runpytest_subprocess(
        "-p", "no:cacheprovider", "--energy-meter=auto", "--energy-require=measured"
    )
    required.assert_outcomes(passed=1, failed=1)
    # A built-in meter selected by name loads no entry points.
    named = quick.runpytest_subprocess("-p", "no:cacheprovider", "--energy-meter=estimate")
    named.assert_outcomes(passed=2)


def test_doctor_continues_without_a_broken_meter(install: Install) -> None:
    install("a", "SPEC = 'x'\n", "meters")
    result = doctor("--no-steps")
    assert result.returncode == 1
    wrong = "entry point a = a_backend:SPEC of pytest_llenergy.meters is a str, not a MeterSpec; fix or "
    assert f"wrong    {wrong}uninstall a-backend\n" in result.stdout
    assert "estimate" in result.stdout
    assert result.stderr == ""


def test_broken_entry_point_does_not_affect_other_tests(quick: pytest.Pytester, install: Install) -> None:
    install("a", "import no_such_module\n")
    quick.makepyfile("def test_it(energy): energy(sum, [1])\n")
    quick.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_doctor_shows_broken_entry_points_and_continues(install: Install) -> None:
    install("a", "import no_such_module\n")
    install("b", "SPEC = 'x'\n")
    install("whole", SPEC)
    done = doctor("--backends")
    assert (done.returncode, done.stderr) == (0, "")
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    names = [head.split(":")[0].split()[1] for head in heads]
    assert names == [*load_backends(), "whole", "a", "b"]
    assert heads[-2] == f"backend  a: broken: {OF_A}"
    assert heads[-1] == f"backend  b: broken: {OF_B}uninstall b-backend"
    result = json.loads(doctor("--backends", "--format=json").stdout)
    assert [row["name"] for row in result["backends"]] == [*load_backends(), "whole"]
    assert result["broken"][0] == {"name": "a", "reason": OF_A}
    everything = doctor("--no-steps")
    assert everything.returncode == 1
    assert f"wrong    {OF_A}\n" in everything.stdout


@pytest.mark.parametrize(
    ("returned", "shown"), [('["x"]', "['x']"), ('"x"', "'x'"), ("3", "3"), ("sleepy.SPEC", "BackendSpec(")]
)
@pytest.mark.slow
def test_hook_without_backends_is_named(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, returned: str, shown: str
) -> None:
    (quick.path / "sleepy.py").write_text(SPEC)
    quick.makepyfile(
        fine="import sleepy\ndef pytest_llenergy_backends(config): return [sleepy.SPEC]\n",
        strange=f"import sleepy\ndef pytest_llenergy_backends(config): return {returned}\n",
        test_it=ASKS,
    )
    args = ("-p", "fine", "-p", "strange", "-p", "no:cacheprovider")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(quick.path), *filter(None, sys.path)]))
    result = quick.runpytest_subprocess(*args)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    text = " ".join(result.stdout.str().replace("\nE  ", "").split())
    assert f"::test_it: pytest_llenergy_backends returned {shown}" in text
    assert ": return a list of BackendSpec" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("import broken", "SyntaxError: invalid syntax (broken.py, line 1)"),
        (
            "Capabilities(exactt=True)",
            "TypeError: Capabilities.__init__() got an unexpected keyword argument",
        ),
    ],
)
def test_hook_that_fails_is_named(quick: pytest.Pytester, body: str, shown: str) -> None:
    (quick.path / "broken.py").write_text("def (\n")
    conftest = quick.path / "conftest.py"
    conftest.write_text(
        "from pytest_llenergy.backends.base import Capabilities\n"
        f"def pytest_llenergy_backends(config):\n    {body}\n    return []\n"
    )
    quick.makepyfile(ASKS)
    result = quick.runpytest_subprocess("--energy-backend=transformers", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = result.stderr.str().strip()
    assert message.startswith(f"ERROR: --energy-backend: pytest_llenergy_backends raised {shown}")
    assert "\n" not in message


def test_hook_without_meters_is_named(quick: pytest.Pytester) -> None:
    conftest = quick.path / "conftest.py"
    conftest.write_text("def pytest_llenergy_meters(config): return ['x']\n")
    quick.makepyfile(ASKS)
    result = quick.runpytest_subprocess("--energy-meter=estimate", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == (
        "ERROR: --energy-meter: pytest_llenergy_meters returned ['x']: return a list of MeterSpec"
    )
