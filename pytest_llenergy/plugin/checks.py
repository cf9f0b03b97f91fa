# SPDX-License-Identifier: Apache-2.0
"""Checks before collection that what the options name is there.

Each error is one line that begins with the option or ini key, so that a wrong value ends the run instead of
failing its tests one by one. A run that names nothing does not import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.plugin.settings import option_source, settings_of, usage_error

if TYPE_CHECKING:
    from pytest_llenergy.plugin.session import RunState


@contextmanager
def naming_option(config: pytest.Config, name: str) -> Iterator[None]:
    """Turn an ``LLEnergyError`` into a usage error that begins with the option or ini key of a value."""
    try:
        yield
    except LLEnergyError as error:
        raise usage_error(f"{option_source(config, name)}: {error}") from None


def check_files(config: pytest.Config) -> None:
    """Make the folders of the report and the page, and check what the page needs.

    Raises:
        pytest.UsageError: It is missing, or a folder cannot be made.
    """
    settings = settings_of(config)
    for name, path in (("report", settings.report), ("html", settings.html)):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise usage_error(f"{option_source(config, name)}={path}: {error.strerror}") from None
    if settings.html is not None:
        from pytest_llenergy.report.html.page import require_html_extra

        with naming_option(config, "html"):
            require_html_extra()


def check_launcher(environment: Mapping[str, str]) -> None:
    """Check that torchrun has not started several pytest processes, each of which would measure all tests.

    Raises:
        pytest.UsageError: It has.
    """
    count = environment.get("WORLD_SIZE", "")
    if {"RANK", "LOCAL_RANK"} <= environment.keys() and count.isdecimal() and int(count[:6]) > 1:
        raise usage_error(
            f"torchrun or the like has started {count} pytest processes, which would all measure the same "
            f"tests; run pytest without it, and tests start their own ranks: @pytest.mark.gpus({count}), or "
            "@pytest.mark.parallel"
        )


def check_names(config: pytest.Config, state: RunState) -> None:
    """Check the cluster, GPUs, meters, backends and servers that the options name.

    Raises:
        pytest.UsageError: One of them does not exist or cannot be used.
    """
    from pytest_llenergy.backends.registry import select_backends
    from pytest_llenergy.devices.inventory import find_gpus
    from pytest_llenergy.devices.visibility import parse_selection
    from pytest_llenergy.energy.meters.select import check_arguments
    from pytest_llenergy.energy.meters.select import check_names as check_meters

    settings = state.settings
    with naming_option(config, "cluster"):
        if settings.cluster != "local" and settings.gpus is not None:
            raise LLEnergyError("--energy-gpus names GPUs of this host; leave it out with a cluster")
        # Opens the cluster.
        assert state.gangs or settings.cluster == "local"
    # If the driver does not answer, tests that need a GPU report it.
    if settings.gpus is not None and not (inventory := find_gpus()).faults:
        with naming_option(config, "gpus"):
            parse_selection(settings.gpus, inventory)
    if settings.meter:
        with naming_option(config, "meter"):
            meters = state.meters
            check_meters(settings.meter, meters)
            check_arguments(settings.meter, meters)
    names = [name for name, _ in settings.server]
    with naming_option(config, "server"):
        for name in names:
            if names.count(name) > 1:
                raise LLEnergyError(
                    f"two servers for the backend {name}; name them: NAME=URL or NAME=COMMAND"
                )
    if settings.backend:
        with naming_option(config, "backend"):
            for spec in select_backends(settings.backend, state.backends):
                if reason := spec.explain_unavailable():
                    raise LLEnergyError(reason)
