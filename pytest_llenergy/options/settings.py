# SPDX-License-Identifier: Apache-2.0
"""What the options of a run say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_llenergy.options import OPTIONS, Option
from pytest_llenergy.options.values import READERS

if TYPE_CHECKING:
    from pytest_llenergy.compare.threshold import Threshold
    from pytest_llenergy.report.layout import Layout


class Settings:
    """What the options say, checked. Times are seconds; empty tuples and ``None`` mean automatic."""

    report: Path | None
    html: Path | None
    rounds: int
    warmup: int | None
    gap: float
    target: float
    budget: float
    model: str
    backend: tuple[str, ...]
    python: tuple[tuple[str, Path], ...]
    gpus: str | None
    meter: tuple[str, ...]
    require: str | None
    threads: int | None
    start_method: Literal["spawn", "forkserver"]
    isolation: Literal["test", "backend", "run"]
    rank_logs: Path | None
    timeout: float
    lease_timeout: float
    busy: str
    busy_timeout: float
    prompts: Path | None
    save: str | None
    compare: str | None
    fail_on: tuple[Threshold, ...]
    columns: tuple[str, ...] | None
    sort: str | None
    group_by: tuple[str, ...] | None
    server_command: str
    server_url: str
    server_health: str
    server_model: str
    floor: float
    inconclusive: Literal["warn", "fail", "pass"]
    flops: bool

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: settings do not change")

    @property
    def keeps_something(self) -> bool:
        """Whether the run is there for what it measures."""
        kept = (self.report, self.html, self.save, self.compare)
        return any(each is not None for each in kept)

    @property
    def layout(self) -> Layout:
        """How the summary is laid out."""
        from pytest_llenergy.report.layout import Layout

        return Layout(self.columns or (), self.sort or "", self.group_by or ())

    @property
    def names_something(self) -> bool:
        """Whether a model, backend, Python or meter is named, which can be checked before any test runs."""
        return bool(self.model or self.backend or self.python or self.meter or self.server_url)


SETTINGS = pytest.StashKey[Settings]()


def settings_of(config: pytest.Config) -> Settings:
    """Those of this run, read once. Raises like ``read_settings``."""
    if SETTINGS not in config.stash:
        config.stash[SETTINGS] = read_settings(config)
    return config.stash[SETTINGS]


def read_settings(config: pytest.Config) -> Settings:
    """Command line over ini over default. Raises ``pytest.UsageError`` naming where a bad value stands."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = config.getoption(option.ini, default=None)
        name = option.flag if given is not None else f"ini key {option.ini}"
        texts = _texts(option, given, str(config.getini(option.ini)))
        if given is not None and not all(text.strip() for text in texts):
            raise pytest.UsageError(f"{name}= has no value; leave the option out, or give it one")
        parsed = [_parsed(option, name, text) for text in texts]
        value: Any = tuple(parsed) if option.repeatable else parsed[0]
        base = config.invocation_params.dir if given is not None else config.rootpath
        if option.is_path and value is not None:
            value = tuple((name, base / path) for name, path in value) if option.repeatable else base / value
        # ``Path.exists`` raises for a name that is too long for a file, which is no file.
        elif option.may_be_path and value and os.path.exists(base / value):  # noqa: PTH110
            value = str(base / value)
        values[option.name] = value
    return Settings(**values)


def _texts(option: Option, given: object, ini: str) -> list[str]:
    """What is said: one text, or those of an option that may be repeated."""
    if not option.repeatable:
        return [ini if given is None else str(given)]
    if isinstance(given, list):
        return [str(each) for each in given]
    return [line.strip() for line in ini.splitlines() if line.strip()]


def _parsed(option: Option, name: str, text: str) -> Any:
    try:
        return READERS[option.name](text)
    except ValueError as error:
        raise pytest.UsageError(f"{name}={text}: {error}") from None
