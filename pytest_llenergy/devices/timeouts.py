# SPDX-License-Identifier: Apache-2.0
"""Every time limit and polling interval of this package, in seconds.

How long a test waits for its devices is not here: users set it with ``--energy-lease-timeout``.
"""

from __future__ import annotations

# Process that queries the driver (inventory).

#: A driver that does not answer must not block the start or the end of a run for longer than this.
QUERY_TIMEOUT_S = 30.0

#: How long a killed process may take to end, which a hanging driver prevents.
KILL_TIMEOUT_S = 1.0

# Leases (locks).

#: A waiter tries its locks again after the first pause; each pause is longer than the last by the factor, up
#: to the longest. So a device that passes from one test to the next stays unused for 0.1 s on average, and a
#: waiter for one of eight GPUs takes 0.14 % of a core.
POLL_FIRST_S, POLL_LONGEST_S, POLL_GROWTH = 0.02, 0.2, 1.5

#: A request that finds no free devices for this long locks their queues. Shorter waits end by themselves, and
#: who came later does not overtake.
QUEUE_AFTER_S = 0.25

#: A waiting test reports the reason after this time for the first time, and then at this interval.
WAIT_MESSAGE_FIRST_S, WAIT_MESSAGE_EVERY_S = 1.0, 5.0

# Other processes on leased boards (occupancy).

#: Pauses between two inspections of the boards: doubled after each, up to the longest. The driver frees the
#: memory of an ended process within a second or two, and an inspection costs it about a millisecond.
OCCUPANCY_POLL_FIRST_S, OCCUPANCY_POLL_LONGEST_S = 0.05, 1.0

#: How long the driver may list a process that has ended. One that it lists for longer is alive in a process
#: namespace that is not visible from here.
ENDED_PROCESS_LISTED_S = 2.0
