# SPDX-License-Identifier: Apache-2.0
"""Agents whose NVML is a stand-in, one of them with a clock of its own, and work of known energy on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.hosts.remote_meters import open_remote_meters
from pytest_llenergy.measure.experiment import Experiment, measure_on_hosts
from pytest_llenergy.measure.host_meters import HostMeters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import MS
from ..measure.marks import iteration, rank_of
from ..measure.plans import round_plan
from ..nvml_sim import Board, World
from .agents import SHIFT_S, AgentGang

#: Power at rest, in prefill and in decode, by host.
POWERS_W = {"n1": (100.0, 500.0, 300.0), "n2": (60.0, 650.0, 420.0)}

#: The counter of n2 ticks so often that an edge moved by 10 ms always meets a tick.
BOARDS = {
    "n1": Board(latch_ns=20 * MS, latch_jitter_ns=MS),
    "n2": Board(latch_ns=5 * MS, latch_jitter_ns=MS // 4),
}

#: How long ahead the power is planned. A busy machine may hold up the process that plans it.
LEAD_NS = 30 * MS


@dataclass
class MeteredHost:
    """A host with one board; its clock is ``shift_ns`` ahead of pytest's."""

    client: RemoteHost
    world: World | None
    shift_ns: int = 0

    @property
    def uuid(self) -> str:
        return self.world.board(0).uuid if self.world is not None else "GPU-none"

    def schedule(self, watts: Sequence[float], moments_ns: Sequence[int]) -> None:
        """Let the power change at moments of pytest's clock."""
        for each_w, moment_ns in zip(watts, moments_ns, strict=True):
            if self.world is not None:
                self.world.set_power(0, each_w, moment_ns + self.shift_ns)

    def true_j(self, start_ns: int, end_ns: int) -> float:
        assert self.world is not None
        return self.world.true_energy_j(0, start_ns + self.shift_ns, end_ns + self.shift_ns)


@contextmanager
def metered_hosts(
    directory: Path, library: Path, *, shifted: bool = True, without_meter: Sequence[str] = ()
) -> Iterator[list[MeteredHost]]:
    """Start the agents n1, with pytest's clock, and n2, whose clock is ahead if ``shifted``."""
    with ExitStack() as end:
        worlds: list[World | None] = []
        shifts_ns = [0, SHIFT_S * 10**9 if shifted else 0]
        hosts = {}
        for (name, (idle_w, *_)), shift_ns in zip(POWERS_W.items(), shifts_ns, strict=True):
            home = directory / name
            home.mkdir()
            environment = {"LLENERGY_LOCK_DIR": str(home), "LLENERGY_CACHE_DIR": str(home)}
            if name in without_meter:
                worlds.append(None)
            else:
                board = replace(BOARDS[name], power_w=idle_w, uuid=f"GPU-{name}")
                begin_ns = time.monotonic_ns() + shift_ns - 10 * 10**9
                world = World(home / "world", [board], start_ns=begin_ns)
                worlds.append(world)
                environment |= world.environment(library.parent)
            hosts[name] = {"host": name if shift_ns else None, "environment": environment}
        gang = end.enter_context(closing(AgentGang(hosts)))
        yield [MeteredHost(*each) for each in zip(gang.hosts, worlds, shifts_ns, strict=True)]


@dataclass
class Surges:
    """Work of two phases of random length on all hosts, whose energy is known exactly."""

    hosts: Sequence[MeteredHost]
    seed: int = 0
    longest_s: float = 0.08
    during: Callable[[int], None] = lambda _: None
    peak_memory_bytes: int | None = None
    #: Energy of each host in each round: in total and in prefill.
    truths: list[list[tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def prepare_round(self) -> None:
        """Do nothing."""

    def work(self, iterations: int = 1) -> None:
        assert iterations == 1
        # Planned ahead, so that the power is exact for every reader.
        start_ns = time.monotonic_ns() + LEAD_NS
        border_ns = start_ns + round(self._random.uniform(0.4, 1.0) * self.longest_s * 1e9)
        end_ns = border_ns + round(self._random.uniform(0.4, 1.0) * self.longest_s * 1e9)
        for host in self.hosts:
            idle_w, prefill_w, decode_w = POWERS_W[host.client.name]
            host.schedule((prefill_w, decode_w, idle_w), (start_ns, border_ns, end_ns))
        self.during(len(self.truths))
        time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
        self.truths.append(
            [
                (host.true_j(start_ns, end_ns), host.true_j(start_ns, border_ns))
                if host.world is not None
                else (0.0, 0.0)
                for host in self.hosts
            ]
        )
        self._rank = rank_of(iteration(start_ns, end_ns, border_ns))

    def timeline(self) -> Timeline:
        return Timeline(ranks=(self._rank,))


def measure_surges(
    hosts: Sequence[MeteredHost], rounds: int, kind: type[Surges] = Surges, **options: Any
) -> tuple[Experiment, Surges]:
    """Measure so many rounds on all hosts."""
    workload = kind(hosts, **options)
    return measure_on_hosts(workload, *_plan(hosts, rounds)), workload


def measure_until_failure(
    hosts: Sequence[MeteredHost], rounds: int, message: str, **options: Any
) -> tuple[Experiment, Surges]:
    """Measure on all hosts until an error with this message, and return what is kept."""
    kept: list[Experiment] = []
    workload = Surges(hosts, **options)
    with pytest.raises(Exception, match=message):
        measure_on_hosts(workload, *_plan(hosts, rounds), on_failure=kept.append)
    (found,) = kept
    return found, workload


def _plan(hosts: Sequence[MeteredHost], rounds: int) -> tuple[RoundPlan, Sequence[HostMeters]]:
    meters = open_remote_meters("rounds", [(host.client, [host.uuid]) for host in hosts])
    return round_plan(rounds=rounds, warmup=0, gap_s=0.1, iterations=1, exact=True), meters


@dataclass(frozen=True)
class Score:
    """How many standard uncertainties an energy is off, with and without the term of the clock."""

    with_clock: float
    without_clock: float


def scores_of(rounds: Sequence[Round], workload: Surges, domain: str | None = None) -> list[Score]:
    """Return the scores of the sums of all rounds, or those of one domain."""
    found = []
    for round_, truths in zip(rounds, workload.truths, strict=True):
        part = round_ if domain is None else round_.by_domain[domain]
        names = [f"{host.client.name}/gpu:{host.uuid}" for host in workload.hosts]
        true_j = sum(true for name, (true, _) in zip(names, truths, strict=True) if domain in (None, name))
        assert part.energy_j is not None, part.reason
        assert part.energy_u_j is not None
        assert part.terms is not None
        error_j = abs(part.energy_j - true_j)
        without_j = (part.energy_u_j**2 - part.terms.clock_j**2) ** 0.5
        found.append(Score(error_j / part.energy_u_j, error_j / without_j))
    return found


def share_within(scores: Sequence[float]) -> float:
    """Return the share of scores within two standard uncertainties."""
    return sum(score <= 2 for score in scores) / len(scores)
