# SPDX-License-Identifier: Apache-2.0
"""The clock of measurements, which a test cannot stop.

Tests replace functions of ``time``, and libraries such as freezegun replace them in every module that names
them; neither finds a ``partial``.
"""

from __future__ import annotations

import time
from functools import partial

monotonic = partial(time.monotonic)
monotonic_ns = partial(time.monotonic_ns)
sleep = partial(time.sleep)
