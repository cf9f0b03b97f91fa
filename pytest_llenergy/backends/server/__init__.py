# SPDX-License-Identifier: Apache-2.0
"""Servers with an OpenAI-compatible API on this host: started by a command, or already running."""

from __future__ import annotations

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
        gpu=True,
        tasks=("generate", "serve"),
        options=("command", "url", "health", "model", "timeout_s"),
        batching=("continuous",),
        prefix_cache="switched off in each request if possible; else the server's own setting counts",
        timestamps="token",
        clock="when a chunk reached the client over loopback, CLOCK_MONOTONIC",
        reasons={
            "data": "replicas inside a server cannot be counted from outside",
            "tensor": "a server does not report which of its processes hold a shard",
            "pipeline": "a server does not report which of its processes hold a stage",
        },
        sources={
            **dict.fromkeys(("launch", "managed_by", "cpu", "hardware"), "tested"),
            **dict.fromkeys(
                ("data", "tensor", "pipeline", "placement", "batching", "caches", "options"), "this adapter"
            ),
            **{"tasks": "tested", "timestamps": "tested", "prefix_cache": "tested", "gpu": "not run"},
        },
        hardware="CPU (the servers of llama.cpp and vLLM)",
    ),
)


def with_run_options(
    spec: BackendSpec, command: str, url: str, health: str, model: str, timeout_s: float
) -> BackendSpec:
    """Return the spec with the run's options as preset load options.

    Args:
        spec: The backend ``server``.
        command: Command that starts a server; empty for none.
        url: URL of a running server; empty for none.
        health: Path of the health check.
        model: Name of the model in the server's API; empty for the first that it lists.
        timeout_s: Value of ``--energy-timeout`` (seconds).
    """
    preset = {
        "command": command,
        "url": url,
        "health": health,
        "model": model,
        "timeout_s": SERVER_START_SHARE * timeout_s,
    }
    return replace(spec, preset=preset, needs=None if command or url else spec.needs)
