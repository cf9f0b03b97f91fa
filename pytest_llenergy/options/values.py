# SPDX-License-Identifier: Apache-2.0
"""Parsers of option values: each converts text to a value, or raises ValueError that names what is valid.

``whole_number`` checks an argument of a mark or call, which is no text.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.defaults import MAX_FLOOR, SAVED

if TYPE_CHECKING:
    from pytest_llenergy.compare.gate import Threshold


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        # Python refuses to convert thousands of digits.
        valid = re.fullmatch(r"\s*[0-9]{1,20}\s*", text) and minimum <= int(text) <= maximum
        if not valid:
            raise ValueError(f"needs a whole number from {minimum} to {maximum}")
        return int(text)

    return read


def whole_number(name: str, value: object, minimum: int) -> int:
    """Return an argument that is a whole number. Raises ``PlanError`` with its name."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise PlanError(f"{name} is {value!r}, needs a whole number, {minimum} or more")
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError("needs a number of seconds above 0")
    return value


def auto_or(read: Callable[[str], int]) -> Callable[[str], int | None]:
    def read_auto(text: str) -> int | None:
        try:
            return None if text.strip() == "auto" else read(text)
        except ValueError as error:
            raise ValueError(f'{error}, or "auto"') from None

    return read_auto


def share(text: str) -> float:
    value = _share(text)
    if not 0 < value < 1:
        raise ValueError("needs a share between 0 and 1, such as 2% or 0.02")
    return value


def floor(text: str) -> float:
    value = _share(text)
    if not 0 <= value <= MAX_FLOOR:
        raise ValueError(f"needs a share from 0 to {MAX_FLOOR:.0%}, such as 1% or 0.01")
    return value


def _share(text: str) -> float:
    """Parse a share or a percentage; the result is NaN if it is neither."""
    number, _, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if "%" in text else float(number)
    except ValueError:
        return nan
    return nan if rest else value


def names(text: str) -> tuple[str, ...]:
    return _names(text.split(","), text)


def meters(text: str) -> tuple[str, ...]:
    """Parse names separated by commas. A meter's argument, after a colon, extends to the end."""
    plain, colon, argument = text.partition(":")
    parts = plain.split(",")
    parts[-1] += colon + argument
    return _names(parts, text)


def _names(parts: Sequence[str], text: str) -> tuple[str, ...]:
    selected = tuple(name for name in (part.strip() for part in parts) if name)
    if text.strip() and not selected:
        raise ValueError("no name given")
    if "auto" in selected and len(selected) > 1:
        raise ValueError("auto chooses the meters, so it stands alone")
    return () if selected == ("auto",) else selected


def gpus(text: str) -> str:
    elements = [element.strip() for element in text.split(",")]
    if not all(elements) or ("all" in elements and len(elements) > 1):
        raise ValueError("needs all, or indices and UUIDs separated by commas, such as 0,2")
    return ",".join(elements)


def cluster(text: str) -> str:
    if not re.fullmatch(r"local|slurm|ray(:([^][:/\s]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})?", text.strip()):
        raise ValueError("needs local, slurm, ray or ray:HOST:PORT")
    return text.strip()


def server(text: str) -> tuple[str, str]:
    """Parse ``NAME=URL`` or ``NAME=COMMAND``; without a name it is ``server``."""
    named = re.match(r"([A-Za-z][\w-]*)=\s*(?=\S)", text.strip())
    if re.fullmatch(r"[A-Za-z][\w-]*=", text.strip()):
        raise ValueError("nothing follows the name; write NAME=URL or NAME=COMMAND")
    name, command = (named[1], text.strip()[named.end() :]) if named else ("server", text.strip())
    try:
        shlex.split(command)
    except ValueError as error:
        raise ValueError(f"cannot be read as a command: {error}") from None
    return name, command


def variable(text: str) -> str:
    """Parse the name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_]\w*", text.strip()):
        raise ValueError("needs the name of an environment variable, and not its value")
    return text.strip()


def word(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.strip() not in words:
            *others, last = words
            raise ValueError(f"must be {', '.join(others)} or {last}" if others else f"must be {last}")
        return text.strip()

    return read


def switch(text: str) -> bool:
    # The words of pytest's own booleans; TOML has ``true``.
    word = text.strip().lower()
    if word not in ("on", "true", "yes", "1", "off", "false", "no", "0", ""):
        raise ValueError("must be on or off")
    return word in ("on", "true", "yes", "1")


def output_file(what: str, flag: str, default: str) -> Callable[[str], Path]:
    """Parse a file to write. A test path is an error: it was meant to follow an option without a value.

    Args:
        what: What the file holds, for messages.
        flag: The option.
        default: Default name, whose suffix is required.
    """
    suffix = Path(default).suffix

    def read(text: str) -> Path:
        path = Path(text)
        # ``Path.is_dir`` raises for a path that is too long; ``os.path.isdir`` returns False.
        if os.path.isdir(path) or "::" in text or path.suffix == ".py":  # noqa: PTH112
            raise ValueError(
                f"names a test path, not a {what}; did you mean: pytest {text} {flag} "
                f"(the {what}'s name takes an equals sign: {flag}={default})"
            )
        if path.suffix != suffix:
            raise ValueError(f"the {what}'s name must end in {suffix}; did you mean {text}{suffix}?")
        return path

    return read


def saved_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text) or text.endswith(".json"):
        raise ValueError(
            f"needs a plain name, such as main: it becomes {SAVED}/main.json; "
            "--energy-report=FILE.json writes to any other place"
        )
    return text


def backend_python(text: str) -> tuple[str, Path]:
    backend, _, path = (part.strip() for part in text.partition("="))
    if not (backend and path):
        raise ValueError("needs a backend and its Python, such as vllm=.venvs/vllm/bin/python")
    return backend, Path(path).expanduser()


def columns(text: str) -> tuple[str, ...]:
    from pytest_llenergy.report.layout import parse_columns

    return parse_columns(text)


def threshold(text: str) -> Threshold:
    from pytest_llenergy.compare.gate import parse_fail_on

    try:
        return parse_fail_on(text)
    except PlanError as error:
        raise ValueError(str(error)) from None
