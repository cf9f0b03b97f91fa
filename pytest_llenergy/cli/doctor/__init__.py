# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: check devices, meters and backends, and explain what to fix."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import add_format, print_json
from pytest_llenergy.record.text import escape_invisible

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands

#: How the launcher of a cluster gets GPUs that it does not count.
ADD_GPUS = {"slurm": "start the job with --gres=gpu:N", "ray": "start Ray there with --num-gpus=N"}


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="check devices, meters and backends, and explain what to fix",
        description="Check devices, meters and backends, and explain what to fix. The exit code is 1 if "
        "something is misconfigured.",
    )
    add_format(parser, ("text", "json"))
    parser.add_argument(
        "--no-steps",
        action="store_true",
        help="skip the steps that run on the devices, each in a fresh process: allocate, multiply, convolve, "
        "two ranks",
    )
    parser.add_argument(
        "--backends",
        action="store_true",
        help="only list the capabilities of each backend and their source",
    )
    parser.add_argument(
        "--cluster",
        metavar="{ray[:HOST:PORT],slurm}",
        type=_cluster,
        help="check the hosts of a Ray cluster, or of the Slurm job of this process, instead of this host: "
        "versions, devices, meters, clock, and the bandwidth between them",
    )
    parser.set_defaults(run=run)


def _cluster(text: str) -> str:
    from pytest_llenergy.options.values import cluster

    try:
        name = cluster(text)
    except ValueError:
        raise argparse.ArgumentTypeError("needs slurm, ray or ray:HOST:PORT") from None
    if name == "local":
        raise argparse.ArgumentTypeError("this host is checked without --cluster")
    return name


def run(args: argparse.Namespace) -> int:
    """Check the machine. Returns 1 if something is misconfigured."""
    if args.backends:
        return _print_backends(as_json=args.format == "json")
    if args.cluster is not None:
        return _check_cluster(args.cluster, as_json=args.format == "json")
    from pytest_llenergy.cli.doctor.checkup import check_host
    from pytest_llenergy.cli.doctor.text import render_checkup

    def print_line(line: str) -> None:
        if args.format == "text":
            _print_line(line)

    checkup = check_host()
    for line in render_checkup(checkup):
        print_line(line)
    if not args.no_steps:
        from pytest_llenergy.cli.doctor.trial import run_trials

        checkup = run_trials(checkup, print_line)
    if args.format == "json":
        print_json(checkup)
    return 1 if checkup.misconfigured else 0


def _check_cluster(name: str, *, as_json: bool) -> int:
    """Check the hosts of a cluster. Returns 1 if one cannot be used, or lacks GPUs."""
    from pytest_llenergy.cli.doctor.hosts import check_hosts, describe_differences, measure_bandwidth
    from pytest_llenergy.cli.doctor.text import render_bandwidth, render_host_of_cluster
    from pytest_llenergy.errors import LLEnergyError
    from pytest_llenergy.hosts.launchers import open_cluster

    hosts = []
    try:
        with closing(open_cluster(name, os.environ)) as cluster:
            for host in check_hosts(cluster, ADD_GPUS[name.partition(":")[0]]):
                hosts.append(host)
                for line in () if as_json else render_host_of_cluster(host):
                    _print_line(line)
            bandwidth = measure_bandwidth(cluster, hosts)
    except LLEnergyError as error:
        print(f"llenergy doctor --cluster={name}: {escape_invisible(str(error))}", file=sys.stderr)
        return 1
    differences = describe_differences(hosts)
    if as_json:
        print_json({"cluster": name, "hosts": hosts, "differences": differences, "bandwidth": bandwidth})
    else:
        if differences:
            _print_line(f"note     hosts differ in {differences}")
        if bandwidth is not None:
            _print_line(render_bandwidth(bandwidth))
    faults = [each for host in hosts for each in (host.fault, host.shortage)]
    faults += [] if bandwidth is None else [bandwidth.fault]
    return 1 if any(fault is not None for fault in faults) else 0


def _print_backends(*, as_json: bool) -> int:
    from pytest_llenergy.cli.doctor.checkup import list_backend_rows, list_broken_backends
    from pytest_llenergy.cli.doctor.text import render_broken, render_row

    rows, broken = list(list_backend_rows()), list_broken_backends()
    if as_json:
        print_json({"backends": rows, "broken": broken})
        return 0
    for row in rows:
        for line in render_row(row):
            _print_line(line)
    for backend in broken:
        _print_line(render_broken(backend))
    return 0


def _print_line(line: str) -> None:
    """Print a line at once, since the next step takes seconds, or minutes if it hangs.

    Only a terminal gets it wrapped: in a file or a pipe, one fact is one line.
    """
    from pytest_llenergy.cli.doctor.text import wrap_line

    line = escape_invisible(line)
    lines = wrap_line(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else [line]
    print(*lines, sep="\n", flush=True)
