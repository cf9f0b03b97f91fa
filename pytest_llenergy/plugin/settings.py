# SPDX-License-Identifier: Apache-2.0
"""Register the options with pytest, and read their values from command line and ini file."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.options.table import OPTIONS, Option, Settings, option_row
from pytest_llenergy.record.defaults import SAVED
from pytest_llenergy.record.text import one_line, shorten

#: Most characters of an error; a longer one is cut in its middle, since its end says what to do.
MAX_MESSAGE_LENGTH = 2000

SETTINGS = pytest.StashKey[Settings]()


def add_options(parser: pytest.Parser) -> None:
    """Register every option with pytest."""
    group = parser.getgroup("llenergy", "energy of LLM inference")
    for each in OPTIONS:
        each.register(parser, group)


def settings_of(config: pytest.Config) -> Settings:
    """Return the settings of a run, read on first use. Raises like ``read_settings``."""
    if SETTINGS not in config.stash:
        config.stash[SETTINGS] = read_settings(config)
    return config.stash[SETTINGS]


def usage_error(message: str) -> pytest.UsageError:
    """Return an error that pytest prints as one line of limited length, whatever values it contains."""
    return pytest.UsageError(shorten(one_line(message), MAX_MESSAGE_LENGTH))


def read_settings(config: pytest.Config) -> Settings:
    """Read each option from the command line, else the ini file, else its default.

    Raises:
        pytest.UsageError: A value is invalid; the message names the option or ini key.
    """
    settings = Settings(**{each.name: _read_option(each, config) for each in OPTIONS})
    if settings.measures_nothing:
        return replace(settings, report=None, html=None, save=None, compare=None, fail_on=())
    return settings


def option_source(config: pytest.Config, name: str) -> str:
    """Return where the value of an option comes from, the flag or the ini key, to begin a message with."""
    option = option_row(name)
    given = config.getoption(option.ini, default=None) is not None
    return option.flag if given else f"ini key {option.ini}"


def _read_option(option: Option, config: pytest.Config) -> Any:
    given = config.getoption(option.ini, default=None)
    source = option_source(config, option.name)
    if given is not None:
        base = config.invocation_params.dir
        texts = [str(each) for each in (given if isinstance(given, list) else [given])]
        if not all(text.strip() for text in texts):
            raise usage_error(f"{source}= has no value; add one, or leave the option out")
    else:
        base, text = config.rootpath, str(config.getini(option.ini))
        texts = [line for line in text.splitlines() if line.strip()] if option.repeatable else [text]
    values = [_read_text(option, source, text) for text in texts]
    if option.joins:
        return tuple(dict.fromkeys(chain.from_iterable(values)))
    if option.repeatable:
        return tuple((name, base / path) for name, path in values) if option.is_path else tuple(values)
    (value,) = values
    if option.is_path and value is not None:
        return base / value
    # ``Path.exists`` raises for a name that is too long for a file; ``os.path.exists`` returns False.
    if option.may_be_path and value and os.path.exists(base / value):  # noqa: PTH110
        return str(base / value)
    return value


def _read_text(option: Option, source: str, text: str) -> Any:
    if option.default is None and not text.strip():
        return None
    try:
        return option.read(text.strip() if option.repeatable else text)
    except ValueError as error:
        # A key in the place of its variable is not shown.
        shown = "" if option.name == "server_key_env" else f"={text}"
        raise usage_error(f"{source}{shown}: {error}") from None


def recorded_options(config: pytest.Config) -> list[str]:
    """Return this plugin's options on the command line; without those whose values may hold a credential."""
    words = []
    for option in OPTIONS:
        given = config.getoption(option.ini, default=None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and option.is_recorded:
                words.append(option.flag if option.is_switch else f"{option.flag}={value}")
    return words


def saved_as(config: pytest.Config, name: str) -> Path:
    """Return the file of ``--energy-save=NAME``."""
    return config.rootpath / SAVED / f"{name}.json"
