# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: check devices, meters and backends, and explain what to fix."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import add_format, print_json
from pytest_llenergy.record.text import one_line

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.cli.doctor.checks import Line

#: Width of the column of topics.
WIDTH = 9


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
        help="skip what takes seconds: a trial measurement with each meter, and importing the backends' "
        "libraries",
    )
    parser.add_argument(
        "--backends",
        action="store_true",
        help="only list the capabilities of each backend",
    )
    parser.add_argument(
        "--cluster",
        metavar="{ray[:HOST:PORT],slurm}",
        type=_cluster,
        help="check the hosts of a Ray cluster, or of the Slurm job of this process, instead of this host: "
        "versions, GPUs and meters",
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
    from pytest_llenergy.cli.doctor.checks import check_cluster, check_machine

    if args.backends:
        return _print_backends(as_json=args.format == "json")
    found = []
    for line in check_cluster(args.cluster) if args.cluster else check_machine(steps=not args.no_steps):
        found.append(line)
        if args.format == "text":
            _print_line(line)
    if args.format == "json":
        print_json({"lines": found})
    return 1 if any(line.topic == "wrong" for line in found) else 0


def _print_backends(*, as_json: bool) -> int:
    from pytest_llenergy.backends.registry import discover_backends
    from pytest_llenergy.cli.doctor.capabilities import as_primitives, list_lines
    from pytest_llenergy.cli.doctor.checks import Line

    specs, broken = discover_backends()
    if as_json:
        print_json({"backends": [*map(as_primitives, specs.values())], "broken": broken})
        return 0
    for spec in specs.values():
        for line in list_lines(spec):
            _print_line(line)
    for each in broken:
        _print_line(Line("backend", f"{each.name}: broken: {each.reason}"))
    return 0


def _print_line(line: Line) -> None:
    """Print a line at once. Only a terminal gets it wrapped: in a file or a pipe, one fact is one line."""
    text = f"{line.topic:<{WIDTH}}{one_line(line.text)}"
    lines = [text]
    if sys.stdout.isatty():
        indent, width = " " * (WIDTH + 2), shutil.get_terminal_size().columns
        lines = textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    print(*lines, sep="\n", flush=True)
