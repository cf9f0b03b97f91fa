# SPDX-License-Identifier: Apache-2.0
"""Device leases of this pytest process: of the running test, and of warm ranks that wait for the next one.

Warm ranks still occupy their GPUs, so their lease stays too. It is released, ranks first, when the next test
cannot use it or another process queues for its devices. The CPU's lease ends with every test, since idle
ranks draw no power there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pytest_llenergy import real_time
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease, LockRequest
from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.devices.locks import Held, acquire, ignore_message
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.pool import RankPool


class LeaseKeeper:
    """Leases the devices of one test after the other, and keeps those of warm ranks between tests.

    ``where`` returns the directory of the lock files, ``own`` is what this process holds for all its tests.
    """

    def __init__(
        self,
        pool: RankPool,
        where: Callable[[], LockDirectory] = open_lock_directory,
        own: Held | None = None,
    ) -> None:
        self._pool = pool
        self._own = [own] if own is not None else []
        self._where = where
        #: Of the running test, and of ranks that wait for the next one.
        self._current: list[Held] = []
        self._idle: list[Held] = []
        # Held while ranks are stopped, so that no test gets them meanwhile.
        self._lock = threading.Lock()
        self._watching = False

    def lease(
        self,
        lease: Lease,
        wait_s: float,
        test: str = "",
        also: tuple[DeviceLock, ...] = (),
        on_wait: Callable[[str], None] = ignore_message,
    ) -> Lease:
        """Lock devices for a test, ``also`` others such as the CPU, and return those that were chosen.

        Other processes show the name of the ``test``; ``on_wait`` gets a text about who holds the devices.
        Raises ``DeviceError`` if they are not free in time, or cannot be locked.
        """
        request = lease.request(also)
        for held in self._own:
            request = replace(
                request, always=tuple(each for each in request.always if each not in held.locks)
            )
        with self._lock:
            chosen = self._choose_idle(request)
        if chosen is not None:
            # The GPUs are here, and the CPU comes last for everybody.
            request = LockRequest(tuple(lock for lock in request.always if lock.device == CPU))
        try:
            found = acquire(request, wait_s, test, self._where, on_wait)
        except BaseException:
            with self._lock:
                self._release(self._current)
            raise
        for held in self._current:
            held.assign_to(test)
        self._current.append(found)
        self._pool.descriptors = tuple(
            each for held in (*self._own, *self._current) for each in held.lend_descriptors()
        )
        return lease.select(found.chosen if chosen is None else chosen)

    def finish_test(self) -> None:
        """Keep GPUs with warm ranks for the next test, and release everything else."""
        with self._lock:
            try:
                self._pool.finish_test()
            finally:
                # Even after an interrupt, since nothing else would release the devices.
                self._pool.descriptors = ()
                for held in list(self._current):
                    gpus = {lock for lock in held.locks if lock.device != CPU}
                    if gpus and self._may_keep(held):
                        held.keep_only(gpus)
                        held.mark_idle()
                        self._idle.append(held)
                        self._current.remove(held)
                self._release(self._current)
                if self._idle and not self._watching:
                    self._watching = True
                    threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Stop all ranks, then release everything."""
        with self._lock:
            self._pool.close()
            self._release(self._idle)
            self._release(self._current)

    def _choose_idle(self, request: LockRequest) -> tuple[int, ...] | None:
        """Choose from the devices of warm ranks, or stop these ranks and release their devices."""
        gpus = replace(request, always=tuple(lock for lock in request.always if lock.device != CPU))
        if not gpus.all_locks:
            return None
        here = {lock for held in self._idle for lock in held.locks}
        chosen = gpus.select(here.issuperset)
        # A process that already queues for the devices comes before this test.
        if chosen is None or set(gpus.locks_of(chosen)) != here or not all(map(self._may_keep, self._idle)):
            self._release(self._idle)
            return None
        self._current += self._idle
        self._idle = []
        return chosen

    def _may_keep(self, held: Held) -> bool:
        """Return whether ranks occupy these devices, and no other process queues for them."""
        occupied = not self._pool.devices.isdisjoint(lock.device for lock in held.locks)
        # On an error others merely wait longer. If the directory is gone, the next test reports it.
        with suppress(OSError):
            return occupied and not held.is_wanted()
        return occupied

    def _watch(self) -> None:
        """Release idle leases as soon as another process wants them; runs in a thread while there are any."""
        watching = True
        while watching:
            real_time.sleep(timeouts.QUEUE_POLL_S)
            with self._lock:
                if not all(map(self._may_keep, self._idle)):
                    self._release(self._idle)
                watching = self._watching = bool(self._idle)

    def _release(self, leases: list[Held]) -> None:
        for held in leases:
            # Ranks on the CPU outlive their lease.
            self._pool.close_on({lock.device for lock in held.locks if lock.device != CPU})
            held.release()
        leases.clear()
