# SPDX-License-Identifier: Apache-2.0
"""Ranks start without an IPv4 loopback address, and one line says what to do if the loopback is down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .no_torch import without_torch

DOWN = ""
IPV6_ONLY = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo &&"


def can_unshare() -> bool:
    """Return whether this user may make network namespaces, and has ``ip``."""
    try:
        return (
            subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs a network namespace (root) and ip")


def run_pytest(pytester: pytest.Pytester, loopback: str) -> pytest.RunResult:
    """Run pytest in a network namespace of its own."""
    command = f'{loopback} exec "$0" -m pytest -p no:cacheprovider'
    return pytester.run("unshare", "-n", "sh", "-c", command, sys.executable)


REDUCE = """
import os, pytest

def reduce():
    import torch, torch.distributed as dist
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return os.environ["MASTER_ADDR"], tensor.item()

@pytest.mark.gpus(2, fallback="cpu")
def test_it(workers):
    assert workers.run(reduce) == [("::1", 2.0)] * 2
"""


@pytest.mark.slow
def test_ranks_use_an_ipv6_loopback(pytester: pytest.Pytester) -> None:
    pytest.importorskip("torch")
    pytester.makepyfile(REDUCE)
    run_pytest(pytester, IPV6_ONLY).assert_outcomes(passed=1)


def test_a_loopback_that_is_down_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(REDUCE)
    without_torch(pytester.path)
    result = run_pytest(pytester, DOWN)
    result.assert_outcomes(failed=1)
    message = "ranks meet at the loopback interface lo, which does not work here"
    result.stdout.fnmatch_lines([f"WorkerError: {message}: bring it up, as with 'ip link set lo up'"])


PLAIN = """
from tests.ranks.groups import *
host = LocalHost("spawn")
ranks = start(host)
assert run(ranks, max, 1, 2) == [2, 2]
host.close()
"""


def test_ranks_that_do_not_communicate_need_no_loopback() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(["unshare", "-n", sys.executable, "-c", PLAIN], env=environment, check=True)
