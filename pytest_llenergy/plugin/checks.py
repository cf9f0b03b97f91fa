# SPDX-License-Identifier: Apache-2.0
"""Checks before collection that the run can do what its options request.

Each error is one line that begins with the option or ini key, so that a wrong value ends the run instead of
failing its tests one by one. A run that gives no option does not import this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error

if TYPE_CHECKING:
    from pytest_llenergy.plugin.session import RunState


@contextmanager
def naming_option(config: pytest.Config, name: str, prefix: str = "") -> Iterator[None]:
    """Turn an ``LLEnergyError`` into a usage error that begins with the option or ini key of a value.

    Args:
        config: The configuration.
        name: Name of the option.
        prefix: What the error's message begins with and the option says already.
    """
    try:
        yield
    except LLEnergyError as error:
        raise usage_error(f"{option_source(config, name)}: {str(error).removeprefix(prefix)}") from None


def check_outputs(config: pytest.Config) -> None:
    """Check that report, page, saved report and logs can be written, and leave nothing behind.

    Raises:
        pytest.UsageError: One of them cannot be written, or the page needs an extra that is not installed.
    """
    settings = settings_of(config)
    saved = saved_as(config, settings.save) if settings.save is not None else None
    for name, path in (("report", settings.report), ("html", settings.html), ("save", saved)):
        if path is not None:
            _check_writable(path, f"{option_source(config, name)}={path}", makes_directory=name == "save")
    if settings.rank_logs is not None:
        source = f"{option_source(config, 'rank_logs')}={settings.rank_logs}"
        _check_writable(settings.rank_logs / "group", source, makes_directory=True)
    if settings.html is not None:
        from pytest_llenergy.report.html.page import require_html_extra

        with naming_option(config, "html"):
            require_html_extra()


def _check_writable(path: Path, source: str, *, makes_directory: bool) -> None:
    """Check that a file can be written, in a directory that exists or, with ``makes_directory``, is made."""
    from pytest_llenergy.report.store import check_creatable

    try:
        if path.exists() and not path.is_file():
            raise usage_error(f"{source}: {path} is not a file; name a file")
        parents = path.parents if makes_directory else path.parents[:1]
        directory = next((each for each in parents if each.exists()), None)
        if directory is None:
            raise usage_error(f"{source}: no directory {path.parent}; create it first")
        if not directory.is_dir():
            raise usage_error(f"{source}: {directory} is a file; name a directory")
        check_creatable(directory / path.name)
    except OSError as error:
        raise usage_error(f"{source}: {error.strerror}") from None


#: Programs that start several processes, with the variables that they set for each: its number and their
#: count. Slurm sets that count only for processes that srun has started, unlike SLURM_NTASKS.
LAUNCHERS = (
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), "run srun -N1 -n1 pytest"),
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "run pytest without mpirun"),
    ("mpirun", ("PMI_RANK", "PMI_SIZE"), "run pytest without mpirun"),
    ("torchrun or the like", ("RANK", "LOCAL_RANK", "WORLD_SIZE"), "run pytest without it"),
)

#: Ray's command that srun starts on each node, and that runs its own command, such as pytest, on one of them.
SYMMETRIC_RUN = re.compile(r"(ray\.scripts\.)?symmetric[-_]run(\.py)?")


def check_launcher(environment: Mapping[str, str]) -> None:
    """Check that no launcher has started several pytest processes, each of which would measure all tests.

    Raises:
        pytest.UsageError: One has.
    """
    for launcher, variables, remedy in LAUNCHERS:
        count = environment.get(variables[-1], "")
        # Other values are not of these launchers.
        valid = re.fullmatch("[0-9]{1,6}", count)
        if not valid or int(count) < 2 or not all(name in environment for name in variables):
            continue
        if launcher in ("srun", "mpirun") and _runs_below(SYMMETRIC_RUN):
            continue
        if launcher == "srun" and environment.get("SLURM_STEP_NUM_NODES", "1") != "1":
            remedy += " --energy-cluster=slurm"
        values = ", ".join(f"{name}={environment[name]}" for name in variables)
        raise usage_error(
            f"{launcher} has started {count} pytest processes ({values}), which would all measure the same "
            f"tests; {remedy}, and tests start their own ranks: @pytest.mark.gpus({count}), or "
            "@pytest.mark.parallel"
        )


def _runs_below(program: re.Pattern[str]) -> bool:
    """Whether a parent of this process, or one of theirs, is a run of a program."""
    import psutil

    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if any(program.fullmatch(Path(word).name) for word in parent.cmdline()):
                return True
    return False


def check_names(config: pytest.Config, state: RunState) -> None:
    """Check the model, backends, interpreters, meters, server and GPUs that the options name.

    Raises:
        pytest.UsageError: One of them does not exist or cannot be used, or no selected backend can read the
            model.
    """
    from pytest_llenergy.backends.registry import select_backends
    from pytest_llenergy.energy.meters.select import check_arguments
    from pytest_llenergy.energy.meters.select import check_names as check_meters

    settings = state.settings
    with naming_option(config, "cluster"):
        if settings.cluster != "local" and settings.gpus is not None:
            raise LLEnergyError("--energy-gpus names GPUs of this host; leave it out with a cluster")
        # Opens the cluster.
        assert state.gangs or settings.cluster == "local"
    if settings.gpus is not None:
        _check_gpus(config, settings.gpus)
    if not settings.names_plugins:
        return
    try:
        backends, meters = state.backends, state.meters
    except LLEnergyError as error:
        # A broken plugin, which is no fault of an option.
        raise usage_error(str(error)) from None
    with naming_option(config, "meter"):
        check_meters(settings.meter, meters)
        check_arguments(settings.meter, meters)
    with naming_option(config, "python"):
        if settings.python:
            for spec in select_backends([name for name, _ in settings.python], backends):
                # Raises if the interpreter cannot be used. A missing module only skips tests.
                spec.explain_unavailable()
    with naming_option(config, "server", "server: "):
        for name in set(settings.backend) - set(backends):
            if any(target.startswith(f"{name}=") for _, target in settings.server):
                raise LLEnergyError(
                    f"{name!r} is no valid name for a server; use letters, digits, _ and -, a letter first"
                )
    with naming_option(config, "backend"):
        selected = select_backends(settings.backend, backends)
        for reason in [spec.explain_unavailable() for spec in selected if settings.backend]:
            if reason is not None:
                raise LLEnergyError(reason)
    with naming_option(config, "model", "model "):
        refusals = [spec.refuses(state.model) for spec in selected]
        if settings.model and all(refusals):
            raise LLEnergyError("; ".join(filter(None, refusals)))
    if settings.server:
        _check_servers(config, state)


def _check_servers(config: pytest.Config, state: RunState) -> None:
    """Check URLs, commands and their names."""
    from pytest_llenergy.backends import server
    from pytest_llenergy.backends.registry import load_backends
    from pytest_llenergy.backends.server.settings import ServerSettings

    known = load_backends()
    names = [name for name, _ in state.settings.server]
    for name in names:
        with naming_option(config, "server", "server: "):
            if names.count(name) > 1:
                unnamed = name == server.SPEC.name
                remedy = "name them: NAME=URL or NAME=COMMAND" if unnamed else "give them different names"
                raise LLEnergyError(f"two servers for the backend {name}; {remedy}")
            if name in known and name != server.SPEC.name:
                raise LLEnergyError(f"{name} is another backend; choose another name for the server")
            preset = state.backends[name].preset
            # A plugin may have replaced the backend.
            if "timeout_s" in preset:
                ServerSettings.parse(preset)


def _check_gpus(config: pytest.Config, selection: str) -> None:
    from pytest_llenergy.devices.inventory import find_gpus
    from pytest_llenergy.devices.visibility import parse_selection
    from pytest_llenergy.errors import DeviceError

    inventory = find_gpus()
    if inventory.faults:
        # Tests that need a GPU report it.
        return
    try:
        parse_selection(selection, inventory)
    except DeviceError as error:
        raise usage_error(f"{option_source(config, 'gpus')}: {error}") from None
