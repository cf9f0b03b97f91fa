# SPDX-License-Identifier: Apache-2.0
"""Leases of this pytest process: of the running test and of warm ranks.

Ranks that stay for the next test sit on their GPUs, so their lease stays too. It is given up, ranks first,
when the next test has no use for it or when another process queues for its devices. The CPU's is
given up after every test: ranks that wait draw nothing there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease, LockRequest
from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.devices.locks import Holding, acquire, ignore_message
from pytest_llenergy.devices.queue import is_awaited
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.workers.pool import RankPool

#: How often to look whether others queue for devices with idle ranks (seconds), and how long they must have
#: waited: who waits for less is about to be served anyway.
LOOK_S, WAITED_S = 0.2, 0.05


class LeaseKeeper:
    """Takes and gives back the devices of one test after the other, and keeps those of warm ranks between."""

    def __init__(self, pool: RankPool, where: Callable[[], LockDirectory] = open_lock_directory) -> None:
        self._pool = pool
        self._where = where
        self._current: list[Holding] = []
        self._kept: Holding | None = None
        # Held while ranks are ended, so that no test can be given them meanwhile.
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def is_intact(self) -> bool:
        """Whether the lock files of the test that runs are still there; else others may have its devices."""
        return all(held.intact() for held in self._current)

    def lease(
        self,
        lease: Lease,
        wait_s: float,
        test: str = "",
        also: tuple[DeviceLock, ...] = (),
        tell: Callable[[str], None] = ignore_message,
    ) -> Lease:
        """Lock the devices of a test, and ``also`` what is no device of its ranks. Returns what it got.

        ``tell`` is told for whom it waits. Raises ``DeviceError`` as ``acquire`` does.
        """
        request = lease.request(also)
        with self._lock:
            chosen = self._from_kept(request, test) if _wants_gpus(request) else None
        if chosen is None:
            self._current.append(acquire(request, wait_s, test, self._where, tell))
            chosen = self._current[-1].chosen
        self._pool.descriptors = tuple(each for held in self._current for each in held.lend_descriptors())
        return lease.select(chosen)

    def finish_test(self) -> None:
        """The test has ended: keep GPUs with warm ranks for the next one, give back everything else."""
        with self._lock:
            try:
                self._pool.finish_test()
            finally:
                # Also when it is interrupted: nobody else would ever give them back.
                self._pool.descriptors = ()
                for held in self._current:
                    gpus = {claim for claim in held.locks if claim.device != CPU}
                    if gpus and self._kept is None and self._has_ranks(held) and not _is_wanted(held):
                        self._keep(held, gpus)
                        continue
                    self._free(held)
                self._current.clear()
                if self._kept is not None and not self._has_ranks(self._kept):
                    self._give_up()

    def close(self) -> None:
        """End all ranks, then give back everything."""
        with self._lock:
            self._pool.close()
            self._give_up()
            for held in self._current:
                held.release()
            self._current.clear()

    def _from_kept(self, request: LockRequest, test: str) -> tuple[int, ...] | None:
        """Serve a request from the devices of warm ranks; otherwise these are given up before it queues."""
        kept = self._kept
        if kept is None:
            return None
        rest = [claim for claim in request.always if claim not in kept.locks]
        chosen = LockRequest((), request.n, request.choices).select(set(kept.locks).issuperset)
        # Whoever queues for them came before this test.
        if chosen is None or any(claim.device != CPU for claim in rest) or _is_wanted(kept):
            self._give_up()
            return None
        if rest:
            # Waiting with devices in hand could be waiting for somebody who waits for these.
            try:
                self._current.append(acquire(LockRequest(tuple(rest)), 0.0, test, self._where))
            except DeviceError:
                self._give_up()
                return None
        wanted = set(request.locks(chosen))
        if not wanted.issuperset(kept.locks):
            self._end_ranks(kept)
            kept.keep_only(wanted)
        self._stop.set()
        kept.assign_to(test)
        self._kept = None
        self._current.append(kept)
        return chosen

    def _keep(self, held: Holding, gpus: set[DeviceLock]) -> None:
        held.keep_only(gpus)
        held.mark_idle()
        self._kept = held
        self._stop = threading.Event()
        threading.Thread(target=self._watch, args=(held, self._stop), daemon=True).start()

    def _watch(self, held: Holding, stop: threading.Event) -> None:
        """Runs only while a lease is idle."""
        while not stop.wait(LOOK_S):
            with self._lock:
                if stop.is_set():
                    return
                if not self._has_ranks(held) or _is_wanted(held, WAITED_S):
                    self._give_up()
                    return

    def _give_up(self) -> None:
        self._stop.set()
        if self._kept is not None:
            self._free(self._kept)
            self._kept = None

    def _free(self, held: Holding) -> None:
        self._end_ranks(held)
        held.release()

    def _end_ranks(self, held: Holding) -> None:
        """Those on its GPUs. Ranks on the CPU outlive their lease."""
        self._pool.close_on({claim.device for claim in held.locks if claim.device != CPU})

    def _has_ranks(self, held: Holding) -> bool:
        return not self._pool.devices.isdisjoint(claim.device for claim in held.locks)


def _wants_gpus(request: LockRequest) -> bool:
    return bool(request.choices) or any(claim.device != CPU for claim in request.always)


def _is_wanted(held: Holding, least_s: float = 0.0) -> bool:
    # Whether to be obliging is all that hangs on it; a directory that is gone fails the next test.
    with suppress(OSError):
        return is_awaited(held.directory, held.locks, least_s)
    return False
