# SPDX-License-Identifier: Apache-2.0
"""The command ``llenergy``: what can be done with reports, and what is here to measure with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest_llenergy
from pytest_llenergy.errors import LLEnergyError, MeterDoesNotApply, MeterError

if TYPE_CHECKING:
    from pytest_llenergy.meters.protocol import Domain


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 with one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LLEnergyError as error:
        print(f"llenergy: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llenergy", description="Energy reports of pytest --energy-report.")
    parser.add_argument(
        "--version", action="version", version=f"pytest-llenergy {pytest_llenergy.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="make one report of journals and reports")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports (.json) and journals")
    merge.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the report to write"
    )
    merge.set_defaults(run=_merge)
    show = commands.add_parser("report", help="print the table of a report or journal")
    show.add_argument("file", type=Path, metavar="FILE")
    show.set_defaults(run=_show)
    doctor = commands.add_parser("doctor", help="say what is here to run and to measure with")
    doctor.set_defaults(run=_doctor)
    return parser


def _merge(args: argparse.Namespace) -> int:
    from pytest_llenergy.report.file import merge, read_report, write_report

    report = merge([read_report(file) for file in args.files])
    write_report(report, args.output)
    state = "complete" if report.run.complete else "incomplete"
    print(f"{args.output}: {len(report.records)} records, {state}")
    return 0


def _show(args: argparse.Namespace) -> int:
    import shutil

    from pytest_llenergy.report.file import read_report
    from pytest_llenergy.report.terminal import render

    report = read_report(args.file)
    width = shutil.get_terminal_size().columns
    print(render(report.records, width, color=sys.stdout.isatty()))
    if not report.run.complete:
        print("incomplete: the run did not come to its end")
    return 0


def _doctor(_args: argparse.Namespace) -> int:
    from pytest_llenergy.backends.model import resolve
    from pytest_llenergy.backends.registry import known_backends
    from pytest_llenergy.devices.host import host
    from pytest_llenergy.devices.inventory import boards
    from pytest_llenergy.meters.known import KnownMeters
    from pytest_llenergy.meters.protocol import Targets

    machine, gpus = host(), boards()
    print(f"cpu      {machine.cpu_model}, {machine.logical_cpus} logical CPUs")
    for index, gpu in enumerate(gpus):
        print(f"gpu {index}    {gpu.name} {gpu.uuid}")
    if not gpus:
        print("gpu      none (NVML shows no board)")
    for name, meter in KnownMeters().items():
        if meter.takes_argument:
            print(f"meter    {name}: by name only, --energy-meter={name}:ARGUMENT")
            continue
        for targets in [Targets(), *(Targets((gpu.uuid,)) for gpu in gpus)]:
            label = targets.gpus[0] if targets.gpus else "cpu"
            try:
                found = meter.open(targets)
            except MeterDoesNotApply:
                continue
            except MeterError as error:
                print(f"meter    {name} for {label}: no ({error})")
                continue
            for each in found:
                each.close()
                for domain in each.domains:
                    print(f"meter    {name} for {label}: {_meter(domain)}")
    for name, backend in known_backends().items():
        print(f"backend  {name}: {backend.missing() or 'available'}")
    print(f"model    {resolve(None).label} (default)")
    return 0


def _meter(domain: Domain) -> str:
    """One line: what it reads, how often it ticks, how much of the time it looks, what is odd."""
    period = f", every {domain.update_period_s * 1e3:.4g} ms" if domain.update_period_s else ""
    sees = f", sees {domain.coverage:.0%} of the time" if domain.coverage < 1 else ""
    odd = "".join(f"; {flag.name}: {flag.detail}" for flag in domain.flags)
    return f"{domain.kind}, {domain.name} by {domain.source}{period}{sees}{odd}"


if __name__ == "__main__":
    raise SystemExit(main())
