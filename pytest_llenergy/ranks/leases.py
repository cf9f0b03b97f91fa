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

from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease, LockRequest
from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.devices.locks import Held, acquire, ignore_message
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.pool import RankPool


class LeaseKeeper:
    """Leases the devices of one test after the other, and keeps those of warm ranks between tests.

    Args:
        pool: The ranks.
        where: Returns the directory of the lock files.
        own: What this process holds for all its tests.
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
        self._current: list[Held] = []
        self._kept: Held | None = None
        # Held while ranks are stopped, so that no test gets them meanwhile.
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def is_intact(self) -> bool:
        """Return whether the running test's lock files exist; without them others may lease its devices."""
        return all(held.intact() for held in (*self._own, *self._current))

    def lease(
        self,
        lease: Lease,
        wait_s: float,
        test: str = "",
        also: tuple[DeviceLock, ...] = (),
        on_wait: Callable[[str], None] = ignore_message,
    ) -> Lease:
        """Lock the devices of a test.

        Args:
            lease: The devices that the test may use.
            wait_s: How long to wait for them.
            test: Its name, which other waiting processes show.
            also: Further devices, such as the CPU in addition to a GPU.
            on_wait: Called with a text about the holder of the devices while this process waits.

        Returns:
            The lease with the devices that were chosen.

        Raises:
            DeviceError: The devices are not free in time, or cannot be locked.
        """
        request = lease.request(also)
        for held in self._own:
            request = replace(
                request, always=tuple(each for each in request.always if each not in held.locks)
            )
        with self._lock:
            chosen = self._choose_kept(request)
        if chosen is not None:
            # The GPUs are here, and the CPU comes last for everybody.
            request = LockRequest(tuple(lock for lock in request.always if lock.device == CPU))
        try:
            found = acquire(request, wait_s, test, self._where, on_wait)
        except BaseException:
            with self._lock:
                self._release_current()
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
                for held in self._current:
                    gpus = {lock for lock in held.locks if lock.device != CPU}
                    if gpus and self._kept is None and self._has_ranks(held) and not _is_wanted(held):
                        self._keep(held, gpus)
                        continue
                    self._close_and_release(held)
                self._current.clear()
                if self._kept is not None and not self._has_ranks(self._kept):
                    self._release_kept()

    def close(self) -> None:
        """Stop all ranks, then release everything."""
        with self._lock:
            self._pool.close()
            self._release_kept()
            self._release_current()

    def _choose_kept(self, request: LockRequest) -> tuple[int, ...] | None:
        """Choose from the devices of warm ranks, or stop these ranks and release their devices."""
        kept = self._kept
        gpus = replace(request, always=tuple(lock for lock in request.always if lock.device != CPU))
        if kept is None or not gpus.all_locks:
            return None
        chosen = gpus.select(set(kept.locks).issuperset)
        wanted = {*gpus.always, *(lock for index in chosen or () for lock in gpus.choices[index])}
        # A process that already queues for the devices comes before this test.
        if chosen is None or wanted != set(kept.locks) or _is_wanted(kept):
            self._release_kept()
            return None
        self._stop.set()
        self._kept = None
        self._current.append(kept)
        return chosen

    def _keep(self, held: Held, gpus: set[DeviceLock]) -> None:
        held.keep_only(gpus)
        held.mark_idle()
        self._kept = held
        self._stop = threading.Event()
        threading.Thread(target=self._watch, args=(held, self._stop), daemon=True).start()

    def _watch(self, held: Held, stop: threading.Event) -> None:
        """Release an idle lease as soon as another process wants it; runs in a thread."""
        while not stop.wait(timeouts.QUEUE_POLL_S):
            with self._lock:
                if stop.is_set():
                    return
                if not self._has_ranks(held) or _is_wanted(held):
                    self._release_kept()
                    return

    def _release_kept(self) -> None:
        self._stop.set()
        if self._kept is not None:
            self._close_and_release(self._kept)
            self._kept = None

    def _release_current(self) -> None:
        for held in self._current:
            self._close_and_release(held)
        self._current.clear()

    def _close_and_release(self, held: Held) -> None:
        # Ranks on the CPU outlive their lease.
        self._pool.close_on({lock.device for lock in held.locks if lock.device != CPU})
        held.release()

    def _has_ranks(self, held: Held) -> bool:
        return not self._pool.devices.isdisjoint(lock.device for lock in held.locks)


def _is_wanted(held: Held) -> bool:
    # On an error others merely wait longer. If the directory is gone, the next test reports it.
    with suppress(OSError):
        return held.is_wanted()
    return False
