# SPDX-License-Identifier: Apache-2.0
"""Every time-out and polling interval of the ranks, in seconds, in the order of a rank's life.

Standard library only: the supervisor and its guard import this module. Time limits that users set
(``--energy-timeout``, ``workers.run(..., timeout=...)``) are options and arguments, and not here.
"""

from __future__ import annotations

# Start

#: Time limit for each step of the start of a group: its supervisor, which with ``forkserver`` imports torch
#: and the like, then all ranks, which import their framework and join the process group.
START_TIMEOUT_S = 120.0
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

#: Time limit for the other ranks to report their own failures after one has failed, on one host and on
#: several: a host that is frozen or cut off is noticed later.
OTHER_RANKS_TIMEOUT_S, OTHER_HOSTS_TIMEOUT_S = 2.0, 4.0
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
#: Interval of a guard's checks whether its parent has ended.
ORPHAN_POLL_S = 0.2
