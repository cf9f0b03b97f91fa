# SPDX-License-Identifier: Apache-2.0
"""The queue for devices: whose turn it is, and messages that name holders and waiters.

Tickets determine the order and the content of messages. The lock of a device (``lockfiles``) determines which
process holds it.

First come, first served, where it matters: a request waits for an earlier one if both need the same device
and the earlier one could be served now, or has been passed often enough. An earlier request that waits for
devices in use may be passed by requests that need only free ones: otherwise boards would idle while a test
that needs all of them waits for the last. After ``MAX_PASSES`` of these it becomes firm, so that no request
starves.

A request keeps others waiting only while its maker exists, refreshes its ticket, and takes what it can have.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from pytest_llenergy.devices.lease import MAX_DEVICES, DeviceLock, LockRequest, any_conflict
from pytest_llenergy.devices.lockdir import LockDirectory
from pytest_llenergy.devices.lockfiles import is_held, user_name
from pytest_llenergy.devices.tickets import (
    QueueEntry,
    RequestKey,
    Ticket,
    list_entries,
    pid_namespace,
    printable,
)
from pytest_llenergy.devices.timeouts import PATIENCE_S, UNUSED_AFTER_S

#: How many later requests may pass an earlier one that they conflict with: about one per board of a host.
MAX_PASSES = 8

#: How many holders and waiters, or devices of each, a message lists.
MAX_LISTED = 16

UNIDENTIFIED = "a process without a ticket"

ADVICE = "wait for it, or raise --energy-lease-timeout"


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue at one moment as one waiter sees it: the earlier requests, and the holders of devices."""

    ahead: tuple[QueueEntry, ...] = ()
    holding: tuple[QueueEntry, ...] = ()

    def is_blocked(self, locks: tuple[DeviceLock, ...]) -> bool:
        """Return whether these locks must be left to an earlier request.

        A device in use may become free at any moment; it then belongs to the requests that waited for it.
        """
        rivals = [entry for entry in self._rivals if entry.wants(locks)]
        return bool(rivals) and (
            any_conflict(locks, self.held) or any(entry.order in self._next for entry in rivals)
        )

    @cached_property
    def held(self) -> list[DeviceLock]:
        """The locks that tickets of holders name."""
        return [lock for entry in self.holding for lock in entry.holds]

    @cached_property
    def _rivals(self) -> list[QueueEntry]:
        return [entry for entry in self.ahead if not entry.is_suspended]

    @cached_property
    def _next(self) -> set[str]:
        """The requests that nobody may pass."""
        return {
            entry.order for entry in self._rivals if entry.state == "firm" or entry.is_servable(self.held)
        }


@dataclass
class QueuePlace:
    """The place of this process in the queue, and the later requests that have passed it."""

    directory: LockDirectory
    ticket: Ticket
    #: Requests that left free devices unused, and until when this process passes them (monotonic seconds).
    passable: dict[RequestKey, float] = field(default_factory=dict)
    passed_by: set[str] = field(default_factory=set)
    started_s: float = field(default_factory=time.monotonic)
    _unused_since_s: dict[RequestKey, float] = field(default_factory=dict)

    def read(self) -> QueueSnapshot:
        """Read the queue, count the requests that have passed, and leave out those that take nothing."""
        entries = list_entries(self.directory, ("waiting", "firm", "holding"), self.ticket.order)
        waiting = tuple(entry for entry in entries if entry.state != "holding")
        ahead = tuple(entry for entry in waiting if entry.order < self.ticket.order)
        holding = tuple(entry for entry in entries if entry.state == "holding")
        self.passed_by.update(
            entry.order
            for entry in holding
            if entry.order > self.ticket.order and self.ticket.request.conflicts_with(entry.holds)
        )
        found = QueueSnapshot(ahead, holding)
        return replace(found, ahead=self._without_unused(found)) if ahead else found

    def _without_unused(self, found: QueueSnapshot) -> tuple[QueueEntry, ...]:
        """Return the earlier requests except those that could be served for a while and took nothing."""
        # Only the kernel knows what is held: a ticket may claim anything.
        claimed = islice(dict.fromkeys(lock.device for lock in found.held), MAX_DEVICES)
        really = {device for device in claimed if is_held(self.directory, device)}
        busy = [lock for lock in found.held if lock.device in really]
        now_s = time.monotonic()
        for entry in found.ahead:
            if not entry.is_servable(busy):
                self._unused_since_s.pop(entry.key, None)
            elif now_s - self._unused_since_s.setdefault(entry.key, now_s) > UNUSED_AFTER_S:
                del self._unused_since_s[entry.key]
                self.passable[entry.key] = now_s + PATIENCE_S
        return tuple(entry for entry in found.ahead if self.passable.get(entry.key, 0.0) < now_s)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether enough requests have passed, or enough time."""
        return len(self.passed_by) >= MAX_PASSES or time.monotonic() - self.started_s > PATIENCE_S


def is_awaited(
    directory: LockDirectory,
    locks: tuple[DeviceLock, ...],
    passable: Mapping[RequestKey, float],
    min_wait_s: float = 0.0,
) -> bool:
    """Return whether a request has waited at least ``min_wait_s`` and needs one of these locks.

    Args:
        directory: The lock directory.
        locks: The locks that this process holds.
        passable: Requests that do not count, and until when (monotonic seconds), see ``QueuePlace``.
        min_wait_s: Shortest wait that counts (seconds).
    """
    waiting = [
        entry
        for entry in list_entries(directory, ("waiting", "firm"))
        if entry.age_s >= min_wait_s
        and not entry.is_suspended
        and passable.get(entry.key, 0.0) < time.monotonic()
        and entry.wants(locks)
    ]
    if not waiting:
        return False
    held = QueueSnapshot(holding=tuple(list_entries(directory, ("holding",)))).held
    return any(not entry.is_servable(held) for entry in waiting)


def timeout_message(
    request: LockRequest, seconds: float, snapshot: QueueSnapshot, refused: Collection[DeviceLock] = ()
) -> str:
    """Return one line for a wait that timed out: the request, the holders, earlier requests, and what to do.

    Args:
        request: The request.
        seconds: How long the process waited.
        snapshot: The last reading of the queue.
        refused: Locks that others held; their holders may have no ticket.
    """
    wanted, obstacles = _describe_request(request), _describe_obstacles(request, snapshot, refused)
    return f"gpus: waited {seconds:g} s for {wanted}: {obstacles}; {ADVICE}"


def wait_message(request: LockRequest, snapshot: QueueSnapshot, refused: Collection[DeviceLock] = ()) -> str:
    """Return one line for a wait in progress.

    Args:
        request: The request.
        snapshot: The last reading of the queue.
        refused: Locks that others held; their holders may have no ticket.
    """
    return f"waiting for {_describe_request(request)}: {_describe_obstacles(request, snapshot, refused)}"


def nested_request_message(held: Collection[DeviceLock], request: LockRequest) -> str:
    """Explain why a process that holds devices may not wait for others."""
    devices = ", ".join(dict.fromkeys(lock.device for lock in held))
    return (
        f"gpus: this process already holds {devices} and requests {', '.join(request.devices)}; request all "
        "devices at once: to hold some while waiting for others can deadlock"
    )


def describe_entries(entries: Sequence[QueueEntry]) -> list[str]:
    """Return one line per ticket, without shared devices.

    Tests on GPUs share the host; listing it would suggest that others cannot use it.
    """
    lines = []
    for entry in entries:
        verb, devices = "held", [lock.device for lock in entry.holds if not lock.shared]
        if entry.state != "holding":
            verb, devices = "awaited", list(entry.content.request.devices)
        if devices:
            names = ", ".join(map(printable, _shorten(devices)))
            lines.append(f"{names} {verb} by {_describe_owner(entry)}")
    return _shorten(lines)


def _describe_request(request: LockRequest) -> str:
    wanted = ", ".join(request.devices)
    return f"{request.n} of {wanted}" if 0 < request.n < len(request.choices) else wanted


def _describe_obstacles(
    request: LockRequest, snapshot: QueueSnapshot, refused: Collection[DeviceLock]
) -> str:
    wanted = request.all_locks
    parts = []
    for entry in snapshot.holding:
        held = [lock.device for lock in entry.holds if any_conflict((lock,), wanted)]
        if held:
            parts.append(f"{_list_devices(held, request)}held by {_describe_owner(entry)}")
    without = [lock.device for lock in refused if not any_conflict((lock,), snapshot.held)]
    if without:
        parts.append(f"{_list_devices(without, request)}held by {UNIDENTIFIED}")
    parts += [f"queued before: {_describe_owner(entry)}" for entry in snapshot.ahead if entry.wants(wanted)]
    return "; ".join(_shorten(parts)) or f"held by {UNIDENTIFIED}"


def _describe_owner(entry: QueueEntry) -> str:
    content = entry.content
    elsewhere = content.namespace != pid_namespace()
    process = f"process {content.pid}" + (" of another container" if elsewhere else "")
    if entry.is_left:
        process = f"what {process} left running"
    test = printable(content.test)
    owner = f"{process} of {user_name(entry.uid)} since {_format_time(content.since_s)}"
    return f"{owner} ({test})" if test else owner


def _list_devices(devices: Collection[str], request: LockRequest) -> str:
    # The message has already named a single requested device.
    return "" if list(devices) == list(request.devices) else f"{', '.join(sorted(set(devices)))} "


def _shorten(texts: list[str]) -> list[str]:
    return texts if len(texts) <= MAX_LISTED else [*texts[:MAX_LISTED], f"{len(texts) - MAX_LISTED} more"]


def _format_time(epoch_s: float) -> str:
    try:
        then = time.localtime(epoch_s)
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)
