# SPDX-License-Identifier: Apache-2.0
"""Every time-out and polling interval of the ranks, in seconds, in the order of a rank's life.

Standard library only: the supervisor and its guard import this module. Time limits that users set
(``--energy-timeout``, ``workers.run(..., timeout=...)``) are options and arguments, and not here.
"""

from __future__ import annotations

# Start

#: Time limit for the first answer of a supervisor. With ``forkserver`` it imports torch and the like first.
SUPERVISOR_START_TIMEOUT_S = 120.0
#: Time limit for all ranks of a group to import their framework and join the process group.
RANK_START_TIMEOUT_S = 120.0

# Requests

#: Time limit for an answer of the supervisor. Killing a group is its slowest request.
SUPERVISOR_ANSWER_TIMEOUT_S = 30.0
#: Time limit for the rest of a message that a rank has begun to send. It must be a whole number.
PARTIAL_MESSAGE_TIMEOUT_S = 10
#: Interval of the checks whether a supervisor that does not answer is stopped (SIGSTOP), and the number of
#: checks in a row that must find it stopped before it is given up.
STOPPED_POLL_S, STOPPED_POLLS = 0.5, 4
#: The longest wait that poll(2) accepts, which takes milliseconds as an int.
LONGEST_POLL_S = 2e6

# Failures

#: Time limit for the other ranks to report their own failures after one has failed.
OTHER_RANKS_TIMEOUT_S = 2.0
#: Time limit and polling interval for the exit code of a rank, whose socket closes before its process ends.
EXIT_CODE_TIMEOUT_S, EXIT_CODE_POLL_S = 2.0, 0.01
#: Time limit and polling interval for the stacks that ranks without an answer write into their logs.
STACKS_TIMEOUT_S, STACKS_POLL_S = 5.0, 0.05

# Between tests

#: Time limit for ranks to clean up after a test.
CLEANUP_TIMEOUT_S = 30.0
#: Time limit and polling interval for threads and processes of a test that are about to end. Waiting costs
#: less than starting new ranks.
LEFTOVERS_TIMEOUT_S, LEFTOVERS_POLL_S = 0.2, 0.005
#: Interval of the checks whether another process queues for the devices of idle ranks, and how long it must
#: have waited. Shorter waits end by themselves.
QUEUE_POLL_S, QUEUE_WAITED_S = 0.2, 0.05

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
CLEANER_TIMEOUT_S, CLEANER_POLL_S = 1.0, 0.01
#: Time limit for a supervisor to kill all remaining processes and to end. After it the supervisor is killed.
SUPERVISOR_STOP_TIMEOUT_S = 15.0
#: Time limit for the guard of a dead supervisor to kill the remaining processes.
GUARD_EXIT_TIMEOUT_S = 5.0
#: Time limit for a guarded process that was asked to end. After it its guard kills it.
GUARDED_STOP_TIMEOUT_S = 3.0
#: Interval of a guard's checks whether its parent has ended, if the kernel has no pidfd to wait for.
ORPHAN_POLL_S = 0.2
