# SPDX-License-Identifier: Apache-2.0
"""Time limits and polling intervals between hosts, in seconds. Those of a launcher are in its module."""

from __future__ import annotations

# Connections

#: Interval of the beats that both sides of a control connection send, and how long a side may be silent
#: before the other one gives it up: three beats.
BEAT_S, MISSED_S = 1.0, 3.0
#: Time limit for a connection to prove that it knows the secret, and interval of the checks for silent ones.
AUTHENTICATION_TIMEOUT_S, AUTHENTICATION_POLL_S = 5.0, 0.5
#: Time limit for an agent to reach pytest, and the pause before it tries all addresses again.
CONNECT_TIMEOUT_S, CONNECT_RETRY_S = 10.0, 0.2
#: How long an agent waits for pytest, which may wait for the agents of other hosts, to begin with beats.
FIRST_BEAT_S = 60.0
#: Interval of the checks whether an expected connection can no longer come.
EXPECT_POLL_S = 0.02

# Agents

#: Time limit for the first description of a host, which opens its driver, and for one that opens its meters.
DESCRIBE_TIMEOUT_S, METERS_TIMEOUT_S = 60.0, 120.0
#: Time limit for an answer of open meters, which may have to wait for a slow counter.
METER_ANSWER_TIMEOUT_S = 30.0
#: Time limit for an agent to close its services. After it the guard of the agent kills what is left, except
#: for a process that puts back the settings of boards.
AGENT_CLOSE_TIMEOUT_S = 0.7
#: Time limit for a connection to an address of another host, which a firewall may drop, and for further ones
#: once one address has answered.
ROUTE_TIMEOUT_S, OTHER_ROUTES_TIMEOUT_S = 5.0, 0.2
