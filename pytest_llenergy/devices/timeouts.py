# SPDX-License-Identifier: Apache-2.0
"""Every time limit and polling interval of this package, in seconds.

How long a test waits for its devices is not here: users set it with ``--energy-lease-timeout`` and
``--energy-busy-timeout``.
"""

from __future__ import annotations

# Subprocess that queries the driver (subprocess_query).

#: A driver that does not answer must not block the start or the end of a run for longer than this.
QUERY_TIMEOUT_S = 30.0

# Guard of changed boards (board_settings).

#: Without pidfds, the guard looks this often whether pytest has ended.
PARENT_POLL_S = 0.5

# Queue for devices (locks, queue).

#: A waiter reads the queue again after the first pause; each pause is longer than the last by the factor, up
#: to the longest. So a device that passes from one test to the next stays unused for 0.1 s on average, 0.2 s
#: at most. In a queue of eight, one reading takes 0.1 ms of processor time: 0.1 % of a core per waiter.
QUEUE_POLL_FIRST_S, QUEUE_POLL_LONGEST_S, QUEUE_POLL_GROWTH = 0.05, 0.2, 1.5

#: A waiting test reports the reason after this time for the first time, and then at this interval.
WAIT_MESSAGE_FIRST_S, WAIT_MESSAGE_EVERY_S = 1.0, 5.0

#: After this time in the queue a request lets no later one pass, however few it has counted, since
#: polling can miss a short lease.
PATIENCE_S = 60.0

#: A waiter touches its ticket between two readings of the queue. One that has not done so for this long
#: counts as suspended: others pass it, but it keeps its place. Many times the longest pause, for a loaded
#: machine.
SUSPENDED_AFTER_S = 2.0

#: A request that leaves free devices unused for this long lets others pass for ``PATIENCE_S``. Its maker
#: should take them at its next reading of the queue.
UNUSED_AFTER_S = 5.0

#: The maker of a ticket that is still being created after this time has died.
TICKET_CREATION_LIMIT_S = 60.0

#: Pause before the second attempt to open a lock file whose creator has not set its mode yet; grows linearly.
LOCK_FILE_RETRY_S = 0.002

# Other processes on leased boards (occupancy).

#: Pauses between two inspections of the boards: doubled after each, up to the longest. The driver frees the
#: memory of an ended process within a second or two, and an inspection costs it about a millisecond.
OCCUPANCY_POLL_FIRST_S, OCCUPANCY_POLL_LONGEST_S = 0.05, 1.0

#: How long the driver may list a process that has ended. One that it lists for longer is alive in a process
#: namespace that is not visible from here.
ENDED_PROCESS_LISTED_S = 2.0
