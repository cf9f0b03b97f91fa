# SPDX-License-Identifier: Apache-2.0
"""Work that parts measure: a load of known duration, and decoding steps. Simulated in a dry run.

The board is leased while a part uses it in its own process, so that no other test runs on it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire

from . import stand_in
from .part import Notebook, need_board, need_cuda, scratch

#: Longest wait for a board that is leased by someone else (seconds).
LEASE_WAIT_S = 5.0

#: Approximate duration of one matrix product on any board (seconds); several are queued.
UNIT_S = 0.0002


class Load(Protocol):
    """A load that keeps the board busy."""

    @property
    def what(self) -> str:
        """Description for a sentence."""

    def on(self, seconds: float) -> tuple[int, int]:
        """Keep the board busy for about ``seconds``. Returns start and end (monotonic ns)."""


class Steps(Protocol):
    """Decoding steps of equal work."""

    @property
    def what(self) -> str:
        """Description for a sentence."""

    @property
    def tokens_per_step(self) -> int:
        """Number of sequences."""

    def run(self, steps: int) -> None:
        """Run ``steps`` steps; blocks until they are done."""


@contextmanager
def lease_board(notebook: Notebook) -> Iterator[str]:
    """Lease the board to use and yield its UUID; in a dry run a simulated board with exactly known power.

    Raises:
        SkippedError: There is no GPU or no CUDA.
        DeviceError: The board cannot be leased.
    """
    with ExitStack() as stack:
        if notebook.dry:
            yield stack.enter_context(stand_in.board(stack.enter_context(scratch("stand-in"))))
            return
        need_cuda()
        uuid = need_board()
        # Leasing is itself validated, so a board that cannot be leased is a failure.
        held = acquire(LockRequest((DeviceLock(uuid),)), LEASE_WAIT_S, f"validation: {notebook.name}")
        stack.callback(held.release)
        yield uuid


def make_load(notebook: Notebook) -> Load:
    """Return a load for this board."""
    return stand_in.StandInLoad() if notebook.dry else CudaLoad()


def make_steps(notebook: Notebook) -> Steps:
    """Return decoding steps for this board."""
    if notebook.dry:
        return stand_in.StandInSteps()
    from .decoder import Decoder

    return Decoder("cuda:0")


class CudaLoad:
    """Queued products of random bf16 matrices, whose duration is calibrated."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        size = 8192
        while True:
            self._take(size)
            self._repeat(20)
            self.unit_s = self._timed(20)
            if self.unit_s <= 2 * UNIT_S or size <= 512:
                break
            size //= 2
        # Long enough for the clocks to ramp up.
        self._repeat(round(1.0 / self.unit_s))
        self.unit_s = self._timed(round(0.5 / self.unit_s))
        self.what = (
            f"products of {size} x {size} bfloat16 matrices, {self.unit_s * 1e6:.0f} µs each by CUDA events"
        )

    def on(self, seconds: float) -> tuple[int, int]:
        start_ns = time.monotonic_ns()
        self._repeat(max(1, round(seconds / self.unit_s)))
        return start_ns, time.monotonic_ns()

    def _take(self, size: int) -> None:
        torch = self._torch
        torch.manual_seed(0)
        made: list[Any] = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self._a, self._b = made
        self._c = torch.empty_like(self._a)

    def _repeat(self, count: int) -> None:
        for _ in range(count):
            self._torch.matmul(self._a, self._b, out=self._c)
        self._torch.cuda.synchronize()

    def _timed(self, count: int) -> float:
        """Return the seconds of one product, measured with CUDA events."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            self._torch.matmul(self._a, self._b, out=self._c)
        end.record()
        self._torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count
