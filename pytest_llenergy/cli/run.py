# SPDX-License-Identifier: Apache-2.0
"""``llenergy run``: measure the energy of any command."""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from types import FrameType
from typing import TYPE_CHECKING, Any

from pytest_llenergy.cli.console import (
    HelpFormatter,
    add_output,
    encode_json,
    print_json,
    print_message,
    write_output,
)
from pytest_llenergy.options.table import option_row

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.energy.meters.select import Selection
    from pytest_llenergy.energy.trace import Series
    from pytest_llenergy.record.record import DomainEnergy, Flag, WindowRecord

#: Exit codes of a shell for a command that cannot be executed, or that does not exist.
NOT_EXECUTABLE, NOT_FOUND = 126, 127

#: Added to the number of a signal for the exit code of a command that the signal has ended.
SIGNALLED = 128

#: Longest time after which a signal is acted on that another thread got.
LOOK_FOR_SIGNALS_S = 1.0

#: Signals that are passed to the command. A terminal sends those of ``FROM_TERMINAL`` to both.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

#: Options that select devices and meters, here and in ``llenergy watch``.
METER_OPTIONS = ("meter", "gpus", "require")

#: How the reason of the meter begins that the estimate replaces.
ESTIMATED_METER = "rapl: "

EXAMPLES = """\
  llenergy run -- python generate.py
  llenergy run --format json -o energy.json -- make -j
"""


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run",
        help="measure the energy of a command",
        description="Run a command, and print its joules, time and watts to standard error, one line "
        "for each source. The exit code is that of the command: 128 plus the number of the signal that ends "
        "it, 127 if there is no such command, 126 if it cannot be executed.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=HelpFormatter,
    )
    add_output(parser, ("text", "json"), where="standard error, or standard output for json")
    for name in METER_OPTIONS:
        option_row(name).add_argument(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="also explain which meters are missing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command to run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command, and print or write its energy. Returns the command's exit code."""
    from pytest_llenergy.devices.environment import collect_environment
    from pytest_llenergy.energy.window import Measuring
    from pytest_llenergy.energy.window_meters import LocalWindows
    from pytest_llenergy.errors import PlanError
    from pytest_llenergy.lifetime import ENDS_ALL
    from pytest_llenergy.ranks.proctree import become_subreaper, kill_children
    from pytest_llenergy.record.record import Metric
    from pytest_llenergy.record.text import format_time

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise PlanError("names no command; write it last: llenergy run -- CMD")
    if args.output is not None:
        check_output(args.output.absolute())
    meters = LocalWindows(open_selection(args, whole_host=False))
    measuring = Measuring([meters])
    # A daemon of the command becomes a child of this process, so that its CPU time is found.
    with ExitStack() as last, Child() as child:
        become_subreaper()
        if ENDS_ALL in os.environ:
            last.callback(kill_children)
        last.callback(become_subreaper, on=False)
        measuring.start()
        try:
            started = datetime.now(timezone.utc)
            with measuring.window(command[0]) as window:
                status = child.run(command)
            record = window.record
        finally:
            measuring.stop()
        if child.problem is not None:
            print_message("run", child.problem)
            return status
        energy = Metric(
            value=record.energy_j,
            unit="J",
            uncertainty=record.energy_u_j,
            uncertainty_absolute=record.energy_u_absolute_j,
            n=1,
            reason=record.reason,
        )
        found: dict[str, Any] = {
            "command": command,
            "exit_status": status,
            "started_at": format_time(started),
            "environment": collect_environment(),
            "meters": measuring.infos(),
            "window": record,
            "metrics": {"energy_j": energy},
        }
        if args.format == "json":
            _write(args, found)
        else:
            lines = [*domain_lines(record.by_domain, record.duration_s, meters.series)]
            lines += [*_total(record), *flag_lines(record.flags, verbose=args.verbose)]
            _write_lines(args, lines)
    return status


def open_selection(args: argparse.Namespace, *, whole_host: bool) -> Selection:
    """Open the meters of the CPU and of GPUs.

    Args:
        args: Parsed options, with those of ``METER_OPTIONS``.
        whole_host: Whether to measure the host, with all GPUs, in place of what this process may use.

    Raises:
        LLEnergyError: No meter opens, or an option is invalid.
    """
    from pytest_llenergy.devices.inventory import find_gpus
    from pytest_llenergy.devices.visibility import (
        describe_settings,
        parse_selection,
        parse_visible_devices,
    )
    from pytest_llenergy.energy.meters.base import Targets
    from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters

    meter, gpus, require = (option_row(name).read_argument(getattr(args, name)) for name in METER_OPTIONS)
    inventory = find_gpus()
    for fault in inventory.faults:
        print_message("watch" if whole_host else "run", fault)
    if gpus is not None:
        uuids = parse_selection(gpus, inventory)
    elif whole_host:
        uuids = inventory.uuids
    else:
        uuids = parse_visible_devices(os.environ, inventory).uuids
    if inventory.boards and not uuids:
        hidden = f"{describe_settings(os.environ, inventory)} hides all {len(inventory.boards)}"
        print_message("run", f"GPUs are not measured: {hidden}")
    # What others use counts, and there is nothing to estimate.
    no_work = "llenergy watch starts none" if whole_host else None
    targets = Targets(inventory.one_per_board(uuids), also_cpu=True, unknown_processes=no_work)
    return open_meters(meter, MeterRegistry(), targets, require_measured=require is not None)


class Child:
    """The command, which gets the signals that this process gets while this context is entered."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Child:
        for number in FORWARDED:
            # What is ignored, as by nohup, stays ignored here and in the command.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end.

        Returns:
            Its exit code, as a shell gives it. If it could not be started, ``problem`` says why.
        """
        if self._pending:
            return SIGNALLED + self._pending[0]
        try:
            self._process = subprocess.Popen(command)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.problem = f"{command[0]}: {reason}"
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        for number in self._pending:
            self._process.send_signal(number)
        status = _wait(self._process)
        return SIGNALLED - status if status < 0 else status

    def _forward(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self._pending.append(number)
        elif not (number in FROM_TERMINAL and _is_in_foreground()):
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process, and act on signals meanwhile, whichever thread gets them.

    One that came while this process was stopped may go to the thread that reads the meters. That does not
    interrupt a wait of this thread, the only one in which Python acts on signals.
    """
    # Not on other systems than Linux, nor in every container.
    with suppress(AttributeError, OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            while not ended.poll(LOOK_FOR_SIGNALS_S * 1000):
                pass
        finally:
            os.close(descriptor)
    return process.wait()


def _is_in_foreground() -> bool:
    """Whether Ctrl-C of the terminal reaches this process, and so the command too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def domain_lines(
    by_domain: Mapping[str, DomainEnergy], duration_s: float, trace: Sequence[Series]
) -> Iterator[str]:
    """Yield a line with joules, time, watts and labels for each domain."""
    scopes = {series.domain.name: series.domain.scope for series in trace}
    for name, energy in by_domain.items():
        scope = "process-only" if name.endswith(":processes") else scopes[name]
        if energy.energy_j is None or energy.energy_u_j is None:
            yield f"{name}: no joules in {format_seconds(duration_s)}: {energy.reason}"
            continue
        # The accuracy of the source is a rectangular distribution between its limits.
        u_j = math.hypot(energy.energy_u_j, energy.width_j / math.sqrt(12))
        yield f"{name}: {_format(energy.energy_j, u_j, duration_s)} ({energy.kind}, {scope})"


def _format(energy_j: float, u_j: float | None, duration_s: float) -> str:
    from pytest_llenergy.record.quantity import format_quantity

    joules = format_quantity(energy_j, u_j, "J")
    watts = format_quantity(energy_j / duration_s, None if u_j is None else u_j / duration_s, "W")
    return f"{joules} in {format_seconds(duration_s)}, {watts}"


def format_seconds(seconds: float) -> str:
    """Format a time with three digits, and whole seconds above that."""
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def flag_lines(flags: Sequence[Flag], *, verbose: bool) -> list[str]:
    """Return lines for what readers of the joules must know.

    Lines already label an estimate of the CPU, and ``-v`` alone names the counters that it replaces. GPUs are
    not estimated, so one that cannot be read is always named.
    """
    estimated = any(flag.name == "estimated" for flag in flags)
    return [
        f"{flag.name}: {flag.detail}"
        for flag in flags
        if flag.name != "unmeasured" and (verbose or not _is_label(flag, estimated=estimated))
    ]


def _is_label(flag: Flag, *, estimated: bool) -> bool:
    """Whether a flag repeats the label of an estimate."""
    replaced = flag.name == "meter" and flag.detail.startswith(ESTIMATED_METER)
    return flag.name == "estimated" or (estimated and replaced)


def _total(window: WindowRecord) -> list[str]:
    if len(window.by_domain) < 2 or window.energy_j is None:
        return []
    return [f"total: {_format(window.energy_j, window.energy_u_absolute_j, window.duration_s)}"]


def check_output(path: Path) -> None:
    """Raise ``PlanError`` if the output cannot be written, before anything is measured."""
    from pytest_llenergy.errors import PlanError
    from pytest_llenergy.report.store import check_creatable

    try:
        if not path.parent.is_dir():
            raise PlanError(f"--output={path}: no directory {path.parent}; create it first")
        if path.exists() and not path.is_file():
            raise PlanError(f"--output={path}: not a file; name a file")
        check_creatable(path)
    except OSError as error:
        raise PlanError(f"--output={path}: {error.strerror}") from None


def _write(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    if args.output is not None:
        write_output(args.output, f"{encode_json(found)}\n")
    else:
        print_json(found)


def _write_lines(args: argparse.Namespace, lines: Sequence[str]) -> None:
    from pytest_llenergy.record.text import one_line

    text = "".join(f"energy: {one_line(line)}\n" for line in lines)
    if args.output is not None:
        write_output(args.output, text)
    else:
        print(text, end="", file=sys.stderr)
