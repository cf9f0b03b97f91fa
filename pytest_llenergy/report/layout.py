# SPDX-License-Identifier: Apache-2.0
"""How the summary is laid out: which columns, in which order, in which groups.

The words are those of pytest-benchmark where it has one for the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pytest_llenergy.model.record import Record
from pytest_llenergy.model.text import one_line
from pytest_llenergy.report.columns import COLUMNS, DEFAULT, METRICS, Column, backend_of, device_of, model_of

#: What comes before the name of a parameter.
PARAM = "param:"

#: By what tests may be put together, besides ``param:NAME``.
GROUPS: dict[str, Callable[[Record], str]] = {
    "name": lambda record: _name(record.id),
    "func": lambda record: _name(_plain(record.id)),
    "fullfunc": lambda record: _plain(record.id),
    "param": lambda record: record.id.partition("[")[2].removesuffix("]") or "-",
    "backend": backend_of,
    "model": model_of,
    "device": device_of,
}

#: By what tests may be sorted, besides metrics.
NAMES: dict[str, Callable[[Record], str]] = {"name": GROUPS["name"], "fullname": lambda record: record.id}


@dataclass(frozen=True)
class Layout:
    """``sort`` is a name or a metric, with ``-`` before it for the largest first; empty is the run's order.

    Without ``columns`` there are those of ``DEFAULT`` that have anything in them. Groups come in the order of
    their first tests; without ``group_by`` there is one.
    """

    columns: tuple[str, ...] = ()
    sort: str = ""
    group_by: tuple[str, ...] = ()

    def shown(self, records: Sequence[Record]) -> list[Column]:
        """The columns of a summary of these records."""
        if self.columns:
            return [COLUMNS[name] for name in self.columns]
        columns = [COLUMNS[name] for name in DEFAULT]
        return [column for column in columns if any(column.cell(record) != "-" for record in records)]

    def groups(self, records: Sequence[Record]) -> dict[str, list[Record]]:
        """Records by the title of their group, sorted. The only group has none."""
        found: dict[str, list[Record]] = {}
        for record in self._sorted(records):
            found.setdefault(self._title(record), []).append(record)
        first = {self._title(record): None for record in records}
        return {title: found[title] for title in first}

    def _sorted(self, records: Sequence[Record]) -> list[Record]:
        word, largest_first = self.sort.removeprefix("-"), self.sort.startswith("-")
        if word in NAMES:
            return sorted(records, key=NAMES[word], reverse=largest_first)
        if not word:
            return list(records)
        # What has no value comes last, whichever way.
        sign = -1.0 if largest_first else 1.0
        return sorted(records, key=lambda record: sign * _value(record, word, missing=sign * math.inf))

    def _title(self, record: Record) -> str:
        return ", ".join(f"{word.removeprefix(PARAM)}={_group(record, word)}" for word in self.group_by)


#: Where nobody has asked for another.
PLAIN = Layout()


def read_columns(text: str) -> tuple[str, ...]:
    """``--energy-columns``. Raises ``ValueError`` for what it does not know."""
    return _known(_words(text), COLUMNS)


def read_sort(text: str) -> str:
    """``--energy-sort``. Raises ``ValueError`` for what it does not know."""
    word = text.strip()
    _known([word.removeprefix("-")], (*NAMES, *METRICS), "; with - before it the largest comes first")
    return word


def read_group_by(text: str) -> tuple[str, ...]:
    """``--energy-group-by``. Raises ``ValueError`` for what it does not know."""
    words = _words(text)
    plain = [word for word in words if not (word.startswith(PARAM) and word != PARAM)]
    _known(plain, (*GROUPS, f"{PARAM}NAME"))
    return tuple(words)


def _words(text: str) -> list[str]:
    """Each once."""
    words = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError("names nothing")
    return list(words)


def _known(words: Sequence[str], known: Collection[str], more: str = "") -> tuple[str, ...]:
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}{more}")
    return tuple(words)


def _value(record: Record, name: str, missing: float) -> float:
    metric = record.metrics.get(name)
    return missing if metric is None or metric.value is None else metric.value


def _group(record: Record, word: str) -> str:
    if word.startswith(PARAM):
        name = word.removeprefix(PARAM)
        return one_line(str(record.params[name])) if name in record.params else "-"
    return one_line(GROUPS[word](record))


def _plain(name: str) -> str:
    return name.partition("[")[0]


def _name(name: str) -> str:
    """What follows file and class; a parameter may hold colons."""
    test, bracket, params = name.partition("[")
    return f"{test.rpartition('::')[2]}{bracket}{params}"
