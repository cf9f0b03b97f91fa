# SPDX-License-Identifier: Apache-2.0
"""Sessions of any command: its energy by ``llenergy run``, and numbers from the JSON that it wrote.

The report of a session has one record with one round, the whole command. Numbers that the command tells are
custom metrics of the record, and so is the energy per such a number.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import pytest_llenergy
from pytest_llenergy.errors import PlanError
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.record.base import MALFORMED, Direction
from pytest_llenergy.record.custom_metrics import explain_bad_name, make_metric
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.files import read_limited
from pytest_llenergy.record.metrics import ROUND_METRICS, compute_metrics, scale_metric
from pytest_llenergy.record.record import CustomMetric, MeterInfo, Record, Round, WindowRecord
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, SideName, Source, Tool
from pytest_llenergy.scratch import ScratchDirectory

#: The value that tells the seconds of the work itself; the rest of a session is start-up.
WORK = "work_s"

#: Words for ``--better``.
DIRECTIONS: dict[str, Direction] = {"lower": "less", "higher": "more"}

#: Most keys of a file that a message names.
MAX_KEYS = 8

#: Inode and time of change of each file: any writer changes one of them.
Stamps = Mapping[str, tuple[int, int] | None]


@dataclass(frozen=True)
class Value:
    """A number to read after each session: ``--value NAME=FILE:PATH``."""

    name: str
    file: str
    path: str


@dataclass(frozen=True)
class MeasuredCommand:
    """How a command that is not pytest is measured, and what is read from its files.

    Attributes:
        name: Id of its record.
        values: Numbers to read.
        per: Names of values by which the energy is divided.
        better: The direction that is better, of values that are judged themselves.
        options: Options of ``llenergy run``.
    """

    name: str
    values: tuple[Value, ...] = ()
    per: tuple[str, ...] = ()
    better: Mapping[str, Direction] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that are judged unless the user names others."""
        return [*([energy_per(name) for name in self.per] or ["energy_j"]), *self.better]

    def check_metric(self, name: str) -> None:
        """Raise ``PlanError`` if sessions will not have a metric."""
        told = [each.name for each in self.values]
        known = [*told, *map(energy_per, self.per)]
        if name not in ROUND_METRICS and name not in known:
            raise PlanError(
                f"unknown metric {name!r}; --value NAME=FILE:PATH adds NAME, and --per NAME adds "
                f"{energy_per('NAME')}"
            )

    def look(self, directory: Path) -> Stamps:
        """Return what the files are before a session, to tell whether it wrote them."""
        return {each.file: _stamp(directory / each.file) for each in self.values}

    @contextmanager
    def output_file(self) -> Iterator[Path]:
        """Provide a file for the output of ``llenergy run``; it is removed, as it names the whole command."""
        with ScratchDirectory() as scratch:
            yield scratch.path / "energy.json"

    def words(self, command: Sequence[str], output: Path) -> list[str]:
        """Return the command line of a session."""
        run = module_command(
            "pytest_llenergy.cli", "run", "--format=json", f"--output={output}", *self.options
        )
        return [*run, "--", *command]

    def read_report(self, output: Path, directory: Path, before: Stamps, source: Source) -> Report:
        """Return the report of a session.

        Args:
            output: What ``llenergy run`` wrote.
            directory: The directory of the command.
            before: The files before the session.
            source: The code.

        Raises:
            PlanError: A value is missing.
        """
        found = msgspec.json.decode(output.read_bytes(), type=_Output)
        window = found.window
        same = set(WindowRecord.__struct_fields__) & set(Round.__struct_fields__)
        round_ = Round(**{name: getattr(window, name) for name in same})
        coverage = min((meter.coverage for meter in found.meters), default=1.0)
        metrics = compute_metrics([round_], None, coverage)
        custom: dict[str, CustomMetric] = {}
        for name, value in self._read(directory, before).items():
            metrics[name], custom[name] = make_metric(name, value, better=self.better.get(name, "more"))
            if name == WORK and value > window.duration_s:
                took = f"{value:g} s of work in a session of {window.duration_s:.3g} s"
                raise PlanError(f"--value {WORK}: {took}; it needs the seconds of the work")
            if name not in self.per:
                continue
            if value <= 0:
                raise PlanError(f"--per {name}: {name} is {value:g}; energy cannot be divided by it")
            metrics[energy_per(name)] = scale_metric(metrics["energy_j"], 1 / value, f"J/{name}"[:24], None)
            custom[energy_per(name)] = CustomMetric(better="less")
        gpus = [name.partition(":")[2] for name in window.by_domain if name.startswith("gpu:")]
        record = Record(
            id=self.name,
            attempt=1,
            status="measured" if window.energy_j is not None or custom else "invalid",
            reason=window.reason,
            start_s=window.start_s,
            devices=gpus or ["cpu"],
            meters=found.meters,
            rounds=[round_],
            metrics=metrics,
            custom=custom,
            flags=window.flags,
        )
        run = RunInfo(
            id=uuid.uuid4().hex,
            started_at=found.started_at,
            finished_at=None,
            complete=True,
            argv=[],
            exit_status=found.exit_status,
        )
        tool = Tool(name="pytest-llenergy", version=pytest_llenergy.__version__)
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=tool,
            run=run,
            source=source,
            environment=found.environment,
            records=[record],
        )

    def _read(self, directory: Path, before: Stamps) -> dict[str, float]:
        after = self.look(directory)
        for file, stamp in after.items():
            if stamp is None:
                raise PlanError(f"--value: the command wrote no {file} in {directory}")
            if stamp == before[file]:
                raise PlanError(
                    f"--value: {directory / file} is of an earlier run: this one did not write it"
                )
        documents = {file: _load(directory / file) for file in after}
        return {each.name: _find(documents[each.file], each) for each in self.values}


class _Output(msgspec.Struct):
    """What ``llenergy run --format json`` prints, as far as it is needed here."""

    exit_status: int
    started_at: str
    environment: Environment
    meters: list[MeterInfo]
    window: WindowRecord


def energy_per(name: str) -> str:
    """Return the name of the metric for the energy per value."""
    return f"J_per_{name}"


def parse_measured(
    name: str,
    values: Sequence[str],
    per: Sequence[str],
    better: Sequence[str],
    options: Sequence[str] = (),
) -> MeasuredCommand:
    """Parse ``NAME=FILE:PATH``, names, and ``NAME=higher`` or ``NAME=lower``.

    Raises:
        PlanError: One is malformed, or names a value that is not given.
    """
    found: dict[str, Value] = {}
    for text in values:
        match = re.fullmatch(r"([^=]+)=(.+):([^:/]+)", text)
        if match is None:
            raise PlanError(f"--value {text!r} is not NAME=FILE:PATH, such as tokens=out.json:totals.output")
        why = explain_bad_name(match[1]) or explain_bad_name(energy_per(match[1]))
        if why is not None:
            raise PlanError(f"--value {match[1]}: {why}")
        if match[1] in found:
            raise PlanError(f"--value {match[1]} is given twice")
        found[match[1]] = Value(*match.groups())
    judged: dict[str, Direction] = {}
    for text in better:
        value, _, word = text.partition("=")
        if word not in DIRECTIONS:
            raise PlanError(f"--better {text!r} is not NAME=higher or NAME=lower")
        judged[value] = DIRECTIONS[word]
    for option, names in (("per", per), ("better", judged)):
        for each in names:
            if each not in found:
                raise PlanError(f"--{option} {each} needs --value {each}=FILE:PATH")
    return MeasuredCommand(name, tuple(found.values()), tuple(dict.fromkeys(per)), judged, tuple(options))


def describe_startup(sides: Mapping[SideName, Record]) -> str | None:
    """Return how much of the sessions was start-up, if the command tells the seconds of its work."""
    parts, share = [], 0.0
    for name, record in sides.items():
        work_s, total_s = record.value_of(WORK), record.value_of("duration_s")
        if work_s is None or not total_s:
            return None
        share = max(share, 1 - work_s / total_s)
        parts.append(f"{total_s - work_s:.3g} of {total_s:.3g} s ({1 - work_s / total_s:.0%}) of {name}")
    shown = f"10% more work is about {10 * (1 - share):.2g}% more seconds"
    return f"start-up, all but {WORK}: {', '.join(parts)}; {shown}"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _load(path: Path) -> Any:
    try:
        return json.loads(read_limited(path))
    except OSError as error:
        raise PlanError(f"--value: {path}: {error.strerror}") from None
    except (ValueError, *MALFORMED) as error:
        raise PlanError(f"--value: {path} is not JSON ({error})") from None


def _find(document: Any, value: Value) -> float:
    """Return the number at a dotted path; parts that are numbers count the items of a list from 0."""
    where = document
    rest = value.path.split(".")
    while rest:
        for length in range(len(rest), 0, -1):  # keys may have dots, such as p99.9
            key = ".".join(rest[:length])
            if isinstance(where, dict) and key in where:
                where = where[key]
                break
            if (
                isinstance(where, list)
                and re.fullmatch(r"-?\d+", key)
                and -len(where) <= int(key) < len(where)
            ):
                where = where[int(key)]
                break
        else:
            keys = list(where)[:MAX_KEYS] if isinstance(where, dict) else []
            has = f"; there: {', '.join(map(str, keys))}" if keys else ""
            raise PlanError(f"--value {value.name}: {value.file} has no {value.path} (not {rest[0]!r}{has})")
        rest = rest[length:]
    if isinstance(where, bool) or not isinstance(where, int | float) or not math.isfinite(where):
        raise PlanError(
            f"--value {value.name}: {value.path} of {value.file} is no number: {str(where)[:40]!r}"
        )
    return float(where)
