# SPDX-License-Identifier: Apache-2.0
"""What the value of each option may be. What reads one raises ``ValueError`` saying what it needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llenergy.errors import PlanError
from pytest_llenergy.options import DEFAULT_PAGE, DEFAULT_REPORT, SAVED

if TYPE_CHECKING:
    # What only a comparison needs is imported there.
    from pytest_llenergy.compare.threshold import Threshold


def count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.strip().isdecimal()) or int(text) < least:
            raise ValueError(f"needs a whole number, {least} or more")
        return int(text)

    return parse


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError("needs a number of seconds above 0")
    return value


def warmup(text: str) -> int | None:
    return None if text.strip() == "auto" else count(0)(text)


def share(text: str) -> float:
    number, _, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if "%" in text else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 < value < 1:
        raise ValueError("needs a share between 0 and 1, such as 2% or 0.02")
    return value


def meters(text: str) -> tuple[str, ...]:
    """Names apart by commas; an argument after a colon may hold any character and runs to the end."""
    plain, colon, argument = text.partition(":")
    names = plain.split(",")
    names[-1] += colon + argument
    return _names_of(names, text)


def _names_of(parts: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(name for name in (part.strip() for part in parts) if name)
    if text.strip() and not names:
        raise ValueError("names nothing")
    if "auto" in names and len(names) > 1:
        raise ValueError("auto stands alone: it chooses the meters")
    return () if names == ("auto",) else names


def names(text: str) -> tuple[str, ...]:
    return _names_of(text.split(","), text)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: parse(text) if text.strip() else None


def command(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be read as a command: {error}") from None
    return text.strip()


def path(text: str) -> str:
    if not text.strip().startswith("/"):
        raise ValueError("needs a path such as /health")
    return text.strip()


def word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError(f"knows {_number_of(words)}: {', '.join(words)}")
        return text.strip()

    return parse


def switch(flag: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text.strip() not in ("on", "off"):
            raise ValueError(f"knows two words: on, off; did you mean: pytest {text} {flag}")
        return text.strip() == "on"

    return parse


def _number_of(words: Sequence[str]) -> str:
    return {1: "one word", 2: "two words", 3: "three words"}[len(words)]


def file(what: str, flag: str, default: str) -> Callable[[str], Path]:
    suffix = Path(default).suffix

    def parse(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or "::" in text or path.suffix == ".py":
            raise ValueError(
                f"names a test path, not a {what}; did you mean: pytest {text} {flag} "
                f"(the {what}'s name takes an equals sign: {flag}={default})"
            )
        if path.suffix != suffix:
            raise ValueError(f"the {what}'s name must end in {suffix}; did you mean {text}{suffix}?")
        return path

    return parse


def saved_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text) or text.endswith(".json"):
        raise ValueError(
            f"needs a plain name, such as main: it becomes {SAVED}/main.json; "
            "--energy-report=FILE.json writes to a place of your own"
        )
    return text


def python(text: str) -> tuple[str, Path]:
    backend, _, path = (part.strip() for part in text.partition("="))
    if not (backend and path):
        raise ValueError("needs a backend and its Python, such as vllm=.venvs/vllm/bin/python")
    return backend, Path(path).expanduser()


def columns(text: str) -> tuple[str, ...]:
    from pytest_llenergy.report.layout import read_columns

    return read_columns(text)


def sort(text: str) -> str:
    from pytest_llenergy.report.layout import read_sort

    return read_sort(text)


def group_by(text: str) -> tuple[str, ...]:
    from pytest_llenergy.report.layout import read_group_by

    return read_group_by(text)


def fail_on(text: str) -> Threshold:
    from pytest_llenergy.compare.gate import read_fail_on

    try:
        return read_fail_on(text)
    except PlanError as error:
        raise ValueError(str(error)) from None


#: What reads the text of each option of the table.
READERS: dict[str, Callable[[str], Any]] = {
    "report": optional(file("report", "--energy-report", DEFAULT_REPORT)),
    "html": optional(file("page", "--energy-html", DEFAULT_PAGE)),
    "rounds": count(1),
    "warmup": warmup,
    "gap": seconds,
    "target": share,
    "budget": seconds,
    "model": str,
    "backend": names,
    "python": python,
    "gpus": optional(str.strip),
    "meter": meters,
    "require": optional(word("measured")),
    "threads": optional(count(1)),
    "start_method": word("spawn", "forkserver"),
    "isolation": word("test", "backend", "run"),
    "rank_logs": optional(Path),
    "timeout": seconds,
    "lease_timeout": seconds,
    "busy": word("fail", "skip"),
    "busy_timeout": seconds,
    "prompts": optional(Path),
    "save": optional(saved_name),
    "compare": optional(str.strip),
    "fail_on": fail_on,
    "columns": optional(columns),
    "sort": optional(sort),
    "group_by": optional(group_by),
    "server_command": command,
    "server_url": str.strip,
    "server_health": path,
    "server_model": str.strip,
    "floor": share,
    "inconclusive": word("warn", "fail", "pass"),
    "flops": switch("--energy-flops"),
}
