# SPDX-License-Identifier: Apache-2.0
"""Windows of ``energy_meter`` on several hosts, with real agents."""

from __future__ import annotations

import time
from pathlib import Path

from pytest_llenergy.energy.window import Measuring
from pytest_llenergy.hosts.clock import Exchange
from pytest_llenergy.hosts.remote_meters import open_remote_meters

from ..energy.waves import MS
from .metered import metered_hosts


def test_clocks_that_contradict_each_other_leave_a_window_without_joules(
    tmp_path: Path, nvml_library: Path
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        boards = [(host.client, [host.uuid]) for host in hosts]
        measuring = Measuring(open_remote_meters("windows", boards))
        measuring.start()
        with measuring.window("before"):
            time.sleep(0.3)
        with measuring.window("jump"):
            now_ns = time.monotonic_ns()
            hosts[1].client.clock.add([Exchange(now_ns - 1000, now_ns + 50 * MS, now_ns)])
            time.sleep(0.3)
        before, jump = measuring.windows
        assert [flag.name for flag in before.flags if flag.severity == "invalid"] == []
        assert before.energy_j > 0
        (flag,) = [flag for flag in jump.flags if flag.severity == "invalid"]
        assert flag.name == "host"
        assert flag.detail.startswith("n2 has a clock that moved by 50 ms against pytest's")
        assert jump.reason == flag.detail
        assert jump.by_domain["n1/gpu:GPU-n1"].energy_j is not None
        assert jump.by_domain["n2/gpu:GPU-n2"].energy_j is None
        measuring.stop()
