# SPDX-License-Identifier: Apache-2.0
"""Why ranks did not even start: the doctor's steps, taken by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from pytest_llenergy.devices.claims import CPU
from pytest_llenergy.doctor.trial import trial
from pytest_llenergy.errors import LLEnergyError, WorkerError, WorkerPlacementError
from pytest_llenergy.workers.plan import ProcessPlan

#: A run waits no longer than this for one step (seconds); ``llenergy doctor`` has more patience.
STEP_TIMEOUT_S = 60.0

REASON = "the ranks are on the CPU"


@contextmanager
def diagnosed(plan: ProcessPlan) -> Iterator[None]:
    """Say of ranks that failed before they were ready which step towards that fails here.

    Once a run for each device; the ranks have been ended, and their devices are still the test's.
    """
    try:
        yield
    except WorkerPlacementError:
        # This names its fault itself.
        raise
    except WorkerError as error:
        if error.before_ready and plan.framework == "torch":
            # A check that cannot be made must not hide the cause.
            with suppress(LLEnergyError, OSError):
                found = _sentence(plan.ranks[0].devices[0], len(plan.ranks) > 1)
                error.details = "\n".join(filter(None, (f"stepwise check: {found}", error.details)))
        raise


@cache
def _sentence(device: str, several: bool) -> str:
    on_gpu = device != CPU
    return trial(device if on_gpu else None, STEP_TIMEOUT_S, ranks=several, reason=REASON).sentence
