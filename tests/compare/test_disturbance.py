# SPDX-License-Identifier: Apache-2.0
"""Disturbed rounds: known effects are regressed out, unknown ones hold the verdict back."""

from __future__ import annotations

from math import exp
from random import Random

import msgspec
import pytest

from pytest_llenergy.compare.disturbance import correct_for_load, find_disturbance, load_of_others
from pytest_llenergy.compare.statistics import PAIRS, STORED, Sample, compare_samples
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Flag, Record

from .runs import record_of, report_of, round_of
from .test_comparison import compared


def disturbed(
    random: Random, rounds: int, *, level: float = 1.0, slope: float = 0.3, noise: float = 0.01
) -> Sample:
    """Rounds that other processes disturb, each core by ``slope``."""
    cores = [random.expovariate(2.0) for _ in range(rounds)]
    values = [100 * level * exp(slope * load + random.gauss(0, noise)) for load in cores]
    return Sample(tuple(values), pairs=tuple(range(rounds)), load=tuple(cores))


def test_slope_within_the_sides_is_recovered_and_not_mistaken_for_their_difference() -> None:
    """By hand: 0.1 per unit on both sides, the head 0.05 above, and disturbed more."""
    x, y = [0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0, 6.0]
    jitter = [0.001, -0.001, 0.0, -0.001, 0.001]
    base = [0.1 * each + by for each, by in zip(x, jitter, strict=True)]
    head = [0.05 + 0.1 * each + by for each, by in zip(y, jitter, strict=True)]
    done = correct_for_load(base, head, x, y)
    for one, other in zip(done.base, done.head, strict=True):
        assert other - one == pytest.approx(0.05)
    # s^2 = sum of squared residuals / (10 - 2 - 1); the standard error is s / sqrt(20), times 2 apart.
    assert done.error == pytest.approx(2 * (8e-6 / 7 / 20) ** 0.5)
    assert done.note.startswith("corrected for CPU use of other processes (10.0% per core)")


def test_covariate_without_an_effect_changes_nothing() -> None:
    random = Random(1)
    for _ in range(200):
        base, head = (disturbed(random, 12, slope=0.0, noise=0.02) for _ in range(2))
        plain = [side._replace(load=()) for side in (base, head)]
        found = compare_samples(base, head, design=PAIRS)
        if not found.corrections:
            assert found == compare_samples(plain[0], plain[1], design=PAIRS)


def test_correction_turns_an_inconclusive_change_into_a_regression() -> None:
    random = Random(2)
    corrected, raw = [], []
    for _ in range(50):
        base, head = disturbed(random, 12), disturbed(random, 12, level=1.3)
        corrected.append(compare_samples(base, head, design=PAIRS))
        raw.append(compare_samples(base._replace(load=()), head._replace(load=()), design=PAIRS))
    assert sum(each.verdict == "regressed" for each in corrected) == 50
    assert sum(each.verdict == "regressed" for each in raw) < 48
    assert all(each.ratio == pytest.approx(1.3, rel=0.03) for each in corrected)
    widths = [(each.high or 9) / (each.low or 1) for each in corrected]
    assert max(widths) < 1.1


def test_correction_raises_no_alarm_in_a_suite_without_changes() -> None:
    random = Random(3)
    for _ in range(300):
        base, head = disturbed(random, 12), disturbed(random, 12)
        assert compare_samples(base, head, design=STORED).verdict in ("unchanged", "inconclusive")


def moved(sample: Sample, cores: float, *, slope: float = 0.3) -> Sample:
    """The same rounds with so many more cores of others."""
    loads = tuple(each + cores for each in sample.load)
    values = tuple(value * exp(slope * cores) for value in sample.values)
    return sample._replace(values=values, load=loads)


def test_disturbance_beyond_the_rounds_of_the_other_side_allows_no_verdict() -> None:
    """The effect of three more cores is not known from rounds with half a core."""
    random = Random(4)
    base, head = disturbed(random, 12), moved(disturbed(random, 12), 3.0)
    found = compare_samples(base, head, design=STORED)
    assert (found.verdict, found.corrections) == ("inconclusive", ())
    assert "by itself, but the sides differ in the CPU use of other processes; " in found.reason


def test_the_load_of_rounds_is_in_cores_and_must_be_known_for_all() -> None:
    rounds = [round_of(1.0, other_cpu_s=3.0, stolen_cpu_s=1.0), round_of(1.0, other_cpu_s=1.0)]
    assert load_of_others(rounds) == (2.0, 0.5)
    assert load_of_others([*rounds, round_of(1.0)]) == ()


def on_domain(record: Record, domain: str) -> Record:
    meters = [msgspec.structs.replace(record.meters[0], domain=domain)]
    return msgspec.structs.replace(record, meters=meters)


def with_flag(name: str, detail: str, count: int, domain: str = "package-0", **changes: float) -> Record:
    rounds = [round_of(each, **changes) for each in (10.0, 10.02, 9.97, 10.01, 9.98, 10.02)]
    flag = Flag(name=name, severity="warning", detail=detail)
    rounds[:count] = [msgspec.structs.replace(each, flags=[flag]) for each in rounds[:count]]
    return on_domain(record_of(rounds=rounds), domain)


def verdict_against(head: Record, factor: float = 1.0) -> Comparison:
    joules = tuple(factor * each for each in (10.0, 10.02, 9.97, 10.01, 9.98, 10.02))
    base = msgspec.structs.replace(record_of(joules=joules), meters=head.meters)
    (found,) = compared(report_of(base), report_of(head)).comparisons
    return found


@pytest.mark.parametrize(
    ("name", "detail", "cause"),
    [
        ("contended", "other processes used 1.50 cores", "others used the CPU"),
        ("contended", "the hypervisor gave other guests 0.50 cores", "others used the CPU"),
        (
            "throttled",
            "GPU-1: held back by thermal-hardware 80% of the round",
            "a GPU was throttled by heat",
        ),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.8, 1.2])
def test_majority_of_disturbed_rounds_allows_no_verdict(
    name: str, detail: str, cause: str, factor: float
) -> None:
    found = verdict_against(with_flag(name, detail, 4), factor)
    assert found.verdict == "inconclusive"
    assert f"by itself, but {cause} during 4 of 6 rounds of head" in found.reason
    half = verdict_against(with_flag(name, detail, 3), factor)
    assert half.verdict != "inconclusive"
    assert half.notes == found.notes == [], "half of the rounds are not most of them"


def test_power_cap_is_part_of_the_workload() -> None:
    record = with_flag("throttled", "GPU-1: held back by power-cap 80% of the round", 6)
    assert verdict_against(record).verdict == "unchanged"


@pytest.mark.parametrize("domain", ["gpu:GPU-1", "n2/gpu:GPU-1"])
def test_other_processes_do_not_matter_to_a_gpu(domain: str) -> None:
    record = with_flag("contended", "other processes used 1.50 cores", 6, domain=domain)
    assert verdict_against(record).verdict == "unchanged"


def test_other_processes_hold_nothing_back_if_rounds_alternate() -> None:
    record = with_flag("contended", "other processes used 1.50 cores", 6)
    assert find_disturbance(record, record, load_matters=False) is None
    assert find_disturbance(record, record, load_matters=True) is not None
    hot = with_flag("throttled", "GPU-1: held back by thermal-hardware 80% of the round", 6)
    assert find_disturbance(hot, hot, load_matters=False) is not None


def test_correction_is_a_note_of_the_comparison() -> None:
    random = Random(6)
    reports = []
    for _ in range(2):
        sample = disturbed(random, 12)
        rounds = [
            round_of(joules, other_cpu_s=2 * cores)
            for joules, cores in zip(sample.values, sample.load, strict=True)
        ]
        reports.append(report_of(on_domain(record_of(rounds=rounds), "package-0")))
    (found,) = compared(reports[0], reports[1]).comparisons
    assert found.verdict == "unchanged"
    assert found.noise is not None
    assert found.noise < 0.03
    assert any(note.startswith("corrected for CPU use of other processes (") for note in found.notes)
