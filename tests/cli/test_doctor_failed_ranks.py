# SPDX-License-Identifier: Apache-2.0
"""The automatic stepwise check after ranks fail to start: it adds to the cause and never replaces it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_llenergy.errors import WorkerError, WorkerPlacementError
from pytest_llenergy.plugin.session import RunState, diagnose_failed_start
from pytest_llenergy.plugin.settings import settings_of

from ..ranks.groups import PLAIN, TORCH, plan


def test_a_check_that_cannot_run_keeps_the_original_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import tempfile\ntempfile.tempdir = '/nowhere/at/all'\n")
    pytester.makepyfile("def test_it(workers):\n    workers.run(max, 1, 2)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["WorkerError: *No such file or directory: '/nowhere/at/all/*"])
    result.stdout.no_fnmatch_line("*stepwise check*")


@pytest.fixture
def state(pytestconfig: pytest.Config) -> RunState:
    return RunState(pytestconfig, settings_of(pytestconfig))


def not_ready() -> WorkerError:
    error = WorkerError("the cause", "its traceback")
    error.before_ready = True
    return error


def test_no_check_follows_work_that_fails(state: RunState) -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(state, plan(1, TORCH)):
        raise WorkerError("the cause", "its traceback")
    assert caught.value.details == "its traceback"


def test_no_check_follows_ranks_without_a_framework(state: RunState) -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(state, plan(1, PLAIN)):
        raise not_ready()
    assert caught.value.details == "its traceback"


def test_no_check_follows_ranks_that_differ_from_the_plan(state: RunState) -> None:
    error = WorkerPlacementError("planned 2 processes, found 1")
    error.before_ready = True
    with pytest.raises(WorkerPlacementError) as caught, diagnose_failed_start(state, plan(1, TORCH)):
        raise error
    assert not caught.value.details


def test_ranks_that_did_not_start_get_the_failing_step(state: RunState) -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(state, plan(1, TORCH)):
        raise not_ready()
    assert caught.value.details.startswith("stepwise check: no fault on the CPU: process, import torch, ")
    assert caught.value.details.endswith("\nits traceback")


def test_a_device_is_checked_once_in_a_run(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[str | None] = []

    def run_trial(gpu: str | None, *_: object, **__: object) -> SimpleNamespace:
        trials.append(gpu)
        return SimpleNamespace(summary=f"trial {len(trials)}")

    monkeypatch.setattr("pytest_llenergy.cli.doctor.trial.run_trial", run_trial)
    first, second = (RunState(pytestconfig, settings_of(pytestconfig)) for _ in range(2))
    assert [state.diagnose_start("cpu", several_ranks=False) for state in (first, first, second)] == [
        "trial 1",
        "trial 1",
        "trial 2",
    ]
    assert first.diagnose_start("GPU-a", several_ranks=False) == "trial 3"
    assert trials == [None, None, "GPU-a"]
