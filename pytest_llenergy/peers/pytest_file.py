# SPDX-License-Identifier: Apache-2.0
"""Cases as a file of tests that a person can read and go on with."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.model.text import one_line
from pytest_llenergy.peers.keys import Case

WIDTH = 100
INDENT = " " * 4

REPEATED = """# Cases of the sweep that differ from another one in nothing that is carried over.
REPEATED = pytest.mark.skip(reason="what its name tells is not carried over; see the earlier case")"""

#: The column of cases that no other column tells apart.
COUNTED = "case"

#: Columns of prompts that its data sets may have, the first that is there counts (``datasets/loader.py``).
FIELDS = ("prompt", "text", "instruction", "input", "question")


@dataclass(frozen=True)
class TestFile:
    """``origin`` and ``title`` are told at its top; ``swept`` are paths that differ between experiments.

    ``arguments`` are options of pytest that the run needs; ``fallback`` stands in the mark ``gpus``.
    """

    __test__ = False

    origin: str
    title: str
    cases: Sequence[Case]
    notes: Sequence[str]
    swept: frozenset[str] = frozenset()
    arguments: Sequence[str] = ()
    fallback: str | None = None

    def text(self, name: str) -> str:
        """The file, which is to be called ``name``."""
        one_model = len({case.model for case in self.cases}) == 1
        datasets = {case.dataset for case in self.cases}
        file = datasets.pop() if len(datasets) == 1 else ""
        parts = [self._head(name), self._imports(file)]
        if one_model:
            parts.append(_fixture("energy_model", f"return {code(self.cases[0].model)}"))
        if file.endswith(".jsonl"):
            parts.append(_prompts(file))
        functions = [
            _Function(
                [case for case in self.cases if case.engine == engine], one_model, self.swept, self.fallback
            )
            for engine in dict.fromkeys(case.engine for case in self.cases)
        ]
        if any(any(each.repeats) for each in functions):
            parts.append(REPEATED)
        parts += [each.text() for each in functions]
        return "\n\n\n".join(part.rstrip() for part in parts) + "\n"

    def _head(self, name: str) -> str:
        engines = ",".join(dict.fromkeys(case.engine for case in self.cases))
        number = f"{len(self.cases)} case" + ("s" if len(self.cases) > 1 else "")
        command = " ".join(
            ["pytest", name, f"--energy-backend={engines}", *self.arguments, "--energy-report"]
        )
        lines = _comment(
            f"{self.title}: {number}, made of {self.origin} (LLenergyMeasure) by llenergy import."
        )
        lines += ["#", "# Run:", f"#   {one_line(command)}"]
        if self.notes:
            lines += ["#", "# Not carried over, or not the same:"]
            lines += [line for note in self.notes for line in _comment(note, "- ")]
        return "\n".join(lines)

    def _imports(self, file: str) -> str:
        needed = ["import json", "from pathlib import Path", ""] if file.endswith(".jsonl") else []
        return "\n".join([*needed, "import pytest"])


class _Function:
    """One test function: the cases of an engine, what they have in common and in what they differ."""

    def __init__(
        self, cases: Sequence[Case], one_model: bool, swept: frozenset[str], fallback: str | None
    ) -> None:
        self._cases, self._swept, self._fallback = cases, swept, fallback
        self._engine = cases[0].engine
        self._rows: list[dict[str, Any]] = [_row_of(case, cases, one_model) for case in cases]
        first = self._rows[0]
        self._vary = [name for name in first if any(row[name] != first[name] for row in self._rows)]
        if len(cases) > 1 and not self._vary:
            # They differ in what is nothing here, and are as many all the same.
            self._rows = [{**row, COUNTED: number} for number, row in enumerate(self._rows, 1)]
            self._vary = [COUNTED]

    @property
    def repeats(self) -> list[bool]:
        """Of each case whether an earlier one is the same here: its name would promise what it is not."""
        seen: set[str] = set()
        found: list[bool] = []
        for row, case in zip(self._rows, self._cases, strict=True):
            told = repr(([(name, value) for name, value in row.items() if name != COUNTED], case.degrees))
            found.append(told in seen)
            seen.add(told)
        return found

    def text(self) -> str:
        """Its marks, its table, and its body."""
        marks = [_marks(case, self._fallback) for case in self._cases]
        alike = all(each == marks[0] for each in marks)
        common = marks[0] if alike else [f"pytest.mark.{_gpus(1, self._fallback)}"]
        lines = [f"@{mark}" for mark in common]
        if self._vary:
            lines += self._table([[] if each == common else each for each in marks])
        options, params = self._arguments("options"), self._arguments("params")
        arguments = ", ".join(["energy", "backend", "prompts", *self._vary])
        lines += [
            f"def test_{_identifier(self._engine)}({arguments}):",
            f"{INDENT}if backend.name != {code(self._engine)}:",
            f"{INDENT * 2}pytest.skip({code(f'a case of {self._engine}')})",
        ]
        if options:
            lines += _call("backend = backend.with_options", options)
        batch = self._value("batch_size", self._rows[0]["batch_size"])
        return "\n".join([*lines, *_call("energy", ["backend.generate", f"prompts[:{batch}]", *params])])

    def _value(self, name: str, value: Any) -> str:
        """A column, or what is the same in every case."""
        return name if name in self._vary else code(value)

    def _arguments(self, group: str) -> list[str]:
        if not _are_alike(self._cases, group):
            return [f"**{group}"]
        given: dict[str, Any] = getattr(self._cases[0], group)
        return [f"{name}={self._value(name, value)}" for name, value in given.items()]

    def _table(self, marks: Sequence[Sequence[str]]) -> list[str]:
        names = [code(name) for name in self._vary]
        lines = ["@pytest.mark.parametrize(", f"{INDENT}{_tuple(names)},", f"{INDENT}["]
        for row, own, case, alike in zip(self._rows, marks, self._cases, self.repeats, strict=True):
            lost = {path: case.lost[path] for path in sorted(self._swept & set(case.lost))}
            if not alike:
                lines += [
                    line
                    for path, value in lost.items()
                    for line in _comment(f"{path} = {value}: not carried over", indent=INDENT * 2)
                ]
            words = [f"{name}{degree}" for name, degree in case.degrees.items()] if own else []
            words += [f"{path.split('.')[-1]}={value}" for path, value in lost.items()] if alike else []
            lines += _table_row(
                [row[name] for name in self._vary], words, [*own, *(["REPEATED"] if alike else [])]
            )
        return [*lines, f"{INDENT}],", ")"]


def _row_of(case: Case, cases: Sequence[Case], one_model: bool) -> dict[str, Any]:
    """What may differ: each argument by its name, or all of a call where not every case has the same."""
    row: dict[str, Any] = {} if one_model else {"energy_model": case.model}
    for group in ("options", "params"):
        given: dict[str, Any] = getattr(case, group)
        row |= given if _are_alike(cases, group) else {group: given}
    return {**row, "batch_size": case.batch}


def _are_alike(cases: Sequence[Case], group: str) -> bool:
    return len({tuple(getattr(case, group)) for case in cases}) == 1


def code(value: Any) -> str:
    """A value of a YAML file as it is written in Python."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if value.isprintable() else repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(code, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code(key)}: {code(each)}" for key, each in value.items()) + "}"
    return repr(value) if value is None or isinstance(value, bool | int | float) else code(str(value))


def _tuple(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _table_row(values: Sequence[Any], more: Sequence[str], marks: Sequence[str]) -> list[str]:
    """One set of values; it is given a name where pytest would number it, or there is ``more`` to tell."""
    parts = [code(value) for value in values]
    if not marks and not any(isinstance(each, dict) for each in values):
        return _wrapped("" if len(parts) > 1 else None, parts)
    if more or any(isinstance(each, dict) for each in values):
        words = [str(each) for each in values if not isinstance(each, dict)]
        words += [f"{key}={one}" for each in values if isinstance(each, dict) for key, one in each.items()]
        parts.append(f"id={code('-'.join([*words, *more]))}")
    if marks:
        parts.append(f"marks={marks[0] if len(marks) == 1 else '[' + ', '.join(marks) + ']'}")
    return _wrapped("pytest.param", parts)


def _wrapped(function: str | None, parts: Sequence[str]) -> list[str]:
    """A call, a tuple (``""``) or a value (``None``), on one line where it fits."""
    indent = INDENT * 2
    if function is None:
        return [f"{indent}{parts[0]},"]
    line = f"{indent}{function}({', '.join(parts)}),"
    if len(line) <= WIDTH:
        return [line]
    return [f"{indent}{function}(", *(f"{indent}{INDENT}{part}," for part in parts), f"{indent}),"]


def _call(function: str, arguments: Sequence[str]) -> list[str]:
    line = f"{INDENT}{function}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return [line]
    return [f"{INDENT}{function}(", *(f"{INDENT * 2}{each}," for each in arguments), f"{INDENT})"]


def _marks(case: Case, fallback: str | None) -> list[str]:
    number = math.prod(case.degrees.values())
    degrees = ", ".join(f"{name}={degree}" for name, degree in case.degrees.items())
    marks = [_gpus(number, fallback), *([f"parallel({degrees})"] if degrees else [])]
    return [f"pytest.mark.{mark}" for mark in marks]


def _gpus(number: int, fallback: str | None) -> str:
    return f"gpus({number}" + (f", fallback={code(fallback)})" if fallback else ")")


def _fixture(name: str, *body: str) -> str:
    return "\n".join(["@pytest.fixture", f"def {name}():", *(f"{INDENT}{line}" for line in body)])


def _prompts(file: str) -> str:
    return _fixture(
        "prompts",
        f"fields = {code(list(FIELDS))}",
        f'lines = Path({code(file)}).read_text(encoding="utf-8").splitlines()',
        "records = [json.loads(line) for line in lines if line.strip()]",
        "found = [[record[field] for field in fields if record.get(field)] for record in records]",
        "return [texts[0] for texts in found if texts]",
    )


def _comment(text: str, bullet: str = "", indent: str = "") -> list[str]:
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=f"{indent}# {bullet}",
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)
