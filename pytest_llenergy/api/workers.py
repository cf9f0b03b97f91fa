# SPDX-License-Identifier: Apache-2.0
"""Workers, which the fixture ``workers`` returns: the ranks of a test, and calls of functions on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from pytest_llenergy.api.context import TestContext, raise_rank_outcomes
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.errors import PlanError
from pytest_llenergy.session import diagnose_failed_start
from pytest_llenergy.workers.call_tokens import TokensPerCall
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.workload import RankWorkload, call_workload


@dataclass(frozen=True)
class Call:
    """A call on every rank, not run yet, for ``energy`` to measure. ``workers.call`` returns it."""

    workers: Workers
    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def workload(self, tokens: TokensPerCall) -> RankWorkload:
        """Start the ranks and return the call, with the ``tokens`` that each makes, as their workload."""
        group = self.workers.group()
        timeout_s = self.workers.context.settings.timeout
        return call_workload(group, self.function, self.args, self.kwargs, timeout_s, tokens)


@dataclass(frozen=True, repr=False)
class Workers:
    """The ranks of this test, one process per device, which run functions of the test.

    With torch installed, the ranks form one ``torch.distributed`` process group: gloo on CPUs, NCCL on GPUs.
    The environment variables ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set in each.
    """

    context: TestContext

    def __repr__(self) -> str:
        return f"<Workers: world size {self.world_size}>"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.context.lease.devices)

    def group(self) -> RankGroup:
        """Return the ranks, started on first use."""
        framework: Literal["torch"] | None = "torch" if find_spec("torch") is not None else None
        row = Capabilities(framework=framework, process_group=True, data=True, tensor=True, pipeline=True)
        plan = self.context.plan_ranks(row)
        with diagnose_failed_start(self.context.state, plan):
            group = self.context.state.pool.get_ranks(plan, self.context.check_running)
        self.context.record_ranks(group)
        return group

    def run(
        self, function: Callable[..., Any] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: A function, sent by value with all that it uses if the test file defines it, or
                ``"module:function"``, which the ranks import.
            *args: Arguments for the function.
            timeout: Time limit of the call (seconds), ``--energy-timeout`` by default.
            **kwargs: Keyword arguments for the function.

        Returns:
            The result of each rank, in the order of ranks.

        Raises:
            WorkerError: A rank failed. The error has the traceback of the first such rank. Skip, xfail and
                fail in a rank become outcomes of the test.
        """
        with self.context.lock, raise_rank_outcomes():
            if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
                raise PlanError(f"workers.run: timeout is {timeout!r}, needs a number of seconds above 0")
            seconds = self.context.settings.timeout if timeout is None else timeout
            workload = call_workload(self.group(), function, args, kwargs, seconds)
            workload.run_round()
            return workload.results()

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Call:
        """Return a call of a function on every rank without running it: ``energy(workers.call(step))``.

        Args:
            function: As for ``run``.
            *args: Arguments for the function.
            **kwargs: Keyword arguments for the function.
        """
        return Call(self, function, args, kwargs)
