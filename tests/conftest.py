# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.inventory import find_gpus
from pytest_llenergy.record.base import cache_directory

from .nvml_sim.fixtures import nvml_attach, nvml_children, nvml_library

__all__ = ["nvml_attach", "nvml_children", "nvml_library"]

pytest_plugins = ["pytester"]

#: Modules that in-process inner runs use; some need an extra that may not be installed.
USED_BY_INNER_RUNS = [
    "torch",
    # Its plugin imports it at the end of each run.
    "hypothesis.internal.observability",
    "rich.table",
    "rich._emoji_codes",
    "pytest_llenergy.api",
    "pytest_llenergy.plugin.collection",
    "pytest_llenergy.plugin.controller",
    "pytest_llenergy.plugin.gating",
    "pytest_llenergy.plugin.benchmark",
    "pytest_llenergy.report.ci",
    "pytest_llenergy.report.markdown",
    "pytest_llenergy.report.pr_comment",
    "pytest_llenergy.report.terminal",
    "pytest_llenergy.report.verdicts",
    "pytest_llenergy.plugin.report_builder",
    *(
        f"pytest_llenergy.energy.meters.{name}"
        for name in ("amd", "command", "estimate", "hwmon", "nvml", "rapl", "selfcheck")
    ),
]

#: Source of a conftest with a meter that always reads ten watts.
TEN_WATTS = """
import time
import pytest
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, within

class TenWatts:
    name = "ten-watts"
    poll_period_s = 0.01
    domains = (Domain(
        name="cpu:ten", kind="measured", source="test", scope="test", update_period_s=0.001,
        max_age_s=0.001,
        resolution_j=1e-6, accuracy="exact", limits=within(0.0)),)
    def read(self):
        return [10 * time.monotonic()]
    def close(self):
        pass

def pytest_llenergy_meters(config):
    return [MeterSpec("ten-watts", "measured", lambda targets: [TenWatts()])]
"""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run pass whose marks select no test: tox runs each part of the suite on the same arguments."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session", autouse=True)
def _signals() -> Iterator[None]:
    """Let children have signals that a parent ignores, such as nohup or the shell of a background job."""
    ignored: set[int] = {each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN}
    before: dict[int, Any] = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    # Python ignores these two itself, but not in its children. Handlers end with the start of a program.
    for number in ignored - {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}:
        before[number] = signal.signal(number, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _private_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own lock directory, so that inner runs do not wait for the outer run's lease."""
    monkeypatch.setenv("LLENERGY_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))


@pytest.fixture(autouse=True)
def _private_checks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own self-check cache; simulated boards share names. Converted models are shared."""
    models = cache_directory() / "models"
    models.mkdir(parents=True, exist_ok=True)
    private = tmp_path_factory.mktemp("cache")
    (private / "models").symlink_to(models.resolve())
    monkeypatch.setenv("LLENERGY_CACHE_DIR", str(private))


@pytest.fixture(autouse=True)
def _other_gpus() -> None:
    """Let each test read the GPUs of its own host."""
    find_gpus.cache_clear()


@cache
def import_for_inner_runs() -> None:
    for name in USED_BY_INNER_RUNS:
        with suppress(ImportError):
            import_module(name)
    # Every round begins with a garbage collection, which takes a tenth of a second if it examines torch.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _modules_stay(request: pytest.FixtureRequest) -> None:
    """Import torch and the package before in-process inner runs.

    pytester drops the modules that an inner run imports. torch crashes when it is imported again, what a test
    patches in a module of the package would not be in the copy that the inner run imports, and importing
    takes longer than most inner runs.
    """
    if "pytester" in request.fixturenames:
        import_for_inner_runs()


@pytest.fixture
def few_plugins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inner runs load no other plugins than those that tests of ranks and devices use.

    To find and import all installed ones takes a third of the CPU time of a short run.
    """
    if "pytester" in request.fixturenames:
        # First, because it unsets the variable.
        request.getfixturevalue("pytester")
        used = {"llenergy": "pytest_llenergy", "xdist": "xdist", "timeout": "pytest_timeout"}
        found = (name for name, module in used.items() if find_spec(module) is not None)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p {name}" for name in found))


@pytest.fixture
def no_xdist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable of an outer worker: inner runs and pytest-benchmark would believe to be one."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture
def quick(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester whose measured tests take few short rounds, with the ten-watt meter."""
    pytester.makeini("[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\n")
    pytester.makeconftest(TEN_WATTS)
    return pytester


@pytest.fixture
def read_report(pytester: pytest.Pytester) -> Callable[..., dict[str, Any]]:
    """Return a function that reads the JSON report of an inner run, by default energy.json."""

    def read(name: str = "energy.json") -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(Path(pytester.path / name).read_text())
        return loaded

    return read
