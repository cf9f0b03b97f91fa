# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that records which modules a run has imported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def pytest_unconfigure() -> None:
    Path(os.environ["IDLE_SPY"]).write_text(json.dumps(sorted(sys.modules)))
