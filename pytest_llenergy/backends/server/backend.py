# SPDX-License-Identifier: Apache-2.0
"""The server backend in a rank: start or find a server, and send it requests over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendWorker, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.precision import type_name
from pytest_llenergy.backends.server.answers import (
    NAME_IT,
    PAGE,
    Answer,
    FailedRequestError,
    error_text,
    explain_status,
    read_answer,
    show_line,
)
from pytest_llenergy.backends.server.client import PATHS, Client, Stream
from pytest_llenergy.backends.server.dialects import Encoder, select_dialect
from pytest_llenergy.backends.server.jobs import BatchJob, LoadJob
from pytest_llenergy.backends.server.process import (
    ServerProcess,
    check_listener,
    find_family,
    find_listeners,
)
from pytest_llenergy.backends.server.settings import (
    HOST,
    Address,
    ServerSettings,
    find_degrees,
    find_free_port,
    show_degrees,
)
from pytest_llenergy.backends.tasks import GenerationParams, ServeParams
from pytest_llenergy.backends.timeouts import HEALTH_POLL_S, HEALTH_TIMEOUT_S, PROBE_TIMEOUT_S
from pytest_llenergy.backends.traffic.requests import Inputs, Request, as_request
from pytest_llenergy.backends.traffic.texts import Writer
from pytest_llenergy.errors import BackendError, ModelError, ServerError
from pytest_llenergy.record.record import BackendInfo, Flag, Precision

MODELS_PATH = "/v1/models"

#: Paths that show whether a server is ready; the next one is tried if a server does not have one.
READY_PATHS = ("/health", MODELS_PATH)

#: Statuses of a path or method that a server does not have, of a key that it refuses, and of too much to do.
ABSENT, FORBIDDEN, BUSY = (400, 404, 405, 422, 501), (401, 403), (408, 429, 503)

#: Prompts of fewer bytes are in no server's way, and two halves may have so much fewer tokens than both.
LONG_PROMPT, HALVES_SHARE = 2000, 0.9


class ServerBackend:
    """Completions of any server with the OpenAI API on this host; each prompt is a streamed request.

    Load options: ``command`` to start a server, with the placeholders ``{model}``, ``{port}``, ``{host}``,
    ``{threads}`` and ``{gpus}``; ``url`` of a running one; ``model``, its name in the API; ``key_env``, the
    environment variable with its API key; ``timeout_s``, the time it may take to start.

    Attributes:
        flags: What a reader must know of every measurement with this server.
    """

    client: Client
    flags: list[Flag]

    def __init__(self) -> None:
        self._open = ExitStack()
        self._process: ServerProcess | None = None

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        settings = ServerSettings.parse(options)
        try:
            return self._connect(model, settings, context)
        except BaseException:
            # No other code knows of the server yet, so stop it whatever went wrong.
            self.close()
            raise

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> BatchJob:
        encoder = self._encoder(params, "completions")
        self._check_whole(prompts, "completions")
        return BatchJob(self, [encoder.encode(Request(prompt=prompt)) for prompt in prompts], params)

    def prepare_serve(self, inputs: Inputs, params: ServeParams) -> LoadJob:
        """Prepare the requests of a load; inputs are used in turn."""
        encoder = self._encoder(params, params.endpoint, keeps_prefixes=params.prefix_cache)
        requests, reopen = [as_request(each) for each in inputs], None
        if any(request.blocks or request.answer for request in requests):
            writer = Writer(lambda texts: self.count_tokens(texts, params.endpoint), "server")
            requests = writer.write(requests)
            reopen = writer.reopen if params.prefix_cache else None
        self._check_whole([each.text for each in requests], params.endpoint)
        requests = [requests[number % len(requests)] for number in range(params.requests)]
        return LoadJob(self, requests, params, encoder, reopen)

    def _encoder(self, params: GenerationParams, endpoint: str, *, keeps_prefixes: bool = False) -> Encoder:
        """Return what writes requests. Raises ``BackendError`` if the server does not have the endpoint."""
        if endpoint not in self._offered:
            other = self._offered[0]
            raise BackendError(
                f"server: it answers at {PATHS[other]} only, and not at {PATHS[endpoint]}{self._refusal}; "
                f"use backend.serve(..., endpoint={other!r})"
            )
        return Encoder(self._name, self._dialect, params, endpoint=endpoint, keeps_prefixes=keeps_prefixes)

    def count_tokens(self, texts: Sequence[str], endpoint: str = "completions") -> list[int]:
        """Return the tokens of each text as a prompt, as the server tells or counts in a request."""
        encoder = self._encoder(GenerationParams(max_new_tokens=1), endpoint)
        counts: list[int] = []
        for text in texts:
            count = self._dialect.count_tokens(self.client, self._name, text, endpoint == "chat")
            if count is None:
                count = self._ask(encoder, text, "counting tokens").request.input_tokens
            counts.append(count)
        return counts

    def _check_whole(self, prompts: Sequence[str], endpoint: str) -> None:
        """Check that the longest prompt has the tokens of its halves: some servers cut prompts in silence."""
        longest = max(prompts, key=lambda prompt: len(prompt.encode(errors="replace")))
        if self._dialect.refuses_long or len(longest.encode(errors="replace")) < LONG_PROMPT:
            return
        middle = len(longest) // 2
        parts = longest, longest[:middle], longest[middle:], "a"
        whole, first, second, added = self.count_tokens(parts, endpoint)
        if whole < HALVES_SHARE * (first + second - added):
            raise BackendError(
                f"server: it counts {whole} tokens in a prompt of {len(longest)} characters, and {first} and "
                f"{second} in its halves, so it cuts long prompts; give it a longer context"
            )

    def _ask(self, encoder: Encoder, text: str, name: str) -> Answer:
        """Return the answer to one request outside of any load."""
        body = encoder.encode(Request(prompt=text))
        stream = self.client.run(self.client.stream(body, encoder.path, PROBE_TIMEOUT_S))
        if stream.broke:
            self.check_alive()
        return read_answer(stream, name)

    def synchronize(self) -> None:
        """A request is done when its stream has ended."""

    def workers(self) -> Sequence[BackendWorker]:
        """Return the command's process, or that of the running server; pid 0 if unknown."""
        return [self._worker]

    def close(self) -> None:
        self._open.close()
        self._process = None

    def check_alive(self, when: str = "") -> None:
        """Raise ``ServerError`` with the last output line if the server has died."""
        if self._process is not None:
            self._process.check_alive(when)

    def check_answers(self) -> None:
        """Raise ``BackendError`` if the server does not answer, or has died."""
        answer = self.client.get(self._ready)
        if answer.status == 0:
            self.check_alive()
            raise BackendError(f"server: GET {self._ready} at {self.client.url}: no answer ({answer.broke})")

    def _connect(self, model: ModelSource, settings: ServerSettings, context: RankContext) -> BackendInfo:
        address = settings.address or Address(HOST, find_free_port())
        command = self._fill_in(model, settings, address, context)
        degrees = find_degrees(command)
        if command:
            if pids := find_listeners(address):
                raise BackendError(
                    f"server: port {address.port} is used by process {min(pids)}; choose another"
                )
            self._process = ServerProcess(command)
            self._open.callback(self._process.stop)
        self.client = Client(address.url, settings.key)
        self._open.callback(self.client.close)
        names_model = settings.names("model")
        named = f" with the model {model.label}" if names_model else ""
        self._ready = self._await_ready(settings, named)
        self.flags = []
        if self._process is not None:
            check_listener(address, self._process)
            self._worker = BackendWorker(pid=self._process.pid, rank=0, world_size=1, server=True)
        else:
            self._find_owner(address, context)
        models = self._list_models()
        served = [str(each["id"]) for each in models if each.get("id")]
        name = settings.model or (model.location if model.location in served else next(iter(served), ""))
        if not name:
            raise BackendError(f"server: GET {MODELS_PATH} names no model; {NAME_IT}")
        self._name, self._dialect = name, select_dialect(models)
        self._offered, self._refusal = self._probe_endpoints(served)
        weights = self._read_field(self._dialect.weights)
        parallelism = show_degrees(degrees) or "none stated"
        return BackendInfo(
            name="server",
            version=self._read_field(self._dialect.version) or "unknown",
            # The model given to the server; otherwise only its name in the API is known.
            model=model.label if names_model else model_label(name),
            # llama.cpp's server reports the file type of its model.
            precision=Precision(weights=type_name(weights)) if weights else None,
            options={
                "server": self._dialect.name,
                "command": settings.recorded_command or None,
                "attached": not command,
                "api_model": model_label(name),
                "prefix_cache": (
                    "switched off in each request"
                    if self._dialect.cache(False)
                    else "as configured by the server"
                ),
                "parallelism": parallelism if command else "unknown",
                "threads": context.threads if settings.names("threads") else None,
            },
        )

    def _await_ready(self, settings: ServerSettings, named: str) -> str:
        """Wait until the server is ready; one that was already running must be so at once.

        ``named`` is the model, for messages. Returns the path that says so.
        """
        deadline = time.monotonic() + (settings.timeout_s if settings.words else 0.0)
        while True:
            for path in READY_PATHS:
                answer = self.client.get(path, HEALTH_TIMEOUT_S)
                if answer.status not in ABSENT:
                    break
            # A server with neither path is asked for a completion next.
            if 200 <= answer.status < 300 or answer.status in ABSENT:
                return path
            _check_allowed(answer)
            self.check_alive(f"{named} before GET {path} gave 200")
            if time.monotonic() > deadline:
                break
            time.sleep(HEALTH_POLL_S)
        last = _describe(answer)
        if not settings.words:
            raise BackendError(f"server: GET {path} at {self.client.url}: {last}; is it running, and ready?")
        raise ServerError(
            f"server: not ready after {settings.timeout_s:g} s, GET {path}: {last}; see --energy-timeout"
        )

    def _list_models(self) -> list[Mapping[str, Any]]:
        """Return what ``/v1/models`` lists; nothing if the server lacks it."""
        answer = self.client.get(MODELS_PATH)
        _check_allowed(answer)
        if answer.status == 0 or answer.status >= 500:
            raise BackendError(f"server: GET {MODELS_PATH} at {self.client.url}: {_describe(answer)}")
        if answer.status == 200 and answer.media == "text/html":
            raise BackendError(f"server: {MODELS_PATH} at {self.client.url} {PAGE}")
        found = answer.json()
        listed = found.get("data") if isinstance(found, dict) else None
        return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []

    def _probe_endpoints(self, served: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Request a token of each endpoint, so that what cannot work fails before any measurement.

        Returns the endpoints that answer: completions without the chat endpoint being asked, or chat alone;
        and what completions answered then.
        """
        first: FailedRequestError | None = None
        for endpoint in PATHS:
            params = GenerationParams(max_new_tokens=1)
            encoder = Encoder(self._name, self._dialect, params, endpoint=endpoint)
            try:
                self._ask(encoder, "a", f"model {model_label(self._name)!r}")
            except FailedRequestError as error:
                first = first or error
                # What is wrong with completions may not be with chat, but for the key, the address and the
                # load.
                if error.status in (*FORBIDDEN, *BUSY) or not 400 <= error.status < 600:
                    break
            else:
                if first is None:
                    return tuple(PATHS), ""
                return (endpoint,), "" if first.status in (404, 405, 501) else f" ({first})"
        assert first is not None
        if first.status == 404:
            raise ModelError(
                f"{first}; it serves: {', '.join(map(model_label, served)) or 'nothing that it lists'}"
            )
        raise first

    def _read_field(self, place: tuple[str, str] | None) -> str | None:
        """Return a field of an answer in JSON; None if the server does not have it."""
        if place is None:
            return None
        found: Any = self.client.get(place[0]).json()
        value = found.get(place[1]) if isinstance(found, dict) else None
        return None if value is None else show_line(str(value))

    def _fill_in(
        self, model: ModelSource, settings: ServerSettings, address: Address, context: RankContext
    ) -> list[str]:
        location = model.location
        if settings.names("model") and model.kind == "random":
            # The server resolves a hub id itself; a random preset is converted to a directory.
            location = str(pretrained_path(model))
        return settings.fill_in(
            model=location,
            port=str(address.port),
            host=address.host,
            threads=str(context.threads),
            gpus=str(0 if context.devices == ("cpu",) else len(context.devices)),
        )

    def _find_owner(self, address: Address, context: RankContext) -> None:
        """Find the processes of a server that was running, with a flag if they are unknown."""
        family = find_family(address)
        if context.devices == ("cpu",) and family.uses_gpu():
            raise BackendError(
                f"server: process {family.root} at {address.url} uses a GPU, but this test has leased none; "
                "mark it with @pytest.mark.gpus(n)"
            )
        if family.root is None:
            detail = f"the processes of the server at {address.url} are unknown: {family.reason}"
            self.flags = [Flag(name="gpu-processes", severity="warning", detail=detail)]
        self._worker = BackendWorker(pid=family.root or 0, rank=0, world_size=1, attached=True, server=True)


def _describe(answer: Stream) -> str:
    return f"{answer.status}: {error_text(answer.body())}" if answer.status else f"no answer ({answer.broke})"


def _check_allowed(answer: Stream) -> None:
    """Raise ``BackendError`` if the key is refused, or the server is elsewhere."""
    if answer.status in FORBIDDEN or 300 <= answer.status < 400:
        raise BackendError(f"server: {explain_status(answer)}")


def model_label(name: str) -> str:
    """Return a model's name in the API; of a path only the last part."""
    return show_line(Path(name).name if Path(name).is_absolute() else name)
