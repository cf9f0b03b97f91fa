# SPDX-License-Identifier: Apache-2.0
"""The options, one row each: fields of Settings define command line, ini keys, types and documentation.

The field ``rounds`` defines the option ``--energy-rounds`` and the ini key ``energy_rounds``. Defaults
belong to the ini keys; on the command line they are ``None``, so that a default never hides an ini value.
Commands of ``llenergy`` share some rows, so this module does not import pytest; ``settings`` reads values.
"""
# ruff: noqa: RUF009 - dataclass fields are declared by calls of ``option``

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.values import (
    auto_or,
    backend_python,
    cluster,
    columns,
    floor,
    gpus,
    integer,
    meters,
    names,
    output_file,
    saved_name,
    seconds,
    server,
    share,
    switch,
    threshold,
    variable,
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
        is_recorded: Whether a report may hold the value, which is no command that may hold a credential.
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
    is_recorded: bool = True

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
        parser.addini(self.ini, f"Default of {self.flag}", default=self.default or "")

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
        f"Write a JSON report; without a name: {DEFAULT_REPORT}",
        bare=DEFAULT_REPORT,
        is_path=True,
    )
    html: Path | None = option(
        None,
        output_file("page", "--energy-html", DEFAULT_PAGE),
        "FILE.html",
        f"Write an HTML page; without a name: {DEFAULT_PAGE}",
        bare=DEFAULT_PAGE,
        is_path=True,
    )
    disable: bool = option(
        "off",
        switch,
        "",
        "Call measured work once, and measure nothing",
        is_switch=True,
    )
    skip: bool = option("off", switch, "", "Skip the tests that measure energy", is_switch=True)
    only: bool = option("off", switch, "", "Skip the tests that measure no energy", is_switch=True)
    rounds: int | None = option(
        "auto",
        auto_or(integer(1, defaults.MAX_ROUNDS)),
        "N",
        "Least number of measured rounds",
    )
    warmup: int | None = option(
        "auto",
        auto_or(integer(0, defaults.MAX_ROUNDS)),
        "N",
        "Iterations before the first round",
    )
    target: float = option(
        "2%",
        share,
        "PERCENT",
        "Relative standard uncertainty to reach",
    )
    budget: float = option(
        "20",
        seconds,
        "SECONDS",
        "Measuring time of a test, with warm-up",
    )
    model: str = option(
        "",
        str,
        "MODEL",
        "Hub id, directory, .gguf file or random:PRESET",
        may_be_path=True,
    )
    backend: tuple[str, ...] = option(
        "", names, "NAME[,NAME]", "Run only these backends", repeatable=True, joins=True
    )
    python: tuple[tuple[str, Path], ...] = option(
        "",
        backend_python,
        "NAME=PYTHON",
        "Python of another environment for a backend",
        is_path=True,
        repeatable=True,
    )
    gpus: str | None = option(
        None,
        gpus,
        "GPUS",
        "GPUs to use: all, indices in PCI order, or UUIDs",
    )
    worker_gpus: int | None = option(
        None,
        integer(1, defaults.MAX_GPUS),
        "N",
        "GPUs that each pytest process has for all its tests",
    )
    cluster: str = option(
        "local",
        cluster,
        "{local,ray[:HOST:PORT],slurm}",
        "Where tests with the mark gpus run",
    )
    meter: tuple[str, ...] = option("auto", meters, "NAME[,NAME]", "Meters to use", is_recorded=False)
    require: str | None = option(None, word("measured"), "measured", "Fail instead of estimating")
    start_method: Literal["spawn", "forkserver"] = option(
        "spawn",
        word("spawn", "forkserver"),
        "{spawn,forkserver}",
        "How ranks start: afresh or as forks",
    )
    isolation: Literal["test", "module", "run"] = option(
        "module",
        word("test", "module", "run"),
        "{test,module,run}",
        "Which tests share ranks",
    )
    timeout: float = option("600", seconds, "SECONDS", "Longest wait for a rank")
    lease_timeout: float = option("1800", seconds, "SECONDS", "Longest wait for a device")
    busy: Literal["fail", "skip"] = option(
        "fail", word("fail", "skip"), "{fail,skip}", "Fail or skip tests whose GPU is in use"
    )
    save: str | None = option(
        None,
        saved_name,
        "NAME",
        f"Keep the report as {defaults.SAVED}/NAME.json",
    )
    compare: str | None = option(
        None,
        str.strip,
        "BASELINE",
        "Report to compare with: a file or a saved name",
    )
    fail_on: tuple[Threshold, ...] = option(
        "",
        threshold,
        "METRIC:EXPR",
        "Fail tests that got worse: energy_j:3%",
        repeatable=True,
    )
    columns: tuple[str, ...] | None = option(
        None,
        columns,
        "NAME[,NAME]",
        "Columns of the table, such as energy_j,meter",
    )
    server: tuple[tuple[str, str], ...] = option(
        "",
        server,
        "[NAME=]URL|COMMAND",
        "Use this running server, or start one by a command",
        repeatable=True,
        is_recorded=False,
    )
    server_key_env: str = option(
        "OPENAI_API_KEY", variable, "NAME", "Environment variable with the API key of servers"
    )
    requests: defaults.Sharing | None = option(
        None,
        word(*get_args(defaults.Sharing)),
        f"{{{','.join(get_args(defaults.Sharing))}}}",
        "Record the energy of each request",
        bare="equal",
    )
    floor: float = option(
        f"{defaults.FLOOR * 100:g}%",
        floor,
        "PERCENT",
        "Smaller changes do not count",
    )
    inconclusive: defaults.Inconclusive = option(
        "warn",
        word(*get_args(defaults.Inconclusive)),
        f"{{{','.join(get_args(defaults.Inconclusive))}}}",
        "What an inconclusive or missing test does",
    )

    @property
    def busy_timeout(self) -> float:
        """Longest wait for other processes to leave the leased GPUs (seconds)."""
        return min(defaults.BUSY_TIMEOUT_S, self.lease_timeout)

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
        """Whether the options name something to check before any test, such as GPUs or a meter."""
        return bool(self.gpus or self.cluster != "local" or self.meter or self.backend or self.server)


OPTIONS = tuple(Option(name=each.name, **each.metadata) for each in fields(Settings))


def option_row(name: str) -> Option:
    """Return the option of a field of Settings."""
    return next(each for each in OPTIONS if each.name == name)
