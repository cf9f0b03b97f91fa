# SPDX-License-Identifier: Apache-2.0
"""Copies of a model in shards, one copy on each of two hosts: what counts, and the joules of each host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import pytest

from pytest_llenergy.record.record import Coordinates, RankInfo, Round

from ..nvml_sim.shapes import Ramp
from .metered import share_within
from .two_hosts import FakeHost, TwoHosts

COPIES = """
import pytest

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.parallel(data=2, tensor=2)
@pytest.mark.energy_options(rounds=8, iterations=1, warmup=1, budget=1)
def test_copies(backend, energy):
    run = energy(backend.generate, ["a", "bc", "def", "ghij", "klmno"], max_new_tokens=8)
    assert run.result.token_ids == TOKENS
"""

PLUGIN = """
from tests.hosts import spread_engine

def pytest_llenergy_backends(config):
    return [spread_engine.SPEC, spread_engine.SHARDED]
"""

#: The first copy has three of the five prompts, and its tokens are 1 + 2. The shards of the second copy are
#: numbers 1 and 2 of an engine of their own, or ranks 2 and 3 of all.
TOKENS = {"spread": [[3] * 8] * 5, "sharded": [[3] * 8] * 3 + [[7] * 8] * 2}

#: Power of each board by host, at the start of the run and a minute later.
RAMPS_W = {"n1": [(100.0, 640.0), (310.0, 90.0)], "n2": [(80.0, 400.0), (690.0, 200.0)]}


@pytest.mark.clock
@pytest.mark.parametrize("engine", ["sharded", pytest.param("spread", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_each_copy_is_on_one_host_and_counts_once(two_hosts: TwoHosts, engine: str) -> None:
    for host in two_hosts.hosts:
        for index, (from_w, to_w) in enumerate(RAMPS_W[host.name]):
            ramp = Ramp(from_w, to_w, 60 * 10**9)
            host.world.set_power(index, ramp, time.monotonic_ns() + host.shift_ns)
    (two_hosts.directory / "conftest.py").write_text(PLUGIN)
    source = COPIES.replace("TOKENS", repr(TOKENS[engine]))
    output = two_hosts.run(source, f"--energy-backend={engine}", "--energy-model=random:llama-tiny")
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    assert (record.parallel.data, record.parallel.tensor) == (2, 2)
    require_places(record.ranks, engine)
    assert len(record.rounds) >= 8
    for round_ in record.rounds:
        assert round_.tokens is not None
        assert (round_.tokens.input, round_.tokens.output) == (1 + 2 + 3 + 4 + 5, 5 * 8)
        assert round_.requests == 5
    scores = [scores_of(round_, two_hosts.hosts) for round_ in record.rounds]
    for name in ("n1", "n2", "sum"):
        assert share_within([each[name] for each in scores]) >= 0.75, scores
        assert max(each[name] for each in scores) < 4, scores
    sums_j = [round_.energy_j for round_ in record.rounds if round_.energy_j is not None]
    per_token = record.metrics["energy_per_output_token_j"].value
    assert per_token == pytest.approx(statistics.median(sums_j) / (5 * 8))


def require_places(ranks: Sequence[RankInfo], engine: str) -> None:
    """Require a copy on each host, whose shards are ranks or worker processes of a rank."""
    first, second = ([Coordinates(copy, shard, 0) for shard in (0, 1)] for copy in (0, 1))
    boards = {name: [f"GPU-{name}-{index}" for index in (0, 1)] for name in ("n1", "n2")}
    if engine == "sharded":
        found = [(each.rank, each.host, each.local_rank, each.device, each.coordinates) for each in ranks]
        assert found == [
            (0, "n1", 0, boards["n1"][0], first[0]),
            (1, "n1", 1, boards["n1"][1], first[1]),
            (2, "n2", 0, boards["n2"][0], second[0]),
            (3, "n2", 1, boards["n2"][1], second[1]),
        ]
    else:
        copies = [
            (each.rank, each.host, each.local_rank, each.device, each.worker_coordinates) for each in ranks
        ]
        assert copies == [
            (0, "n1", 0, ",".join(boards["n1"]), first),
            (1, "n2", 0, ",".join(boards["n2"]), second),
        ]
    processes = [pid for each in ranks for pid in (each.pid, *each.workers)]
    assert len(processes) == len(set(processes)) == (4 if engine == "sharded" else 2 + 4)


def scores_of(round_: Round, hosts: Sequence[FakeHost]) -> dict[str, float]:
    """Return how many standard uncertainties the joules of each host and their sum are off."""
    assert round_.energy_j is not None, round_.reason
    assert round_.energy_u_j is not None
    scores, all_j = {}, 0.0
    for host in hosts:
        energy_j = energy_u_j = true_j = 0.0
        for index in range(2):
            part = round_.by_domain[f"{host.name}/gpu:GPU-{host.name}-{index}"]
            assert part.energy_j is not None, part.reason
            assert part.energy_u_j is not None
            energy_j += part.energy_j
            # Boards of one host share the error of its clock.
            energy_u_j += part.energy_u_j
            true_j += host.true_j(index, round_.start_s, round_.duration_s)
        scores[host.name] = abs(energy_j - true_j) / energy_u_j
        all_j += true_j
    assert len(round_.by_domain) == 2 * len(hosts)
    return {**scores, "sum": abs(round_.energy_j - all_j) / round_.energy_u_j}
