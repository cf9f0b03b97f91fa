# SPDX-License-Identifier: Apache-2.0
"""The CPU model: its arithmetic by hand, and its CPU time against psutil's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.errors import MeterDoesNotApply
from pytest_llenergy.meters.base import Targets
from pytest_llenergy.meters.estimate import (
    AVERAGE_W,
    GROUPS,
    HIGHEST_W,
    LOWEST_W,
    EstimateMeter,
    modelled_energy_j,
    open_estimate,
    read_cpu_time,
    read_root_cgroup_busy_s,
)

pytestmark = pytest.mark.clock


@pytest.mark.parametrize(
    ("watts", "cpus", "elapsed_s", "busy_s", "joules"),
    [
        (AVERAGE_W, 4, 10.0, 0.0, 29.6),
        (AVERAGE_W, 4, 10.0, 40.0, 140.0),
        (AVERAGE_W, 4, 10.0, 5.0, 43.4),
        (LOWEST_W, 2, 1.0, 1.0, 2.14),
        (HIGHEST_W, 2, 1.0, 1.0, 11.62),
    ],
)
def test_the_model_interpolates_between_idle_and_busy_power(
    watts: tuple[float, float], cpus: int, elapsed_s: float, busy_s: float, joules: float
) -> None:
    assert modelled_energy_j(watts, cpus, elapsed_s, busy_s) == pytest.approx(joules)


def test_the_domain_is_marked_as_an_estimate_of_host_processors() -> None:
    meter = EstimateMeter()
    (domain,) = meter.domains
    assert (domain.name, domain.kind, domain.scope) == ("cpu:host", "estimated", "host processors")
    assert domain.info(meter.name).accuracy == (
        f"0.45-3.04 W idle and 1.69-8.58 W busy per logical CPU ({psutil.cpu_count()})"
    )


def test_readings_are_at_most_one_kernel_tick_old() -> None:
    (meter,) = open_estimate(Targets())
    (domain,) = meter.domains
    assert (domain.update_period_s, domain.max_age_s) == (0.01, 0.01)


@pytest.mark.parametrize("busy_share", [0.0, 0.3, 1.0])
def test_the_limits_are_the_extreme_cpu_families_and_contain_the_estimate(busy_share: float) -> None:
    cpus = psutil.cpu_count() or 1
    elapsed_s = 20.0
    busy_s = busy_share * cpus * elapsed_s
    point = modelled_energy_j(AVERAGE_W, cpus, elapsed_s, busy_s)
    low, high = EstimateMeter().domains[0].limits(point, elapsed_s)
    assert low < point < high
    assert low == pytest.approx(modelled_energy_j(LOWEST_W, cpus, elapsed_s, busy_s))
    assert high == pytest.approx(modelled_energy_j(HIGHEST_W, cpus, elapsed_s, busy_s))


def host_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.steal - times.guest - times.guest_nice)


def spin(cpu_s: float) -> None:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


Seconds = tuple[float, float]
"""Elapsed time and busy CPU time of the host."""


def joules(cpu_s: float, sleep_s: float) -> tuple[float, Seconds, Seconds]:
    """Return the metered energy of some work and sleep, with lower and upper bounds of its seconds."""
    meter = EstimateMeter()

    def seconds() -> Seconds:
        return time.monotonic(), host_busy_s()

    outer = seconds()
    (before,) = meter.read()
    inner = seconds()
    spin(cpu_s)
    time.sleep(sleep_s)
    inner_end = seconds()
    (after,) = meter.read()
    outer_end = seconds()
    assert isinstance(before, float)
    assert isinstance(after, float)
    least, most = (
        (end[0] - begin[0], end[1] - begin[1]) for begin, end in ((inner, inner_end), (outer, outer_end))
    )
    return after - before, least, most


@pytest.mark.parametrize(("cpu_s", "sleep_s"), [(0.8, 0.0), (0.0, 0.4)])
def test_busy_seconds_cost_the_difference_between_busy_and_idle_power(cpu_s: float, sleep_s: float) -> None:
    energy_j, least, most = joules(cpu_s, sleep_s)
    cpus = psutil.cpu_count() or 1
    # Both sides count ticks of 10 ms on every CPU.
    slack_j = (3.5 - 0.74) * 0.05 * cpus
    low_j, high_j = (cpus * 0.74 * elapsed_s + (3.5 - 0.74) * busy_s for elapsed_s, busy_s in (least, most))
    assert low_j - slack_j <= energy_j <= high_j + slack_j
    # The CPU time of this process is included, whatever other processes did.
    assert energy_j - cpus * 0.74 * least[0] >= (3.5 - 0.74) * cpu_s - slack_j


def test_the_model_does_not_apply_to_gpus() -> None:
    with pytest.raises(MeterDoesNotApply, match=r"^estimate: models the CPU only"):
        open_estimate(Targets(("GPU-a",)))


def group(root: Path, name: str, *, events: bool = False) -> Path:
    path = root / name
    path.mkdir()
    stat = "usage_usec 9000001\nuser_usec 1500000\nsystem_usec 250001\n"
    (path / "cpu.stat").write_text(stat)
    if events:
        (path / "cgroup.events").write_text("populated 1\n")
    return path


def test_the_root_cgroup_reports_busy_time_in_microseconds(tmp_path: Path) -> None:
    assert read_cpu_time([group(tmp_path, "root")]).busy_s == pytest.approx(1.750001)


def test_the_cgroup_of_a_container_is_not_taken_for_the_host(tmp_path: Path) -> None:
    assert read_root_cgroup_busy_s([tmp_path / "none", group(tmp_path, "container", events=True)]) is None
    assert read_cpu_time([]).busy_s == pytest.approx(host_busy_s(), abs=1)


def test_the_root_cgroup_counts_the_same_time_as_the_host() -> None:
    before_s, busy_s, after_s = host_busy_s(), read_root_cgroup_busy_s(GROUPS), host_busy_s()
    if busy_s is None:
        pytest.skip("the root cgroup is not visible")
    # Each of the five CPU states is truncated to ticks of 10 ms.
    assert before_s - 0.05 <= busy_s <= after_s + 0.05


def test_cpu_time_includes_the_work_of_this_process() -> None:
    before, own_s = read_cpu_time(), time.process_time()
    while time.process_time() - own_s < 0.3:
        pass
    after = read_cpu_time()
    # Ticks of 10 ms on every CPU.
    assert after.busy_s - before.busy_s >= 0.3 - 0.02 * (os.cpu_count() or 1)
    assert after.stolen_s >= before.stolen_s >= 0
