# SPDX-License-Identifier: Apache-2.0
"""The prompts of the benchmarks, in place of the plugin's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.plugin.default_prompts import Prompts


@pytest.fixture
def prompts() -> Prompts:
    """The lines of ``prompts.txt``."""
    lines = Path(__file__).with_name("prompts.txt").read_text().splitlines()
    return Prompts(line for line in lines if not line.startswith("#"))
