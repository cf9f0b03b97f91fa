# SPDX-License-Identifier: Apache-2.0
"""Twenty tests, each in a process started by ``accelerate launch``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORK = Path(__file__).with_name("work.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(WORK)]


@pytest.mark.parametrize("i", range(20))
def test_generate(i: int) -> None:
    subprocess.run(LAUNCH, check=True, capture_output=True)
