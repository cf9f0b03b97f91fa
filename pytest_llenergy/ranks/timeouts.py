# SPDX-License-Identifier: Apache-2.0
"""Every time-out and polling interval of the ranks, in seconds, in the order of a rank's life.

Standard library only: the supervisor and its guard import this module. Time limits that users set
(``--energy-timeout``, ``workers.run(..., timeout=...)``) are options and arguments, and not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_llenergy import real_time

# Start

#: Time limit for a group to start: its supervisor, which with ``forkserver`` imports torch and the like, then
#: all ranks, which import their framework and join the process group.
START_TIMEOUT_S = 120.0
#: Time limit for a connection to the own host, which a firewall may drop.
LOOPBACK_TIMEOUT_S = 1.0
#: A start or a load that failed is not tried again in the same run if it took at least this long. A shorter
#: one is: that costs little, and the cause may have been a lost connection.
SLOW_LOAD_S = 10.0

# Requests

#: Time limit for an answer of the supervisor. Killing a group is its slowest request.
SUPERVISOR_ANSWER_TIMEOUT_S = 30.0
#: Time limit for the rest of a message that a rank has begun to send. It must be a whole number.
PARTIAL_MESSAGE_TIMEOUT_S = 10
#: The longest wait that poll(2) accepts, which takes milliseconds as an int.
LONGEST_POLL_S = 2e6

# Failures

#: Time limit for the other ranks to report their own failures after one has failed.
OTHER_RANKS_TIMEOUT_S = 2.0
#: The same after failures that only report a lost peer: a host that is frozen or cut off is noticed later.
OTHER_HOSTS_TIMEOUT_S = 4.0
#: The same after the loss of a host, which explains everything but failures that are already on their way.
AFTER_LOSS_TIMEOUT_S = 0.2
#: Time limit for the exit code of a rank, whose socket closes before its process ends.
EXIT_CODE_TIMEOUT_S = 2.0
#: Time limit and polling interval for the stacks that ranks without an answer write into their logs. It adds
#: to the time limit that the user has set.
STACKS_TIMEOUT_S, STACKS_POLL_S = 1.0, 0.05

# Between tests

#: Time limit for ranks to clean up after a test.
CLEANUP_TIMEOUT_S = 30.0
#: Interval of the checks whether another process queues for the devices of idle ranks.
QUEUE_POLL_S = 0.2

# Stop

#: Time limit for a thread to stop using the ranks of a test that has ended. The ranks were killed before.
THREAD_TIMEOUT_S = 2.0
#: Time limit for ranks that were asked to stop. After it they are killed.
RANK_STOP_TIMEOUT_S = 5.0
#: Time limit for a killed group to end. After it its processes are reported as stuck in the kernel.
GROUP_KILL_TIMEOUT_S = 10.0
#: Intervals of the checks whether killed processes have ended. The second is for processes that seem stuck in
#: a driver.
KILL_POLL_S, STUCK_POLL_S = 0.002, 0.2
#: Time limit and polling interval for processes that remove the shared memory of killed ones, such as
#: multiprocessing's resource tracker.
CLEANER_TIMEOUT_S, CLEANER_POLL_S = 5.0, 0.01
#: Time limit for a supervisor to kill all remaining processes and to end. After it the supervisor is killed.
SUPERVISOR_STOP_TIMEOUT_S = 15.0
#: Time limit for the guard of a dead supervisor to kill the remaining processes.
GUARD_EXIT_TIMEOUT_S = 5.0
#: Time limit for a guarded process that was asked to end. After it its guard kills it.
GUARDED_STOP_TIMEOUT_S = 3.0
#: Time limit for a process that puts back the settings of boards after everything else under its guard was
#: killed. The driver may need seconds for each board.
RESTORE_TIMEOUT_S = 60.0
#: Interval of a guard's checks whether its parent has ended, if the kernel has no pidfd to wait for.
ORPHAN_POLL_S = 0.2


class TimeLimit:
    """A time limit that the requests of one call share; only the time in requests counts.

    Args:
        seconds: The limit; ``None`` for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._used_s = 0.0
        self._begin_s = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the time of the block."""
        self._begin_s = real_time.monotonic()
        try:
            yield
        finally:
            self._used_s += real_time.monotonic() - self._begin_s

    def left_s(self) -> float:
        """Return the seconds that are left within ``counting``, at most the longest possible wait."""
        if self.seconds is None:
            return LONGEST_POLL_S
        left_s = self.seconds - self._used_s - (real_time.monotonic() - self._begin_s)
        return min(max(0.0, left_s), LONGEST_POLL_S)
