# SPDX-License-Identifier: Apache-2.0
"""Servers with an OpenAI-compatible API on this host: started by a command, or already running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.timeouts import SERVER_START_SHARE

#: Environment variable with the API key of servers.
KEY_ENV = "OPENAI_API_KEY"

NEEDS = (
    "give --energy-server='llama-server -m {model} --port {port}' to start a server, or "
    "--energy-server=http://127.0.0.1:8000 to use one that runs on this host"
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
        options=("command", "url", "model", "key_env", "timeout_s"),
        timestamps="token",
    ),
)


def is_url(text: str) -> bool:
    """Whether a value of ``--energy-server`` is the URL of a running server, and not a command."""
    return text.startswith(("http://", "https://"))


def specs_of_run(
    servers: Mapping[str, str], timeout_s: float, key_env: str = KEY_ENV
) -> dict[str, BackendSpec]:
    """Return the backend ``server`` and those with names of their own, with the run's options preset.

    ``servers`` are URLs and commands by the name of the backend, ``timeout_s`` is ``--energy-timeout``.
    """
    specs = {}
    for name, target in {SPEC.name: "", **servers}.items():
        preset = {
            "url" if is_url(target) else "command": target,
            "timeout_s": SERVER_START_SHARE * timeout_s,
            "key_env": key_env,
        }
        specs[name] = replace(SPEC, name=name, preset=preset, needs=None if target else SPEC.needs)
    return specs
