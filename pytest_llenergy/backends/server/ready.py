# SPDX-License-Identifier: Apache-2.0
"""Wait until a server is ready, and find out what it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.server.answers import (
    FailedRequestError,
    error_text,
    explain_status,
    read_answer,
)
from pytest_llenergy.backends.server.client import PATHS, Client, Stream
from pytest_llenergy.backends.server.requests import Dialect, Encoder
from pytest_llenergy.backends.server.settings import ServerSettings
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.timeouts import HEALTH_POLL_S, HEALTH_TIMEOUT_S, PROBE_TIMEOUT_S
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError, ModelError, ServerError
from pytest_llenergy.record.secrets import hide_keys

MODELS_PATH = "/v1/models"

#: Paths that show whether a server is ready; the next one is tried if a server does not have one.
READY_PATHS = ("/health", MODELS_PATH)

#: Statuses of a path or method that a server does not have, and of a key that it refuses.
ABSENT, FORBIDDEN = (400, 404, 405, 422, 501), (401, 403)

CheckAlive = Callable[[str], None]


def await_ready(client: Client, settings: ServerSettings, check_alive: CheckAlive, named: str) -> str:
    """Wait until the server is ready; one that was already running must be so at once.

    ``named`` is the model, for messages. Returns the path that says so.

    Raises:
        BackendError: It is not ready in time, or refuses the key.
        ServerError: It has died.
    """
    paths = (settings.health,) if settings.health else READY_PATHS
    deadline = time.monotonic() + (settings.timeout_s if settings.words else 0.0)
    while True:
        for path in paths:
            answer = client.get(path, HEALTH_TIMEOUT_S)
            if answer.status not in ABSENT:
                break
        # A server with neither path is asked for a completion next.
        if answer.status == 200 or (answer.status in ABSENT and not settings.health):
            return path
        if answer.status in FORBIDDEN or 300 <= answer.status < 400:
            raise BackendError(f"server: {explain_status(answer)}")
        check_alive(f"{named} before GET {path} gave 200")
        if time.monotonic() > deadline:
            break
        # Servers do not notify when they are ready.
        time.sleep(HEALTH_POLL_S)
    last = f"{answer.status}: {error_text(answer.body())}" if answer.status else f"no answer ({answer.broke})"
    if not settings.words:
        raise BackendError(f"server: GET {path} at {client.url}: {last}; is it running, and ready?")
    raise ServerError(
        f"server: not ready after {settings.timeout_s:g} s, GET {path}: {last}; see the "
        "load option health and --energy-timeout"
    )


def list_models(client: Client) -> list[Mapping[str, Any]]:
    """Return what ``/v1/models`` lists; nothing if the server lacks it.

    Raises:
        BackendError: It refuses the key, or redirects.
    """
    answer = client.get(MODELS_PATH)
    if answer.status in FORBIDDEN or 300 <= answer.status < 400:
        raise BackendError(f"server: {explain_status(answer)}")
    if answer.status == 200 and answer.media == "text/html":
        raise BackendError(
            f"server: {MODELS_PATH} at {client.url} answered with an HTML page; is this a server with the "
            "OpenAI API?"
        )
    found = answer.json()
    listed = found.get("data") if isinstance(found, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def probe_endpoints(
    client: Client, dialect: Dialect, model: str, served: Sequence[str], check_alive: CheckAlive
) -> tuple[str, ...]:
    """Request a token of each endpoint, so that what cannot work fails before any measurement.

    Returns the endpoints that answer: completions without the chat endpoint being asked, or chat alone.

    Raises:
        ModelError: The server does not know the model.
        BackendError: It does not stream or count, refuses the key, or does not answer.
    """
    first: FailedRequestError | None = None
    for endpoint in PATHS:
        encoder = Encoder(model, dialect, GenerationParams(max_new_tokens=1), endpoint=endpoint)
        stream: Stream = client.run(
            client.stream(encoder.encode(Request(prompt="a")), encoder.path, PROBE_TIMEOUT_S)
        )
        if stream.broke:
            check_alive("")
        try:
            read_answer(stream, f"model {model_label(model)!r}")
        except FailedRequestError as error:
            first = first or error
            # Whatever is wrong with completions may not be with chat, but for the key and the address.
            if error.status in FORBIDDEN or not 400 <= error.status < 600:
                break
        else:
            return tuple(PATHS) if first is None else (endpoint,)
    assert first is not None
    if first.status == 404:
        raise ModelError(
            f"{first}; it serves: {', '.join(map(model_label, served)) or 'nothing that it lists'}"
        ) from None
    raise first


def model_label(name: str) -> str:
    """Return a model's name in the API; of a path only the last part."""
    return hide_keys(Path(name).name if Path(name).is_absolute() else name)
