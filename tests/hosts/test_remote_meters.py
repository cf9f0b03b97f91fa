# SPDX-License-Identifier: Apache-2.0
"""Energy of other hosts: real agents with stand-ins of NVML, whose true energy is known on pytest's clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import astuple

from pytest_llenergy.errors import MeterError, WorkerError
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset
from pytest_llenergy.hosts.remote_meters import open_remote_meters
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import MS
from .agents import needs_another_host
from .metered import (
    MeteredHost,
    Surges,
    measure_surges,
    measure_until_failure,
    metered_hosts,
    scores_of,
    share_within,
)

#: What the two stand-ins are called in records.
FIRST, SECOND = "n1/gpu:GPU-n1", "n2/gpu:GPU-n2"

#: How wrong, or how uncertain, the clock of n2 is made (nanoseconds).
WRONG_NS = 10 * MS


class WrongLine(ClockLine):
    """Exchanges whose remote readings are 10 ms too late."""

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        return super().add([replace(each, remote_ns=each.remote_ns + WRONG_NS) for each in exchanges])


class SlowLine(ClockLine):
    """Exchanges over a network that takes 20 ms for both ways, of which either takes any part."""

    random = Random(5)
    last_ns = 0

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        best = min(exchanges, key=lambda each: each.received_ns - each.sent_ns)
        if best.sent_ns < self.last_ns + 4 * WRONG_NS:
            return self.offset(best.sent_ns)
        self.last_ns = best.sent_ns
        there_ns = self.random.randrange(2 * WRONG_NS)
        back_ns = 2 * WRONG_NS - there_ns
        slow = replace(best, sent_ns=best.sent_ns - there_ns, received_ns=best.received_ns + back_ns)
        return super().add([slow])


class UncertainLine(ClockLine):
    """Exchanges that leave 10 ms on either side of the offset."""

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        return super().add(
            [
                replace(each, sent_ns=each.sent_ns - WRONG_NS, received_ns=each.received_ns + WRONG_NS)
                for each in exchanges
            ]
        )


class WatchedLine(ClockLine):
    """Keeps when the clocks were last compared."""

    compared_ns = 0

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        self.compared_ns = exchanges[0].sent_ns
        return super().add(exchanges)


class Reported(Surges):
    """Ranks report a round after it, with moments of their own clocks that are mapped then."""

    def timeline(self) -> Timeline:
        found = super().timeline()
        for host in self.hosts:
            assert isinstance(host.client.clock, WatchedLine)
            assert host.client.clock.compared_ns > found.end_ns
        return found


#: Rounds that are enough for shares of offsets that are drawn.
MANY_ROUNDS = 20


def give_line(host: MeteredHost, line: ClockLine) -> None:
    host.client.clock = line
    host.client.exchange()


def require_coverage(rounds: tuple[int, int], least: float, tmp_path: Path, nvml_library: Path) -> None:
    """Require 2u to cover the truth in a share of rounds with the true clock, and with an uncertain one.

    What a wrong clock does, and an uncertain one without its term, is shown by windows
    (``test_window_truth``): rounds lie between quiet gaps, which hide a shift of 10 ms.
    """
    good_rounds, slow_rounds = rounds
    with metered_hosts(tmp_path, nvml_library) as hosts:
        found, work = measure_surges(hosts, good_rounds, seed=1)
        good = {name: scores_of(found.rounds, work, name) for name in (None, FIRST, SECOND)}
        give_line(hosts[1], SlowLine())
        found, work = measure_surges(hosts, slow_rounds, seed=2)
        slow = scores_of(found.rounds, work, SECOND)
    shares = {
        name or "sum": share_within([each.with_clock for each in scores]) for name, scores in good.items()
    }
    with_clock = share_within([each.with_clock for each in slow])
    without_clock = share_within([each.without_clock for each in slow])
    print(f"{good_rounds} windows within 2u: {shares}")
    print(f"n2 with an offset known to ±10 ms: {with_clock:.3f}, without clock_j {without_clock:.3f}")
    assert min(shares.values()) >= least
    assert with_clock >= least
    for scores in good.values():
        assert all(each.with_clock <= 4 for each in scores)


@needs_another_host
@pytest.mark.clock
@pytest.mark.slow
def test_the_truth_is_covered(tmp_path: Path, nvml_library: Path) -> None:
    """Two standard uncertainties cover 95 %; of few windows, more may be outside by chance."""
    require_coverage((5, 6), 0.6, tmp_path, nvml_library)


@needs_another_host
@pytest.mark.slow
@pytest.mark.clock
def test_two_hundred_windows_are_covered(tmp_path: Path, nvml_library: Path) -> None:
    require_coverage((200, 100), 0.95, tmp_path, nvml_library)


@pytest.mark.clock
def test_rounds_of_two_hosts_have_all_that_those_of_one_have(tmp_path: Path, nvml_library: Path) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        for host in hosts:
            give_line(host, WatchedLine())
        found, work = measure_surges(hosts, 3, Reported, longest_s=0.3)
    for round_, truths in zip(found.rounds, work.truths, strict=True):
        assert list(round_.by_domain) == [FIRST, SECOND]
        assert [flag.name for flag in round_.flags if flag.severity == "invalid"] == []
        assert round_.energy_j == pytest.approx(sum(true for true, _ in truths), rel=0.05)
        prefill, decode = round_.phases
        assert prefill.energy_j == pytest.approx(sum(true for _, true in truths), rel=0.05)
        assert (prefill.energy_j or 0.0) + (decode.energy_j or 0.0) == pytest.approx(round_.energy_j)
        assert round_.idle_power_w == pytest.approx(160, rel=0.05)
        assert round_.temperature_start_c == 40
        assert round_.phase is not None
        assert round_.terms is not None
        # On a busy machine readings of the other clock take longer.
        assert 0 < round_.terms.clock_j < 0.3
    assert [meter.domain for meter in found.meters] == [FIRST, SECOND]
    assert found.load_average is not None


def test_an_uncertain_clock_counts_in_the_joules_of_the_other_hosts_too(
    tmp_path: Path, nvml_library: Path
) -> None:
    """Its ranks may have marked the edges of the round."""
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        give_line(hosts[1], UncertainLine())
        found, _ = measure_surges(hosts, 1)
    (round_,) = found.rounds
    # Of steps by some hundred watts, at moments that are known to 6 ms.
    for name in (FIRST, SECOND):
        terms = round_.by_domain[name].terms
        assert terms is not None
        assert terms.clock_j > 0.5


def test_domains_of_a_single_host_are_named_after_it_too(tmp_path: Path, nvml_library: Path) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        found, _ = measure_surges(hosts[1:], 1)
    assert list(found.rounds[0].by_domain) == [SECOND]


def test_a_host_without_a_meter_leaves_no_sum_but_the_other_domains(
    tmp_path: Path, nvml_library: Path
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False, without_meter=["n2"]) as hosts:
        found, work = measure_surges(hosts, 1)
        with pytest.raises(MeterError, match=r"^n2: .*GPU-none"):
            open_remote_meters("rounds", [(host.client, [host.uuid]) for host in hosts], ["nvml"])
    (round_,) = found.rounds
    assert list(round_.by_domain) == [FIRST]
    assert round_.by_domain[FIRST].energy_j == pytest.approx(work.truths[0][0][0], rel=0.1)
    assert (round_.energy_j, round_.energy_u_j, round_.idle_power_w) == (None, None, None)
    assert (round_.reason or "").startswith("n2: no meter for GPUs GPU-none: ")
    assert {(phase.energy_j, phase.reason) for phase in round_.phases} == {(None, round_.reason)}
    assert "unmeasured" in [flag.name for flag in round_.flags]
    assert [(flag.name, flag.detail) for flag in found.flags if flag.name == "meter"] == [
        ("meter", round_.reason)
    ]


def test_a_lost_host_without_ranks_ends_the_measurement_and_the_rounds_are_kept(
    tmp_path: Path, nvml_library: Path
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        lost = hosts[1].client

        def kill(number: int) -> None:
            if number == 1:
                os.kill(lost.facts.pid, signal.SIGKILL)

        found, work = measure_until_failure(hosts, 12, r"^n2: its agent has closed", during=kill)
        with pytest.raises(WorkerError, match=r"^n2: "):
            open_remote_meters("rounds", [(lost, [])])
    assert [meter.domain for meter in found.meters] == [FIRST, SECOND]
    first, second = found.rounds
    assert first.energy_j == pytest.approx(sum(true for true, _ in work.truths[0]), rel=0.1)
    assert is_valid(first)
    require_lost(second, lost.lost, work.truths[1][0][0])
    assert ("host", "invalid", lost.lost) in [astuple(flag) for flag in second.flags]
    # The only valid round.
    assert (found.metrics["energy_j"].value, found.metrics["energy_j"].n) == (first.energy_j, 1)


def test_a_host_that_is_lost_while_ranks_work_leaves_the_joules_of_the_others(
    tmp_path: Path, nvml_library: Path
) -> None:
    """Ranks report nothing, so that the round reaches from its start to the error."""
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        lost, begin_ns, end_ns = hosts[1].client, 0, 0

        def fail(number: int) -> None:
            nonlocal begin_ns, end_ns
            begin_ns = time.monotonic_ns()
            if number == 2:
                os.kill(lost.facts.pid, signal.SIGKILL)
                time.sleep(0.3)
                end_ns = time.monotonic_ns()
                raise WorkerError("n2: its agent has closed its connection; rank 1 of 2 ended with it")

        found, _ = measure_until_failure(hosts, 12, r"; rank 1 of 2 ended with it$", during=fail)
        true_j = hosts[0].true_j(begin_ns, end_ns)
    *finished, last = found.rounds
    assert [is_valid(each) and each.energy_j is not None for each in finished] == [True, True]
    require_lost(last, lost.lost, true_j)
    assert [astuple(flag)[:2] for flag in last.flags if flag.severity == "invalid"] == [
        ("unfinished", "invalid"),
        ("host", "invalid"),
    ]
    assert last.duration_s == pytest.approx((end_ns - begin_ns) / 1e9, abs=0.05)


def test_ranks_that_fail_leave_the_joules_of_all_hosts(tmp_path: Path, nvml_library: Path) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:

        def fail(number: int) -> None:
            if number == 1:
                time.sleep(0.3)
                raise WorkerError("rank 1 of 2 (n2): was killed by SIGKILL")

        found, _ = measure_until_failure(hosts, 12, r"was killed by SIGKILL$", during=fail)
    first, last = found.rounds
    assert is_valid(first)
    assert [flag.name for flag in last.flags if flag.severity == "invalid"] == ["unfinished"]
    joules = [last.by_domain[name].energy_j or 0.0 for name in (FIRST, SECOND)]
    assert last.energy_j == pytest.approx(sum(joules))
    assert min(joules) > 0


def test_a_meter_that_stops_answering_leaves_the_other_domains(tmp_path: Path, nvml_library: Path) -> None:
    """Its agent lives, so that the measurement goes on."""
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        world = hosts[1].world
        assert world is not None

        def lose_board(number: int) -> None:
            if number == 1:
                world.update(0, lost=True)

        found, work = measure_surges(hosts, 3, during=lose_board)
        assert hosts[1].client.lost is None
    first, *others = found.rounds
    assert first.energy_j == pytest.approx(sum(true for true, _ in work.truths[0]), rel=0.1)
    for round_, truths in zip(others, work.truths[1:], strict=True):
        assert (round_.energy_j, round_.reason) == (None, "nvml: GPU is lost (GPU-n2)")
        assert round_.by_domain[FIRST].energy_j == pytest.approx(truths[0][0], rel=0.1)
        assert round_.by_domain[SECOND].reason == round_.reason
        assert is_valid(round_)


def require_lost(round_: Round, reason: str | None, true_j: float) -> None:
    """Require joules of n1 alone in a round in which n2 was lost."""
    assert reason is not None
    assert (round_.energy_j, round_.energy_u_j, round_.reason) == (None, None, reason)
    assert round_.by_domain[FIRST].energy_j == pytest.approx(true_j, rel=0.1)
    assert (round_.by_domain[SECOND].energy_j, round_.by_domain[SECOND].reason) == (None, reason)
    assert not is_valid(round_)


def test_clocks_that_contradict_each_other_make_the_round_invalid(tmp_path: Path, nvml_library: Path) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:

        def jump(number: int) -> None:
            now_ns = time.monotonic_ns()
            if number == 1:
                hosts[1].client.clock.add([Exchange(now_ns - 1000, now_ns + 50 * MS, now_ns)])

        found, _ = measure_surges(hosts, 3, during=jump)
    flags = [[flag for flag in round_.flags if flag.name == "host"] for round_ in found.rounds]
    assert [len(each) for each in flags] == [0, 1, 0]
    assert flags[1][0].severity == "invalid"
    assert flags[1][0].detail.startswith("n2 has a clock that moved by 50 ms against pytest's")


def cpu_time_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process: see clock_getcpuclockid(3)."""
    return time.clock_gettime_ns((~pid << 3) | 2)


@pytest.mark.clock
@pytest.mark.slow
def test_an_agent_hardly_uses_the_cpu_while_work_runs(tmp_path: Path, nvml_library: Path) -> None:
    """The limit for a real board, which ticks ten times a second, is 1 % of a core."""
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        for host in hosts:
            assert host.world is not None
            host.world.update(0, latch_ns=100 * MS, latch_jitter_ns=0)
        with_work: list[float] = []

        def work(number: int) -> None:
            pids = [host.client.facts.pid for host in hosts]
            before, begin_ns = [cpu_time_ns(pid) for pid in pids], time.monotonic_ns()
            time.sleep(2.0)
            elapsed_ns = time.monotonic_ns() - begin_ns
            used = [cpu_time_ns(pid) - each for pid, each in zip(pids, before, strict=True)]
            with_work.extend(each / elapsed_ns for each in used)

        measure_surges(hosts, 2, longest_s=2.2, during=work)
    print(f"shares of a core: {', '.join(f'{share:.3%}' for share in with_work)}")
    # Of both rounds the lower: other processes make the caches slower.
    assert max(map(min, zip(with_work[:2], with_work[2:], strict=True))) <= 0.01
