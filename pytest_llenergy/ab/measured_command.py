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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import pytest_llenergy
from pytest_llenergy.compare.comparison import make_sample
from pytest_llenergy.compare.statistics import Sample
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import OTHER_WORKLOAD
from pytest_llenergy.record.custom_metrics import explain_bad_name, make_metric
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.metrics import ROUND_METRICS, compute_metrics, scale_metric, values_of_rounds
from pytest_llenergy.record.record import CustomMetric, MeterInfo, Record, Round, WindowRecord
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool

#: The value that tells the seconds of the work itself; the rest of a session is start-up.
WORK = "work_s"

#: Words for ``--better``.
DIRECTIONS: dict[str, Direction] = {"lower": "less", "higher": "more"}

#: Values that a command tells are of other work if they differ by more, relative to the base.
SAME_WORK = 0.03

#: Inode and time of change of each file, of which any writer changes one; None if there is no such file.
Stamps = Mapping[str, tuple[int, int] | None]


@dataclass(frozen=True)
class Value:
    """A number to read after each session: ``--value NAME=FILE:PATH``."""

    name: str
    file: str
    path: str


@dataclass(frozen=True)
class MeasuredCommand:
    """How a command that is not pytest is measured, and what is read from its files."""

    name: str  # id of its record
    values: tuple[Value, ...] = ()
    per: tuple[str, ...] = ()  # values by which the energy is divided
    better: Mapping[str, Direction] = field(default_factory=dict)  # of values that are judged themselves
    options: tuple[str, ...] = ()  # of llenergy run

    def choose_metrics(self, named: Sequence[str], fail_on: Sequence[str]) -> list[str]:
        """Return the metrics to judge: those named, or else the energy, and values with a direction."""
        known = {*ROUND_METRICS, *(each.name for each in self.values), *map(energy_per, self.per)}
        for name in (*named, *(text.partition(":")[0].strip() for text in fail_on)):
            if name not in known:
                raise PlanError(
                    f"unknown metric {name!r}; --value NAME=FILE:PATH adds NAME, and --per NAME adds "
                    f"{energy_per('NAME')}"
                )
        usual = [*map(energy_per, self.per)] or ["energy_j"]
        return [*named, *([] if named or fail_on else usual), *self.better]

    def look(self, directory: Path) -> Stamps:
        """Return what the files are before a session, to tell whether it wrote them."""
        stamps: dict[str, tuple[int, int] | None] = {}
        for each in self.values:
            path = directory / each.file
            stamps[each.file] = (path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else None
        return stamps

    def read_report(self, output: Path, directory: Path, before: Stamps, source: Source) -> Report:
        """Return the report of a session."""
        found = msgspec.json.decode(output.read_bytes(), type=_Output)
        window = found.window
        same = set(WindowRecord.__struct_fields__) & set(Round.__struct_fields__)
        round_ = Round(**{name: getattr(window, name) for name in same})
        metrics = compute_metrics([round_], None, min((each.coverage for each in found.meters), default=1.0))
        custom: dict[str, CustomMetric] = {}
        for name, value in self._read_values(directory, before).items():
            metrics[name], custom[name] = make_metric(name, value, better=self.better.get(name, "more"))
            if name in self.per:
                if value <= 0:
                    raise PlanError(f"--per {name}: {name} is {value:g}; energy cannot be divided by it")
                unit = f"J/{name}"[:24]
                metrics[energy_per(name)] = scale_metric(metrics["energy_j"], 1 / value, unit, None)
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
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            run=run,
            source=source,
            environment=found.environment,
            records=[record],
        )

    def _read_values(self, directory: Path, before: Stamps) -> dict[str, float]:
        for file, stamp in self.look(directory).items():
            if stamp is None:
                raise PlanError(f"--value: the command wrote no {file} in {directory}")
            if stamp == before[file]:
                raise PlanError(
                    f"--value: {directory / file} is of an earlier run: this one did not write it"
                )
        documents = {each.file: _load(directory / each.file) for each in self.values}
        return {each.name: _find(documents[each.file], each) for each in self.values}

    def sample(self, record: Record, metric: str) -> Sample | None:
        """Return the sessions of a joined record: the energy per value, or a value that is never zero."""
        divisor = next((name for name in self.per if energy_per(name) == metric), None)
        told = record.custom[divisor or metric].values
        if min(told, default=0.0) <= 0 or len(told) != len(record.rounds):
            return None
        if divisor is None:
            return Sample(tuple(told), pairs=tuple(range(len(told))))
        energies = values_of_rounds("energy_j", record.rounds)[0]
        return make_sample([(index, each.scale(1 / told[index])) for index, each in energies], record)

    def list_other_work(self, base: Record, head: Record) -> list[str]:
        """Return a note for each value by which the sides did other work: their energy differs anyway."""
        notes = []
        for name in {each.name for each in self.values} - self.better.keys() - {WORK}:
            before, after = base.value_of(name), head.value_of(name)
            if before is not None and after is not None and abs(after - before) > SAME_WORK * abs(before):
                notes.append(f"{OTHER_WORKLOAD}{name}: {before:g} -> {after:g}")
        return sorted(notes)


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
    name: str, values: Sequence[str], per: Sequence[str], better: Sequence[str], options: Sequence[str] = ()
) -> MeasuredCommand:
    """Parse ``NAME=FILE:PATH``, names, and ``NAME=higher`` or ``NAME=lower``."""
    found: dict[str, Value] = {}
    for text in values:
        match = re.fullmatch(r"([^=]+)=(.+):([^:/]+)", text)
        if match is None:
            raise PlanError(f"--value {text!r} is not NAME=FILE:PATH, such as tokens=out.json:totals.output")
        why = explain_bad_name(match[1]) or explain_bad_name(energy_per(match[1]))
        if why is not None:
            raise PlanError(f"--value {match[1]}: {why}")
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


def describe_startup(base: Record, head: Record) -> str | None:
    """Return how much of the sessions was start-up, if the command tells the seconds of its work."""
    parts, shares = [], []
    for side, record in (("base", base), ("head", head)):
        work_s, total_s = record.value_of(WORK), record.value_of("duration_s")
        if work_s is None or not total_s:
            return None
        shares.append(1 - work_s / total_s)
        parts.append(f"{total_s - work_s:.3g} of {total_s:.3g} s ({shares[-1]:.0%}) of {side}")
    shown = f"10% more work is about {10 * (1 - max(shares)):.2g}% more seconds"
    return f"start-up, all but {WORK}: {', '.join(parts)}; {shown}"


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"--value: {path}: not readable as JSON ({error})") from None


def _find(document: Any, value: Value) -> float:
    """Return the number at a dotted path; parts that are numbers count the items of a list from 0."""
    found = document
    for part in value.path.split("."):
        try:
            found = found[int(part) if isinstance(found, list) else part]
        except (LookupError, TypeError, ValueError):
            there = f"; there: {', '.join(list(found)[:8])}" if isinstance(found, dict) and found else ""
            raise PlanError(
                f"--value {value.name}: {value.file} has no {value.path} (not {part!r}{there})"
            ) from None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise PlanError(
            f"--value {value.name}: {value.path} of {value.file} is no number: {str(found)[:40]!r}"
        )
    return float(found)
