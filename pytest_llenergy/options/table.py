# SPDX-License-Identifier: Apache-2.0
"""The options, one row each: fields of Settings define command line, ini keys, types and documentation.

The field ``rounds`` defines the option ``--energy-rounds`` and the ini key ``energy_rounds``. Defaults
belong to the ini keys; on the command line they are ``None``, so that a default never hides an ini value.
Commands of ``llenergy`` share some rows, so this module does not import pytest; ``settings`` reads values.
"""
# ruff: noqa: RUF009 - dataclass fields are declared by calls of ``option``

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.values import (
    agreement,
    auto_or,
    backend_python,
    cluster,
    columns,
    floor,
    flops_switch,
    gpus,
    integer,
    meters,
    names,
    output_file,
    saved_name,
    seconds,
    server_command,
    share,
    switch,
    threshold,
    url_path,
    word,
)
from pytest_llenergy.record import defaults

if TYPE_CHECKING:
    import pytest

    from pytest_llenergy.compare.gate import Threshold
    from pytest_llenergy.report.layout import Layout

#: Files that ``--energy-report`` and ``--energy-html`` write if they name none.
DEFAULT_REPORT, DEFAULT_PAGE = "energy.json", "energy.html"


@dataclass(frozen=True, eq=False)
class Option:
    """One option.

    Attributes:
        name: Name of its field in Settings.
        default: Text of the default; None if the default value is ``None``.
        read: Converts the text to the value.
        metavar: Placeholder of the value in ``--help``.
        help: Description.
        bare: Text to use if the option is given without a value.
        is_path: Whether the value is a path, or a pair of a name and a path. On the command line paths are
            relative to the directory of the call, in an ini file to the root directory.
        may_be_path: Whether the value is such a path if that file exists.
        repeatable: Whether the value is a tuple. An ini file has one element per line.
        joins: Whether each repetition is a tuple, whose elements are joined and kept once.
        is_switch: Whether the command line takes no value; an ini file has on or off.
    """

    name: str
    default: str | None
    read: Callable[[str], Any]
    metavar: str
    help: str
    bare: str | None = None
    is_path: bool = False
    may_be_path: bool = False
    repeatable: bool = False
    joins: bool = False
    is_switch: bool = False

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--energy-{self.name.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """The ini key."""
        return f"energy_{self.name}"

    def register(self, parser: pytest.Parser, group: pytest.OptionGroup) -> None:
        """Add option and ini key to pytest's parser."""
        details: dict[str, Any] = {"nargs": "?", "const": self.bare} if self.bare else {}
        if self.repeatable:
            details = {"action": "append"}
        if self.is_switch:
            details = {"action": "store_const", "const": "on"}
        notes = [*(["repeatable"] if self.repeatable else [])]
        notes += [f"default: {self.default}"] if self.default and not self.is_switch else []
        text = f"{self.help} ({'; '.join(notes)})" if notes else self.help
        escaped = text.replace("%", "%%")
        group.addoption(self.flag, dest=self.ini, default=None, metavar=self.metavar, help=escaped, **details)
        # The first clause says what the setting does; the help of the option has the rest.
        summary = re.split(r"[.:;] ", self.help)[0]
        parser.addini(self.ini, f"{summary} (default of {self.flag})", default=self.default or "")

    def add_argument(self, parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """Add the option to a command of ``llenergy``, without the prefix ``energy-``.

        The parsed value is text, or None without the option: ``read_argument`` converts it.
        """
        details: dict[str, Any] = {"action": "append", "default": []} if self.repeatable else {}
        notes = [*(["repeatable"] if self.repeatable else [])]
        notes += [f"default: {self.default}"] if self.default else []
        text = self.help.replace("--energy-", "--")
        # An abbreviation such as GPUs keeps its capitals.
        first = text[:1] if text[1:2].isupper() else text[:1].lower()
        text = first + text[1:] + (f" ({'; '.join(notes)})" if notes else "")
        parser.add_argument(
            self._argument, dest=self.name, metavar=self.metavar, help=text.replace("%", "%%"), **details
        )

    def read_argument(self, text: str | None) -> Any:
        """Convert the value of an argument of ``llenergy``; None gives the default.

        Raises:
            PlanError: If the value is invalid; the message names the argument.
        """
        if text is None:
            return None if self.default is None else self.read(self.default)
        try:
            return self.read(text)
        except ValueError as error:
            raise PlanError(f"{self._argument}={text}: {error}") from None

    @property
    def _argument(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def option(default: str | None, read: Callable[[str], Any], metavar: str, help: str, **details: Any) -> Any:  # noqa: A002
    """Declare a field of Settings as an option; the arguments are those of ``Option``."""
    row = {"default": default, "read": read, "metavar": metavar, "help": help, **details}
    return field(metadata=row)


# Generating methods of a dataclass takes time in every run, so unused ones are left out.
@dataclass(frozen=True, repr=False, eq=False)
class Settings:
    """The values of all options, checked. Times are seconds; ``None`` and empty values mean automatic."""

    report: Path | None = option(
        None,
        output_file("report", "--energy-report", DEFAULT_REPORT),
        "FILE.json",
        f"Write the records of this run as JSON. Without a name: {DEFAULT_REPORT}",
        bare=DEFAULT_REPORT,
        is_path=True,
    )
    html: Path | None = option(
        None,
        output_file("page", "--energy-html", DEFAULT_PAGE),
        "FILE.html",
        "Write the records of this run as an HTML page with figures (needs the extra html). "
        f"Without a name: {DEFAULT_PAGE}",
        bare=DEFAULT_PAGE,
        is_path=True,
    )
    disable: bool = option(
        "off",
        switch,
        "",
        "Call measured work once and measure nothing; a test that reads an energy is skipped from there on",
        is_switch=True,
    )
    skip: bool = option("off", switch, "", "Skip the tests that measure energy", is_switch=True)
    only: bool = option("off", switch, "", "Skip the tests that measure no energy", is_switch=True)
    rounds: int | None = option(
        "auto",
        auto_or(integer(1, defaults.MAX_ROUNDS)),
        "N",
        f"Minimum number of measured rounds of each test, whatever they take; auto: {defaults.ROUNDS}, or "
        f"{defaults.FLOOR_ROUNDS} if the budget is spent before",
    )
    warmup: int | None = option(
        "auto",
        auto_or(integer(0, defaults.MAX_ROUNDS)),
        "N",
        "Unmeasured iterations before the first round; auto: until durations have settled",
    )
    gap: float = option(
        "0.25", seconds, "SECONDS", "Minimum quiet time around each round; slow counters extend it"
    )
    target: float = option(
        "2%",
        share,
        "PERCENT",
        "Relative standard uncertainty to reach: determines iterations per round and additional rounds",
    )
    budget: float = option(
        "20",
        seconds,
        "SECONDS",
        "Measuring time of a test, warm-up included, after which no further round starts; each test has one "
        f"warm-up and {defaults.FLOOR_ROUNDS} rounds, or as many as --energy-rounds says",
    )
    model: str = option(
        "",
        str,
        "MODEL",
        "Hub id, directory, .gguf file or random:PRESET. Without it: "
        f"{defaults.MODEL_HUB_ID.rpartition('/')[2]}",
        may_be_path=True,
    )
    backend: tuple[str, ...] = option(
        "", names, "NAME[,NAME]", "Run only these backends. Without it: all", repeatable=True, joins=True
    )
    python: tuple[tuple[str, Path], ...] = option(
        "",
        backend_python,
        "NAME=PYTHON",
        "Run the ranks of this backend in the Python of another environment",
        is_path=True,
        repeatable=True,
    )
    gpus: str | None = option(
        None,
        gpus,
        "GPUS",
        "GPUs to use regardless of the environment: all, indices in PCI order, or UUIDs of boards or MIG "
        "instances",
    )
    cluster: str = option(
        "local",
        cluster,
        "{local,ray[:HOST:PORT],slurm}",
        "Where tests with the mark gpus get their GPUs: on this host (local), on hosts of a Ray cluster, or "
        "on those of the Slurm job that pytest runs in",
    )
    meter: tuple[str, ...] = option(
        "auto", meters, "NAME[,NAME]", "Meters to use; a meter with an argument, NAME:ARGUMENT, comes last"
    )
    require: str | None = option(None, word("measured"), "measured", "Fail instead of estimating")
    threads: int | None = option(
        None, integer(1, defaults.MAX_THREADS), "N", "CPU threads of each rank. Without it: its cores"
    )
    start_method: Literal["spawn", "forkserver"] = option(
        "spawn",
        word("spawn", "forkserver"),
        "{spawn,forkserver}",
        "Start ranks as fresh interpreters (spawn) or as forks of a process that has imported their "
        "libraries (forkserver)",
    )
    isolation: Literal["test", "backend", "run"] = option(
        "backend",
        word("test", "backend", "run"),
        "{test,backend,run}",
        "Which tests share ranks: those of one backend and model (backend), all (run), or none (test)",
    )
    rank_logs: Path | None = option(
        None, Path, "DIR", "Keep the output of each rank in this directory", is_path=True
    )
    timeout: float = option("600", seconds, "SECONDS", "Longest wait for a rank")
    lease_timeout: float = option("1800", seconds, "SECONDS", "Longest wait for a device")
    busy: Literal["fail", "skip"] = option(
        "fail", word("fail", "skip"), "{fail,skip}", "Fail or skip a test whose GPU another process uses"
    )
    busy_timeout: float = option(
        "60", seconds, "SECONDS", "Longest wait for other processes to leave the GPU"
    )
    prompts: Path | None = option(
        None, Path, "FILE", "Prompts for the prompts fixture, one per line", is_path=True
    )
    save: str | None = option(
        None,
        saved_name,
        "NAME",
        f"Keep the records of this run as {defaults.SAVED}/NAME.json in the root directory, for "
        "--energy-compare=NAME",
    )
    compare: str | None = option(
        None,
        str.strip,
        "BASELINE",
        "Compare with this report: a file, or a name given to --energy-save",
    )
    fail_on: tuple[Threshold, ...] = option(
        "",
        threshold,
        "METRIC:EXPR",
        "Fail tests whose metric is worse than in the baseline, such as energy_j:3% or energy_j:3%+2J",
        repeatable=True,
    )
    columns: tuple[str, ...] | None = option(
        None,
        columns,
        "NAME[,NAME]",
        f"Columns of the summary: {', '.join(defaults.FACT_COLUMNS)} or metrics. Without it: "
        "energy_j, the energy per token, output_tokens_per_s or duration_s, meter, device and types that "
        "differ, and metrics of the tests' own",
    )
    server_command: tuple[tuple[str, str], ...] = option(
        "",
        server_command,
        "[NAME=]COMMAND",
        "Start this server for the backend NAME, or server without a name, such as "
        "'llama-server -m {model} --port {port}', without a shell",
        repeatable=True,
    )
    server_url: str = option(
        "",
        str.strip,
        "URL",
        "URL of a server that already runs on this host, such as http://127.0.0.1:8000",
    )
    server_health: str = option(
        "/health", url_path, "PATH", "Path that answers with status 200 when the server is ready"
    )
    server_model: str = option(
        "",
        str.strip,
        "NAME",
        "Name of the model in the server's API. Without it: the first that the server lists",
    )
    floor: float = option(
        f"{defaults.FLOOR * 100:g}%",
        floor,
        "PERCENT",
        "Difference between two runs of the same code on this machine: smaller changes do not count",
    )
    agreement: float = option(
        f"{defaults.AGREEMENT * 100:g}%",
        agreement,
        "PERCENT",
        "Smallest share of the baseline's greedy tokens, or of its accuracy if outputs are scored, that a "
        "test must keep for a saving to count as an improvement; 0 turns this check off",
    )
    inconclusive: defaults.Inconclusive = option(
        "warn",
        word(*get_args(defaults.Inconclusive)),
        f"{{{','.join(get_args(defaults.Inconclusive))}}}",
        "What to do with a test if --energy-fail-on is inconclusive",
    )
    removed: defaults.Removed = option(
        "fail",
        word(*get_args(defaults.Removed)),
        f"{{{','.join(get_args(defaults.Removed))}}}",
        "What to do if a test of the baseline is not gated: deleted, deselected, skipped or xfailed",
    )
    flops: bool = option(
        "off",
        flops_switch,
        "{on,off}",
        "Count floating-point operations in a separate pass after the rounds. Without a value: on",
        bare="on",
    )

    @property
    def measures_nothing(self) -> bool:
        """Whether the run measures no test, so that none has a record."""
        return self.disable or self.skip

    @property
    def keeps_something(self) -> bool:
        """Whether the run keeps or compares what it measures."""
        kept = (self.report, self.html, self.save, self.compare)
        return any(each is not None for each in kept)

    @property
    def layout(self) -> Layout:
        """Layout of the summary."""
        from pytest_llenergy.report.layout import Layout

        return Layout(self.columns or ())

    @property
    def names_something(self) -> bool:
        """Whether the options name something to check before any test, such as GPUs or a model."""
        return bool(self.gpus or self.prompts or self.cluster != "local" or self.names_plugins)

    @property
    def names_plugins(self) -> bool:
        """Whether one of the options concerns a backend or meter, which a plugin may provide."""
        server = self.server_url or self.server_command
        return bool(self.model or self.backend or self.python or self.meter or server)

    @property
    def writes_something(self) -> bool:
        """Whether the run writes files or directories that the options name."""
        return any(each is not None for each in (self.report, self.html, self.save, self.rank_logs))


OPTIONS = tuple(Option(name=each.name, **each.metadata) for each in fields(Settings))


def option_row(name: str) -> Option:
    """Return the option of a field of Settings."""
    return next(each for each in OPTIONS if each.name == name)
