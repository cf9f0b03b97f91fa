# SPDX-License-Identifier: Apache-2.0
"""The automatic stepwise check after ranks fail to start: it adds to the cause and never replaces it."""

from __future__ import annotations

import pytest

from pytest_llenergy.errors import WorkerError, WorkerPlacementError
from pytest_llenergy.session import diagnose_failed_start

from ..workers.groups import PLAIN, TORCH, plan


def test_a_check_that_cannot_run_keeps_the_original_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import tempfile\ntempfile.tempdir = '/nowhere/at/all'\n")
    pytester.makepyfile("def test_it(workers):\n    workers.run(max, 1, 2)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["WorkerError: *No such file or directory: '/nowhere/at/all/*"])
    result.stdout.no_fnmatch_line("*stepwise check*")


def not_ready() -> WorkerError:
    error = WorkerError("the cause", "its traceback")
    error.before_ready = True
    return error


def test_no_check_follows_work_that_fails() -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(plan(1, TORCH)):
        raise WorkerError("the cause", "its traceback")
    assert caught.value.details == "its traceback"


def test_no_check_follows_ranks_without_a_framework() -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(plan(1, PLAIN)):
        raise not_ready()
    assert caught.value.details == "its traceback"


def test_no_check_follows_ranks_that_differ_from_the_plan() -> None:
    error = WorkerPlacementError("planned 2 processes, found 1")
    error.before_ready = True
    with pytest.raises(WorkerPlacementError) as caught, diagnose_failed_start(plan(1, TORCH)):
        raise error
    assert not caught.value.details


def test_ranks_that_did_not_start_get_the_failing_step() -> None:
    with pytest.raises(WorkerError) as caught, diagnose_failed_start(plan(1, TORCH)):
        raise not_ready()
    assert caught.value.details.startswith("stepwise check: no fault on the CPU: process, import torch, ")
    assert caught.value.details.endswith("\nits traceback")
