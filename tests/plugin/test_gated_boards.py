# SPDX-License-Identifier: Apache-2.0
"""Boards in the records of a compared run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]


def test_record_names_the_boards_of_its_test(
    suite: pytest.Pytester, nvml_children: Give, tmp_path: Path, read_report: Read
) -> None:
    nvml_children(World(tmp_path / "world", [Board(), Board()]))
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy_meter):\n"
        "    with energy_meter('x'):\n        pass\n"
    )
    suite.runpytest_subprocess("--energy-report", "--energy-meter=ten-watts").assert_outcomes(passed=1)
    report = read_report()
    (record,) = report["records"]
    (board,) = record["boards"]
    assert [board["uuid"]] == record["devices"]
    assert board in report["environment"]["gpus"]
    assert board["power_limit_w"] > 0
