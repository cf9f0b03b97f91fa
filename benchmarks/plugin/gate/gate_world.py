# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds of two sides on a machine with noise, warm-up and offsets between sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from typing import Literal

from pytest_llenergy.compare.statistics import Sample

#: Order in which the rounds of the two sides are measured.
#: ``abba``: alternating pairs in one session. ``apart``: the same, but each stage in a separate session.
#: ``blocks``: all of the baseline, then all of the head, in one session. ``stored``: two sessions.
Order = Literal["abba", "apart", "blocks", "stored"]

#: Joules of a round without noise. The value does not affect the results.
LEVEL_J = 100.0


@dataclass(frozen=True)
class Machine:
    """Model of the logarithm of a round's energy. Parameters are shares and relative changes.

    ``noise`` is the standard deviation, of which ``memory`` is carried from one round to the next (AR(1)). A
    share ``outliers`` of all rounds is too high by an exponential variate with the mean ``outlier_size *
    noise``. While a session warms up the level rises by ``ramp`` (normal, ``ramp_sd``) with the time constant
    ``ramp_rounds``; each session has an offset with the standard deviation ``offset``.

    With ``degrees`` the noise is Student's t with so many degrees of freedom. A share ``spikes`` of all
    rounds is three times as high. Two clock states differ by ``states``; a round changes the state with the
    probability ``SWITCHES`` / 2. Other processes use ``load`` cores on average, exponentially distributed, of
    which each raises the energy by ``load_effect``; it is recorded as the CPU time of others is.
    """

    noise: float
    memory: float = 0.2
    outliers: float = 0.05
    outlier_size: float = 5.0
    ramp: float = 0.01
    ramp_sd: float = 0.005
    ramp_rounds: float = 8.0
    offset: float = 0.01
    degrees: int | None = None
    spikes: float = 0.0
    states: float = 0.0
    load: float = 0.0
    load_effect: float = 0.0


#: Twice the probability that the next round has the other clock state.
SWITCHES = 0.3


@dataclass(frozen=True)
class Drawn:
    """A round: the logarithm of its energy, and the cores that other processes used."""

    log: float
    cores: float


def _session(machine: Machine, rounds: int, random: Random) -> list[Drawn]:
    """Return the rounds of one session, in order of time."""
    fresh = sqrt(1 - machine.memory**2)
    offset = random.gauss(0, machine.offset)
    ramp = random.gauss(machine.ramp, machine.ramp_sd)
    disturbance = _standard(machine, random)
    state = random.random() < 0.5
    drawn = []
    for i in range(rounds):
        value = offset + ramp * (1 - exp(-i / machine.ramp_rounds)) + machine.noise * disturbance
        if random.random() < machine.outliers:
            value += random.expovariate(1 / (machine.outlier_size * machine.noise))
        if machine.spikes and random.random() < machine.spikes:
            value += log(3)
        if machine.states:
            value += machine.states * (state - 0.5)
            state = random.random() < 0.5 if random.random() < SWITCHES else state
        cores = random.expovariate(1 / machine.load) if machine.load else 0.0
        drawn.append(Drawn(value + machine.load_effect * cores, cores))
        disturbance = machine.memory * disturbance + fresh * _standard(machine, random)
    return drawn


def _standard(machine: Machine, random: Random) -> float:
    """Return a variate with a standard deviation of 1."""
    if machine.degrees is None:
        return random.gauss(0, 1)
    scale = sqrt(random.gammavariate(machine.degrees / 2, 2) / machine.degrees)
    return random.gauss(0, 1) / scale * sqrt((machine.degrees - 2) / machine.degrees)


def _split_abba(logs: Sequence[Drawn]) -> tuple[list[Drawn], list[Drawn]]:
    """Split rounds in ABBA order: the baseline is first in every other pair."""
    base, head = [], []
    for i in range(0, len(logs), 2):
        first, second = logs[i], logs[i + 1]
        base.append(second if i % 4 else first)
        head.append(first if i % 4 else second)
    return base, head


def draw_rounds(
    machine: Machine, stages: Sequence[int], order: Order, random: Random
) -> tuple[Sample, Sample]:
    """Return the energies (J) of baseline and head for the same work, one pair per pair of all stages."""
    pairs = sum(stages)
    if order == "stored":
        base, head = (_session(machine, pairs, random) for _ in range(2))
    elif order == "blocks":
        logs = _session(machine, 2 * pairs, random)
        base, head = logs[:pairs], logs[pairs:]
    else:
        base, head = [], []
        for part in [pairs] if order == "abba" else stages:
            more_base, more_head = _split_abba(_session(machine, 2 * part, random))
            base += more_base
            head += more_head
    return _make_sample(machine, base), _make_sample(machine, head)


def _make_sample(machine: Machine, drawn: Sequence[Drawn]) -> Sample:
    return Sample(
        tuple(LEVEL_J * exp(each.log) for each in drawn),
        pairs=tuple(range(len(drawn))),
        load=tuple(each.cores for each in drawn) if machine.load else (),
    )


def first_rounds(sample: Sample, count: int, factor: float = 1.0) -> Sample:
    """Return the first rounds of a sample, with all values multiplied by a factor."""
    return Sample(
        tuple(factor * value for value in sample.values[:count]),
        pairs=sample.pairs[:count],
        load=sample.load[:count],
    )
