# SPDX-License-Identifier: Apache-2.0
"""Time limits and polling intervals between hosts, in seconds. Those of a launcher are in its module."""

from __future__ import annotations

#: Interval of beats, and how long a side may be silent before the other one gives it up: three beats.
BEAT_S, MISSED_S = 1.0, 3.0
#: For pytest to answer an agent, and for the proof that the other side knows the key: in pytest, and in an
#: agent, which waits while pytest accepts the agents of other hosts.
REACH_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, AGENT_HANDSHAKE_TIMEOUT_S = 3.0, 3.0, 30.0
#: Interval of the checks whether an expected agent can no longer come.
EXPECT_POLL_S = 0.02

#: For an answer about ranks, beyond what the request may wait for.
ANSWER_TIMEOUT_S = 40.0
#: For the description of a host, which opens its driver, and for answers of meters, which may have to wait
#: for several ticks of a slow counter.
METERS_TIMEOUT_S = 120.0
#: For an agent to end what it has started. After it its guard kills what is left.
AGENT_CLOSE_TIMEOUT_S = 0.7
