# SPDX-License-Identifier: Apache-2.0
"""Tests whose times ``launchers_run.py`` takes: two ranks, on one host or on two."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.api import Energy, Workers

AGENT = "pytest_llenergy.hosts.agent"
PER_HOST = int(os.environ["LLENERGY_BENCH_PER_HOST"])

on_hosts = pytest.mark.gpus(2, per_host=PER_HOST)


def nothing() -> None:
    """Do no work."""


def work(seconds: float) -> float:
    """Sleep, and return the processor time that the agent of this host used meanwhile."""
    agent = next(each for each in psutil.Process().parents() if any(AGENT in part for part in each.cmdline()))
    before = sum(agent.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(agent.cpu_times()[:2]) - before) / seconds


@on_hosts
def test_first(workers: Workers) -> None:
    """Start the gang and its ranks."""
    workers.run(nothing)


@on_hosts
@pytest.mark.parametrize("number", range(30))
def test_warm(workers: Workers, number: int) -> None:
    """Call warm ranks once."""
    workers.run(nothing)


@on_hosts
@pytest.mark.skipif(PER_HOST == 2, reason="one host has no agent")
@pytest.mark.energy_options(rounds=3, warmup=1, iterations=1)
def test_agents(workers: Workers, energy: Energy) -> None:
    """Measure what the agents use in a round."""
    shares = energy(workers.call(work, 5.0)).result
    Path(os.environ["LLENERGY_SHARES"]).write_text(json.dumps(shares))


@pytest.mark.parametrize("number", range(30))
def test_empty(number: int) -> None:
    """Do nothing: what pytest itself needs for a test."""
    assert number >= 0
