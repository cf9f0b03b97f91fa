# SPDX-License-Identifier: Apache-2.0
"""Measure what agents cost as their number grows. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from pytest_llenergy.hosts.agent import agent_command
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.remote_host import RemoteHost, accept_agents, close_all

#: How long idle agents are observed (seconds).
IDLE_S = 5.0
#: Time limits for all agents to start, and for an answer (seconds).
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 60.0

COLUMNS = {
    "hosts": "{:d}",
    "start_s": "{:.2f}",
    "clocks_ms": "{:.1f}",
    "requests_ms": "{:.1f}",
    "end_s": "{:.2f}",
    "bound_us": "{:.1f}",
    "agent_cpu_percent": "{:.3f}",
    "pytest_cpu_percent": "{:.2f}",
    "agent_mb": "{:.0f}",
    "files_per_host": "{:.1f}",
}


def measure_gang(hosts: int) -> dict[str, Any]:
    """Start a gang on this host, measure, and end it."""
    listener = Listener()
    files = psutil.Process().num_fds()
    start_s = time.perf_counter()
    processes = [start_agent(listener, slot) for slot in range(hosts)]
    remote = accept_agents(listener, [f"n{slot}" for slot in range(hosts)], START_TIMEOUT_S)
    row: dict[str, Any] = {"hosts": hosts, "start_s": time.perf_counter() - start_s}
    row["clocks_ms"] = time_ms(lambda: [host.exchange() for host in remote])
    row["bound_us"] = median(host.clock.offset(time.monotonic_ns()).bound_ns / 1e3 for host in remote)
    # The first request imports what answers, for seconds if many share a host: the clocks may drift by then.
    ask_all(remote)
    row["requests_ms"] = time_ms(lambda: ask_all(remote))
    agents = [psutil.Process(host.facts.pid) for host in remote]
    before = cpu_s(agents), cpu_s([psutil.Process()])
    time.sleep(IDLE_S)
    row["agent_cpu_percent"] = (cpu_s(agents) - before[0]) / hosts / IDLE_S * 100
    row["pytest_cpu_percent"] = (cpu_s([psutil.Process()]) - before[1]) / IDLE_S * 100
    row["files_per_host"] = (psutil.Process().num_fds() - files) / hosts
    row["agent_mb"] = median(agent.memory_info().rss / 1e6 for agent in agents)
    row["end_s"] = time_ms(lambda: end_all(remote, processes)) / 1e3
    return row


def start_agent(listener: Listener, slot: int) -> subprocess.Popen[bytes]:
    """Start an agent as a launcher does."""
    process = subprocess.Popen(
        agent_command(slot), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(f"{listener.invitation}\n".encode())
    return process


def ask_all(hosts: Sequence[RemoteHost]) -> None:
    """Send one small request to all hosts, then await all answers, as for the energies of a round."""
    for pending in [host.begin("ranks.free_ports") for host in hosts]:
        pending.result(ANSWER_TIMEOUT_S)


def end_all(hosts: Sequence[RemoteHost], processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End all agents and wait for their processes."""
    close_all(hosts)
    for process in processes:
        process.wait()


def time_ms(work: Callable[[], object]) -> float:
    """Return how long a function takes (milliseconds)."""
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e3


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time of processes (seconds)."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main(argv: Sequence[str]) -> None:
    """Measure gangs of growing size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 16, 128], metavar="N", help="2 16 128")
    parser.add_argument("--json", type=Path, default=Path("many_hosts.json"), metavar="FILE")
    args = parser.parse_args(argv)
    rows = []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}")
    for hosts in args.hosts:
        row = measure_gang(hosts)
        rows.append(row)
        print(f"| {' | '.join(form.format(row[name]) for name, form in COLUMNS.items())} |", flush=True)
    host = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    args.json.write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
