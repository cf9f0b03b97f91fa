# SPDX-License-Identifier: Apache-2.0
"""Servers with an OpenAI-compatible API, started or attached to."""

from __future__ import annotations

from dataclasses import replace

from pytest_llenergy.backends.base import BackendSpec, Capabilities

# Any server of the OpenAI API on this host: one that is started here, or one that runs already.


# What a server offers, and what it has to be told first.

NEEDS = (
    "give --energy-server-command='llama-server -m {model} --port {port}' for one to start, or "
    "--energy-server-url=http://127.0.0.1:8000 for one that runs on this host"
)

#: Share of ``--energy-timeout`` that a server may take to start: its own error comes before that of the rank.
START_SHARE = 0.9

SPEC = BackendSpec(
    name="server",
    factory="pytest_llenergy.backends.server.backend:ServerBackend",
    requires=("aiohttp",),
    install="pip install 'pytest-llenergy[server]'",
    needs=NEEDS,
    capabilities=Capabilities(
        launch="engine",
        gpu=True,
        tasks=("generate", "serve"),
        options=("command", "url", "health", "model", "timeout_s"),
        batching=("continuous",),
        prefix_cache="asked off in each request; the server's own switch counts",
        timestamps="token",
        clock="when a chunk reached the client over loopback, CLOCK_MONOTONIC",
        reasons={
            "data": "copies of a server are the server's own affair, and cannot be counted from outside",
            "tensor": "a server does not say which of its processes hold a shard",
            "pipeline": "a server does not say which of its processes hold a stage",
        },
        sources={
            **dict.fromkeys(("launch", "managed_by", "cpu", "hardware"), "tested"),
            **dict.fromkeys(
                ("data", "tensor", "pipeline", "placement", "batching", "caches", "options"), "this adapter"
            ),
            **{"tasks": "tested", "timestamps": "tested", "prefix_cache": "tested", "gpu": "not run"},
        },
        hardware="CPU (llama.cpp's server)",
    ),
)


def with_run_options(
    spec: BackendSpec, command: str, url: str, health: str, model: str, timeout_s: float
) -> BackendSpec:
    """The same with what the options of a run say."""
    preset = {
        "command": command,
        "url": url,
        "health": health,
        "model": model,
        "timeout_s": START_SHARE * timeout_s,
    }
    return replace(spec, preset=preset, needs=None if command or url else spec.needs)
