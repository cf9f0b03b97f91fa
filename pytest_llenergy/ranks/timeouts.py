# SPDX-License-Identifier: Apache-2.0
"""Every time limit and polling interval of the ranks, in seconds, in the order of a rank's life.

Standard library only: the supervisor and its guard import this module.
"""

from __future__ import annotations

#: For each step of the start of a group: its supervisor, which may import torch and the like, then all ranks,
#: which import their framework and join the process group.
START_TIMEOUT_S = 120.0
#: For an answer of the supervisor. Killing a group is its slowest request.
SUPERVISOR_ANSWER_TIMEOUT_S = 30.0
#: For the rest of a message that a rank has begun to send. It must be a whole number.
PARTIAL_MESSAGE_TIMEOUT_S = 10

#: For the other ranks to report their own failures after one has failed, on one host and on several: a host
#: that is frozen or cut off is noticed later.
OTHER_RANKS_TIMEOUT_S, OTHER_HOSTS_TIMEOUT_S = 2.0, 4.0
#: For other hosts to be lost too after one was, of which the ranks need to report nothing.
LOST_HOSTS_TIMEOUT_S = 1.0
#: For the exit code of a rank, whose socket closes before its process ends.
EXIT_CODE_TIMEOUT_S = 2.0
#: For the stacks that ranks without an answer write into their logs, beyond the time limit of the user.
STACKS_TIMEOUT_S, STACKS_POLL_S = 1.0, 0.05

#: For ranks to clean up after a test.
CLEANUP_TIMEOUT_S = 30.0
#: Interval of the checks whether another process queues for the devices of idle ranks.
QUEUE_POLL_S = 0.2

#: For a thread to stop using the ranks of a test that has ended. The ranks were killed before.
THREAD_TIMEOUT_S = 2.0
#: For ranks that were asked to stop. After it they are killed.
RANK_STOP_TIMEOUT_S = 5.0
#: For a killed group to end. After it its processes are reported as stuck in the kernel.
GROUP_KILL_TIMEOUT_S = 10.0
#: Interval of the checks whether killed processes have ended, at first and for those stuck in a driver.
KILL_POLL_S, STUCK_POLL_S = 0.002, 0.2
#: For processes that finish by themselves once the others are killed: by removing shared memory, and by
#: putting back the settings of boards, for each of which the driver may need seconds.
CLEANER_TIMEOUT_S, RESTORE_TIMEOUT_S = 5.0, 60.0
#: For a supervisor to kill all remaining processes and to end. After it the supervisor is killed.
SUPERVISOR_STOP_TIMEOUT_S = 15.0
#: For a guarded process that was asked to end. After it its guard kills it.
GUARDED_STOP_TIMEOUT_S = 3.0
#: Interval of a guard's checks whether its parent has ended.
ORPHAN_POLL_S = 0.2
