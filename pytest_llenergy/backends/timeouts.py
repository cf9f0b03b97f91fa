# SPDX-License-Identifier: Apache-2.0
"""Every time-out and polling interval of the backends, in seconds."""

from __future__ import annotations

#: Start another Python and look for modules, possibly on a slow disk.
PROBE_PYTHON_TIMEOUT_S = 60.0
#: How long the log of llama.cpp, which a thread of its own prints, may lag behind, and how often to look.
LOG_TIMEOUT_S, LOG_POLL_S = 2.0, 0.01

# Starting and stopping a server.

#: Time to start when ``timeout_s`` is not given.
SERVER_START_TIMEOUT_S = 540.0
#: Share of ``--energy-timeout`` for the start, so that the server's own error comes before the rank's.
SERVER_START_SHARE = 0.9
#: Interval of health checks while a server starts, and the limit of one check.
HEALTH_POLL_S, HEALTH_TIMEOUT_S = 0.1, 5.0
#: The first completion of a server, which may compile its kernels for it.
PROBE_TIMEOUT_S = 120.0
#: Time to exit after SIGTERM; then, for processes left behind, after SIGTERM and after SIGKILL, which takes
#: longer on a busy host or in a driver.
TERMINATE_TIMEOUT_S, LEFT_BEHIND_TIMEOUT_S, KILLED_TIMEOUT_S = 3.0, 0.5, 5.0
#: Time until a dying server, which closes its connections first, has exited.
EXIT_WAIT_S = 1.0

# Requests to a server.

#: A request whose answer is not a stream, and the end of a stream after its last event.
REQUEST_TIMEOUT_S, END_WAIT_S = 30.0, 0.5
