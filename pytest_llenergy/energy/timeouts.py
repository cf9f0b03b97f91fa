# SPDX-License-Identifier: Apache-2.0
"""Every time limit of the meters, in seconds.

How often meters are read is not here: see ``schedule`` and the file of each meter. How old or how far apart
readings may be is part of the arithmetic of each file.
"""

from __future__ import annotations

# Any meter (sampler, window)

#: One reading, before the driver counts as hanging. A working driver takes milliseconds, so this allows for a
#: loaded machine; each run waits once for a dead driver.
READING_TIMEOUT_S = 5.0
#: For a counter to tick, beyond the ticks that it is due to make: a counter that stands still for this long
#: cannot bracket a window.
TICK_TIMEOUT_S = 1.0
#: How often to look whether the counters have ticked: an update of the fastest counters takes about as long.
TICK_POLL_S = 0.002

# Self-check of a counter (selfcheck)

#: A counter that has not moved for this long cannot bracket a window.
STANDSTILL_S = 1.0
#: The check takes at least and at most this long: ten ticks of a counter with a period of 0.1 s or 0.25 s.
SHORTEST_CHECK_S, LONGEST_CHECK_S = 1.0, 2.5
#: How often to read the boards during the check, which bounds the error of a tick's time.
CHECK_POLL_S = 0.002

# Meters that check their counters when they open

#: A RAPL counter that has not moved for this long is broken: a hundred of its updates.
RAPL_STILL_S = 0.1

# The program of the meter ``command``

#: For its first line; a program may be an interpreter that imports first.
FIRST_LINE_TIMEOUT_S = 5.0
#: It counts as silent after several of its usual intervals without a line (``command.SILENT_INTERVALS``), and
#: at least this long, since a loaded machine delays lines.
MIN_SILENCE_S = 2.0
#: For it to end after SIGTERM or after it has closed its output, and for its output to be read.
PROGRAM_END_TIMEOUT_S = 2.0
