# SPDX-License-Identifier: Apache-2.0
"""Ranks in the Python of another environment: what they find there, and what they must not find."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

import pytest_llenergy
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError
from pytest_llenergy.ranks.plan import ProcessPlan, plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool

Read = Callable[..., dict[str, Any]]

#: What the other environment has; ``find_modules`` returns what a process of it can import.
TOY = """
import importlib.util, multiprocessing, os, pathlib, sys
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

def find_modules(*_):
    import pytest_llenergy
    names = ("pytest", "torch", "filelock", "rank", "toy_backend")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return ",".join([*found, str(pathlib.Path(pytest_llenergy.__file__).resolve().parent)])

class Job:
    def run(self): pass
    def result(self, outcome):
        request = RequestTimeline(input_tokens=1, output_tokens=1)
        return Generation(texts=["toy"], token_ids=[[7]], requests=[request])

class Toy:
    def load(self, model, options, context):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            below = pool.map(find_modules, [None])[0]
        options = {"python": sys.executable, "here": find_modules(), "below": below}
        options["path"] = os.environ["PATH"]
        options["searches"] = str(os.environ.get("PYTHONPATH"))
        return BackendInfo(name="toy", version="1", model=model.label, options=options)
    def prepare(self, prompts, params): return Job()
    def synchronize(self): pass
    def close(self): pass
"""

CONFTEST = """
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
def pytest_llenergy_backends(config):
    return [BackendSpec("toy", "toy_backend:Toy", ("toy_backend",), "no way", Capabilities(data=True))]
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real environment with what ranks need and one backend."""
    directory = tmp_path_factory.mktemp("other")
    venv.create(directory, symlinks=True)
    (site,) = (directory / "lib").glob("python*/site-packages")
    for package in (msgspec, cloudpickle):
        (site / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    (site / "toy_backend.py").write_text(TOY)
    return directory / "bin" / "python"


def spec(python: Path | None, *requires: str) -> BackendSpec:
    named = None if python is None else str(python)
    return BackendSpec("toy", "toy_backend:Toy", requires, "no way", Capabilities(data=True), python=named)


def plan(python: Path | None) -> ProcessPlan:
    named = None if python is None else str(python)
    return plan_processes(Capabilities(data=True), None, Lease(devices=("cpu",)), [0], 1, named)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(60.0, "spawn", "module")
    yield pool
    pool.close()


def test_ranks_and_their_processes_find_packages_of_their_environment_and_this_package(
    pool: RankPool, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
    group, info = pool.get_loaded(plan(other), Load(spec(other), ModelSource("directory", "/m"), {}))
    found: dict[str, Any] = info.options
    ours = str(Path(pytest_llenergy.__file__).resolve().parent)
    assert found["python"] == str(other)
    assert found["here"] == found["below"] == f"toy_backend,{ours}"
    assert found["searches"] == "None"
    assert found["path"].split(":")[0] == str(other.parent)
    assert pool.get_ranks(plan(None)).ranks[0].pid != group.ranks[0].pid


class TestWhatIsMissing:
    def test_missing_modules_are_those_of_the_interpreter(self, other: Path) -> None:
        assert spec(other, "toy_backend").explain_unavailable() is None
        assert (
            spec(None, "toy_backend").explain_unavailable()
            == "toy is not available: no module toy_backend; no way"
        )
        assert spec(other, "pytest", "toy_backend").explain_unavailable() == (
            f"toy is not available in {other}: no module pytest; install what is missing into that "
            "environment"
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "cannot be used ([Errno 2] No such file or directory: '{python}')"),
            ("", "is not a working Python (exit code 0)"),
            ("echo no >&2; exit 3", "is not a working Python (no)"),
        ],
        ids=["absent", "silent", "failing"],
    )
    def test_a_program_that_is_not_python_is_reported(
        self, tmp_path: Path, text: str | None, message: str
    ) -> None:
        python = tmp_path / "python"
        if text is not None:
            python.write_text(f"#!/bin/sh\n{text}\n")
            python.chmod(0o755)
        with pytest.raises(BackendError) as caught:
            spec(python).explain_unavailable()
        said = f"the Python of toy, {python}, {message.format(python=python)}; name a Python interpreter, "
        assert str(caught.value) == f"{said}such as vllm=.venvs/vllm/bin/python"


@pytest.mark.slow
def test_the_interpreter_runs_the_backend_but_not_functions_of_tests(
    pytester: pytest.Pytester, other: Path, read_report: Read
) -> None:
    (pytester.path / "environment").symlink_to(other.parent.parent)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import sys
        def test_it(backend, workers):
            assert backend.generate(["abc"]).texts == ["toy"]
            assert workers.run(lambda: sys.executable) == [sys.executable]
        def test_measured(energy, backend):
            energy(backend.generate, ["abc"])
        """
    )
    ini = (
        "energy_rounds = 2",
        "energy_warmup = 0",
        "energy_budget = 0.1",
        "energy_python = toy=environment/bin/python",
    )
    pytester.makeini("\n".join(("[pytest]", *ini)))
    options = ("-p", "no:cacheprovider", "--energy-backend=toy", "--energy-model=random:llama-tiny")
    result = pytester.runpytest_subprocess(*options, "--energy-report", "--energy-start-method=forkserver")
    result.assert_outcomes(passed=2)
    (record,) = (each for each in read_report()["records"] if each["backend"] is not None)
    python = record["backend"]["options"]["python"]
    assert python == str(pytester.path / "environment" / "bin" / "python") != sys.executable
    assert record["start_method"] == "spawn"
