# SPDX-License-Identifier: Apache-2.0
"""Every time-out and polling interval of the ranks, in seconds, in the order of a rank's life.

Standard library only: the supervisor and its guard import this module. Time limits that users set
(``--energy-timeout``, ``workers.run(..., timeout=...)``) are options and arguments, and not here.
"""

from __future__ import annotations

# Start

#: For a supervisor to answer for the first time; with ``forkserver`` it imports torch and the like before.
SUPERVISOR_START_TIMEOUT_S = 120.0
#: For all ranks of a group to import their framework and to join the process group.
RANK_START_TIMEOUT_S = 120.0

# Requests

#: For a supervisor to answer; it does nothing that takes long, but for killing a group.
SUPERVISOR_ANSWER_TIMEOUT_S = 30.0
#: For the rest of a message of which a rank has sent the beginning; whole seconds.
PARTIAL_MESSAGE_TIMEOUT_S = 10
#: How often to look whether a supervisor that does not answer is stopped (SIGSTOP), and how many times in a
#: row it must be found so before it is given up.
STOPPED_POLL_S, STOPPED_POLLS = 0.5, 4
#: The longest wait that poll(2) accepts: milliseconds in an int.
LONGEST_POLL_S = 2e6

# Failures

#: For the other ranks to report what happened to them, once one has failed.
OTHER_RANKS_TIMEOUT_S = 2.0
#: For the exit code of a rank: its socket closes before its process is reaped.
EXIT_CODE_TIMEOUT_S = 2.0
#: For ranks that did not answer to write the stacks of their threads into their logs, and how often to look.
STACKS_TIMEOUT_S, STACKS_POLL_S = 5.0, 0.05

# Between tests

#: For ranks to clean up after a test.
CLEANUP_TIMEOUT_S = 30.0
#: For threads and processes of a test that are about to end; waiting costs less than starting new ranks.
LEFTOVERS_TIMEOUT_S, LEFTOVERS_POLL_S = 0.2, 0.005
#: How often to look whether another process queues for the devices of idle ranks, and how long it must have
#: waited: whoever has waited for less is about to be served anyway.
QUEUE_POLL_S, QUEUE_WAITED_S = 0.2, 0.05

# Stop

#: For ranks that were asked to stop; then they are killed.
RANK_STOP_TIMEOUT_S = 5.0
#: For a killed group to be gone, before its processes are reported as stuck in the kernel.
GROUP_KILL_TIMEOUT_S = 10.0
#: How often to look for what is left of killed processes: at first, and once they seem stuck in a driver.
KILL_POLL_S, STUCK_POLL_S = 0.002, 0.2
#: For processes such as multiprocessing's resource tracker to remove shared memory of killed processes.
CLEANER_TIMEOUT_S, CLEANER_POLL_S = 1.0, 0.01
#: For a supervisor to kill all that is left and to end; then it is killed.
SUPERVISOR_STOP_TIMEOUT_S = 15.0
#: For the guard of a supervisor that has died to kill what it left behind.
GUARD_EXIT_TIMEOUT_S = 5.0
#: For a guarded process that was told to end to do so by itself; then its guard kills it.
GUARDED_STOP_TIMEOUT_S = 3.0
#: How often a guard looks whether its parent has gone, where the kernel has no pidfd to wait for.
ORPHAN_POLL_S = 0.2
