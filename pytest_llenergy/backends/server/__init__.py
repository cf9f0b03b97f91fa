# SPDX-License-Identifier: Apache-2.0
"""Servers with an OpenAI-compatible API on this host: started by a command, or already running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.timeouts import SERVER_START_SHARE

NEEDS = (
    "give --energy-server-command='llama-server -m {model} --port {port}' to start a server, or "
    "--energy-server-url=http://127.0.0.1:8000 to use one that runs on this host"
)

SPEC = BackendSpec(
    name="server",
    factory="pytest_llenergy.backends.server.backend:ServerBackend",
    requires=("aiohttp",),
    install="pip install 'pytest-llenergy[server]'",
    needs=NEEDS,
    capabilities=Capabilities(
        launch="backend",
        opaque=True,
        gpu=True,
        tasks=("generate", "serve"),
        options=("command", "url", "health", "model", "timeout_s"),
        batching=("continuous",),
        timestamps="token",
    ),
)


def specs_of_run(
    commands: Mapping[str, str], url: str, model: str, timeout_s: float
) -> dict[str, BackendSpec]:
    """Return the backend ``server`` and those with commands of their own, with the run's options preset.

    Args:
        commands: Commands that start servers, by name of the backend.
        url: URL of a running server, for ``server``; empty for none.
        model: Name of the model in the server's API; empty for the first that it lists.
        timeout_s: Value of ``--energy-timeout`` (seconds).
    """
    preset = {"model": model, "timeout_s": SERVER_START_SHARE * timeout_s}
    specs = {}
    for name, command in {SPEC.name: "", **commands}.items():
        own = {"command": command, "url": url if name == SPEC.name else ""}
        needs = None if any(own.values()) else SPEC.needs
        specs[name] = replace(SPEC, name=name, preset={**own, **preset}, needs=needs)
    return specs
