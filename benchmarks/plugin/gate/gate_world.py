# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds of two sides on a machine with noise, warm-up and offsets between sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from random import Random
from typing import Literal

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
    """

    noise: float
    memory: float = 0.2
    outliers: float = 0.05
    outlier_size: float = 5.0
    ramp: float = 0.01
    ramp_sd: float = 0.005
    ramp_rounds: float = 8.0
    offset: float = 0.01


def _session(machine: Machine, rounds: int, random: Random) -> list[float]:
    """Return the logarithms of the rounds of one session, in order of time."""
    fresh = sqrt(1 - machine.memory**2)
    offset = random.gauss(0, machine.offset)
    ramp = random.gauss(machine.ramp, machine.ramp_sd)
    disturbance = random.gauss(0, 1)
    logs = []
    for i in range(rounds):
        log = offset + ramp * (1 - exp(-i / machine.ramp_rounds)) + machine.noise * disturbance
        if random.random() < machine.outliers:
            log += random.expovariate(1 / (machine.outlier_size * machine.noise))
        logs.append(log)
        disturbance = machine.memory * disturbance + fresh * random.gauss(0, 1)
    return logs


def _split_abba(logs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Split rounds in ABBA order: the baseline is first in every other pair."""
    base, head = [], []
    for i in range(0, len(logs), 2):
        first, second = logs[i], logs[i + 1]
        base.append(second if i % 4 else first)
        head.append(first if i % 4 else second)
    return base, head


def draw_rounds(
    machine: Machine, stages: Sequence[int], order: Order, random: Random
) -> tuple[list[float], list[float]]:
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
    return [LEVEL_J * exp(log) for log in base], [LEVEL_J * exp(log) for log in head]
