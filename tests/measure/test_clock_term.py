# SPDX-License-Identifier: Apache-2.0
"""The uncertainty of a round whose moments were taken on the clock of another host, by known answers."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, sqrt
from random import Random

import msgspec
import pytest

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Variances, WindowEnergy, sum_energies
from pytest_llenergy.measure.accounting import account_round
from pytest_llenergy.measure.domain_rounds import account_domains
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Round, Terms

from ..energy.waves import MS, S, Sensor, Wave, domain, read_at
from .marks import account_here, iteration, measured_round

START, BORDER, END = 10 * S, 10 * S + 400 * MS, 11 * S
#: Idle at 50 W, 500 W in prefill and 200 W in decode.
WAVE = Wave(((9 * S, 50.0), (START, 500.0), (BORDER, 200.0), (END, 50.0)))
READS = range(9 * S + 5 * MS, 12 * S, MS)

#: Standard uncertainty of the offset of the clock.
U_NS, U_S = 2 * MS, 2e-3


def counter(name: str = "gpu:GPU-a", wave: Wave = WAVE) -> Series:
    return read_at(Sensor(wave, 20 * MS), READS, domain(name))


def elsewhere(measured: MeasuredRound | None = None) -> MeasuredRound:
    """Return a round whose moments come from another clock."""
    return replace(measured or measured_round(iteration(START, END, BORDER)), clock_u_ns=float(U_NS))


def clock_j(found: Round) -> float:
    assert found.terms is not None
    return found.terms.clock_j


def test_each_edge_of_a_round_exchanges_the_power_on_its_two_sides() -> None:
    found = account_here(elsewhere(), [counter()])
    assert clock_j(found) == pytest.approx(U_S * hypot(450, 150), rel=0.01)
    here = account_here(measured_round(iteration(START, END, BORDER)), [counter()])
    assert clock_j(here) == 0
    assert found.energy_j == here.energy_j
    assert found.energy_u_j == pytest.approx(hypot(here.energy_u_j or 0.0, clock_j(found)))
    assert (found.energy_u_absolute_j or 0.0) > (here.energy_u_absolute_j or 0.0)
    gpu = found.by_domain["gpu:GPU-a"]
    assert gpu.terms is not None
    assert gpu.terms.clock_j == pytest.approx(clock_j(found))


def test_the_border_between_two_phases_is_an_edge_of_both() -> None:
    prefill, decode = account_here(elsewhere(), [counter()]).phases
    assert prefill.terms is not None
    assert decode.terms is not None
    assert prefill.terms.clock_j == pytest.approx(U_S * hypot(450, 300), rel=0.02)
    assert decode.terms.clock_j == pytest.approx(U_S * hypot(300, 150), rel=0.02)


def test_the_edges_of_a_phase_move_together_in_all_iterations() -> None:
    starts = [START + i * 250 * MS for i in range(4)]
    steps = [step for start in starts for step in ((start, 500.0), (start + 100 * MS, 200.0))]
    wave = Wave(((9 * S, 50.0), *steps, (END, 50.0)))
    parts = [iteration(start, start + 250 * MS, start + 100 * MS) for start in starts]
    found = account_here(elsewhere(measured_round(*parts)), [counter(wave=wave)])
    prefill, decode = found.phases
    assert prefill.terms is not None
    assert decode.terms is not None
    assert prefill.terms.clock_j == pytest.approx(U_S * hypot(450 + 3 * 300, 4 * 300), rel=0.05)
    assert decode.terms.clock_j == pytest.approx(U_S * hypot(4 * 300, 3 * 300 + 150), rel=0.05)
    assert clock_j(found) == pytest.approx(U_S * hypot(450, 150), rel=0.05)


def test_domains_of_a_host_share_its_clock_and_hosts_do_not() -> None:
    one = U_S * hypot(450, 150)
    assert clock_j(account_here(elsewhere(), [counter(), counter("gpu:GPU-b")])) == pytest.approx(
        2 * one, rel=0.01
    )
    hosts = [account_domains(elsewhere(), [counter(name)]) for name in ("a/gpu:GPU-a", "b/gpu:GPU-b")]
    found = account_round(elsewhere(), hosts)
    assert clock_j(found) == pytest.approx(sqrt(2) * one, rel=0.01)
    assert list(found.by_domain) == ["a/gpu:GPU-a", "b/gpu:GPU-b"]
    assert found.energy_j == pytest.approx(2 * 320, abs=2)


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_hosts_share_the_clock_of_the_one_that_marks_the_edges(hosts: int) -> None:
    """A rank of the first host marks one edge; each clock is off by up to ±1 ms against pytest's."""
    rng, bound_s, step_w = Random(hosts), 1e-3, 1000.0
    variance = (step_w * bound_s) ** 2 / 3
    each = sum_energies([WindowEnergy(1.0, Variances(clock=variance, marking=variance))])
    claimed_j = sum_energies([each] * hosts, one_clock=False).variances.terms().clock_j
    squares = 0.0
    for _ in range(5000):
        first_s, *others_s = (rng.uniform(-bound_s, bound_s) for _ in range(hosts))
        squares += sum(step_w * (first_s - other_s) for other_s in others_s) ** 2
    true_j = sqrt(squares / 5000)
    assert claimed_j >= true_j
    if hosts >= 4:
        assert claimed_j <= 1.5 * true_j


def test_the_round_of_many_hosts_has_the_whole_term_of_the_marking_clock() -> None:
    measured = replace(elsewhere(), marking_u_ns=float(U_NS))
    hosts = [account_domains(measured, [counter(f"n{i}/gpu:GPU-{i}")]) for i in range(4)]
    found = account_round(measured, hosts)
    one = U_S * hypot(450, 150)
    assert clock_j(found) == pytest.approx(hypot(4 * one, 2 * one), rel=0.01)
    terms = found.by_domain["n1/gpu:GPU-1"].terms
    assert terms is not None
    assert terms.clock_j == pytest.approx(sqrt(2) * one, rel=0.01)


def test_a_counter_of_the_work_alone_has_all_of_its_power_at_stake() -> None:
    series = Series("estimate", domain("cpu:processes", max_age_s=1e-5)._replace(rests=True))
    for moment in range(9 * S, 12 * S, MS):
        series.add(moment, moment, 30.0 * max(0, min(moment, END) - START) / 1e9)
    assert clock_j(account_here(elsewhere(), [series])) == pytest.approx(U_S * hypot(30, 30), rel=0.01)


def test_moments_that_are_off_by_no_more_than_the_bound_are_covered() -> None:
    """Any offset within ±10 ms is equally likely, and the counter ticks every 5 ms."""
    rng, bound_ns = Random(3), 10 * MS
    scores: list[tuple[float, float]] = []
    for _ in range(100):
        start_ns = START + rng.randrange(5 * MS)
        end_ns = start_ns + rng.randrange(100 * MS, 300 * MS)
        wave = Wave(((9 * S, 50.0), (start_ns, 500.0), (end_ns, 80.0)))
        series = read_at(Sensor(wave, 5 * MS), range(start_ns - 300 * MS, end_ns + 300 * MS, MS))
        off_ns = rng.randrange(-bound_ns, bound_ns)
        measured = replace(
            measured_round(iteration(start_ns + off_ns, end_ns + off_ns)), clock_u_ns=bound_ns / sqrt(3)
        )
        found = account_here(measured, [series])
        assert found.energy_j is not None
        assert found.energy_u_j is not None
        error_j = abs(found.energy_j - wave.joules(start_ns, end_ns))
        without_j = sqrt(found.energy_u_j**2 - clock_j(found) ** 2)
        scores.append((error_j / found.energy_u_j, error_j / without_j))
    assert sum(with_clock <= 2 for with_clock, _ in scores) >= 95
    assert sum(without <= 2 for _, without in scores) <= 85


def test_more_rounds_do_not_make_an_offset_smaller() -> None:
    found = account_here(elsewhere(), [counter()])
    few, many = (compute_metrics([found] * count, None)["energy_j"] for count in (4, 100))
    for metric in (few, many):
        assert metric.uncertainty is not None
        assert metric.uncertainty >= clock_j(found)
    alone = compute_metrics(
        [account_here(measured_round(iteration(START, END, BORDER)), [counter()])] * 100, None
    )
    assert (alone["energy_j"].uncertainty or 0.0) < clock_j(found)


def test_reports_of_one_host_need_no_such_term() -> None:
    stored = b'{"edges_j": 1.0, "outside_j": 0.0, "resolution_j": 0.0, "coverage_j": 0.0}'
    assert msgspec.json.decode(stored, type=Terms).clock_j == 0
