# SPDX-License-Identifier: Apache-2.0
"""The server backend in a rank: start or find a server, and send it completions over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendWorker, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.precision import type_name
from pytest_llenergy.backends.server.client import Client, NoAnswerError, select_dialect
from pytest_llenergy.backends.server.encoder import Encoder
from pytest_llenergy.backends.server.endpoint import Endpoint
from pytest_llenergy.backends.server.load import BatchJob, LoadJob
from pytest_llenergy.backends.server.process import ProcessFamily, ServerProcess, find_family, find_listeners
from pytest_llenergy.backends.server.settings import HOST, Address, ServerSettings, find_free_port
from pytest_llenergy.backends.server.stream import NAME_IT, error_text, read_answer
from pytest_llenergy.backends.tasks import GenerationParams, ServeParams
from pytest_llenergy.backends.timeouts import EXIT_WAIT_S, HEALTH_POLL_S, HEALTH_TIMEOUT_S
from pytest_llenergy.backends.traffic.requests import Inputs, Request, as_request
from pytest_llenergy.backends.traffic.texts import Writer
from pytest_llenergy.errors import BackendError, ModelError, ServerError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import BackendInfo, Flag, Precision

MODELS_PATH = "/v1/models"

#: How many ports are tried if others take them.
PORT_TRIES = 3


class ServerBackend:
    """Text completions of any server with the OpenAI API on this host; each prompt is a streamed request.

    Load options: ``command`` to start a server, with the placeholders ``{model}``, ``{port}``, ``{host}``,
    ``{threads}`` and ``{gpus}``; ``url`` of a running one; ``health``, the path that answers 200 when it is
    ready; ``model``, its name in the API; ``timeout_s``, the time it may take to start.
    """

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._client: Client | None = None
        self._family: ProcessFamily | None = None
        #: Texts written last, with what they were written for: a load curve sends the same at each rate.
        self._written: tuple[tuple[str, list[Request]], Writer, list[Request]] | None = None

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        settings = ServerSettings.parse(options)
        try:
            return self._connect(model, settings, context)
        except BaseException:
            # No other code knows of the server yet, so stop it whatever went wrong.
            self.close()
            raise

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> BatchJob:
        encoder = Encoder(self._model, self._dialect, params)
        bodies = [encoder.encode(Request(prompt=prompt)) for prompt in prompts]
        return BatchJob(self._endpoint, bodies, params)

    def prepare_serve(self, inputs: Inputs, params: ServeParams) -> LoadJob:
        """Prepare the requests of a load; inputs are used in turn."""
        encoder = Encoder(
            self._model,
            self._dialect,
            params,
            endpoint=params.endpoint,
            keeps_prefixes=params.prefix_cache,
        )
        requests, reopen = [as_request(each) for each in inputs], None
        if any(turn.blocks or turn.answer for request in requests for turn in request.turns()):
            asked = params.endpoint, requests
            if self._written is None or self._written[0] != asked:
                writer = Writer(lambda texts: self.count_tokens(texts, params.endpoint), "server")
                self._written = asked, writer, writer.write(requests)
            _, writer, requests = self._written
            reopen = writer.reopen if params.prefix_cache else None
        requests = [requests[number % len(requests)] for number in range(params.requests)]
        return LoadJob(self._endpoint, requests, params, encoder, reopen)

    def count_tokens(self, texts: Sequence[str], endpoint: str = "completions") -> list[int]:
        """Return the tokens of each text as a prompt: asked of the server, else from the usage of a request.

        Raises:
            BackendError: The server does not tell.
        """
        client = self._endpoint.client
        counts: list[int] = []
        encoder = Encoder(self._model, self._dialect, GenerationParams(max_new_tokens=1), endpoint=endpoint)
        asks = True
        for text in texts:
            count = None
            if asks:
                count = self._dialect.count_tokens(client, self._model, text, endpoint == "chat")
                asks = count is not None
            if count is None:
                stream = client.run(client.stream(encoder.encode(Request(prompt=text)), encoder.path))
                if stream.broke:
                    self._check_alive()
                count = read_answer(stream, self._dialect, "counting tokens").request.input_tokens
            counts.append(count)
        return counts

    def synchronize(self) -> None:
        """A request is done when its stream has ended."""

    def workers(self) -> Sequence[BackendWorker]:
        """Return the command's process, or that of the running server; pid 0 if unknown."""
        if self._process is not None:
            return [BackendWorker(pid=self._process.pid, rank=0, world_size=1, server=True)]
        root = self._family.root if self._family is not None else None
        return [BackendWorker(pid=root or 0, rank=0, world_size=1, attached=True, server=True)]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _connect(self, model: ModelSource, settings: ServerSettings, context: RankContext) -> BackendInfo:
        address, client, flags = self._reach(model, settings, context)
        models = self._list_models(client)
        self._dialect = select_dialect(models)
        served = [str(each.get("id")) for each in models.get("data") or ()]
        if not settings.model and not served:
            raise BackendError(f"server: GET {MODELS_PATH} names no model; {NAME_IT}")
        self._model = settings.model or (model.location if model.location in served else served[0])
        self._endpoint = Endpoint(client, self._dialect, settings.health, self._check_alive, address, flags)
        self._probe(client, served)
        return BackendInfo(
            name="server",
            version=self._read_field(client, self._dialect.version) or "unknown",
            # The model given to the server; otherwise only its name in the API is known.
            model=model.label if settings.names_model else _model_label(self._model),
            precision=self._precision(client),
            options=self._options(settings, context),
        )

    def _reach(
        self, model: ModelSource, settings: ServerSettings, context: RankContext
    ) -> tuple[Address, Client, list[Flag]]:
        """Start or find the server, and wait until it is healthy. Returns flags about its processes, too."""
        for tries in range(PORT_TRIES):
            address = settings.address or Address(HOST, find_free_port())
            try:
                if settings.words:
                    self._process = self._start(model, settings, address, context)
                client = self._client = Client(address.url)
                self._await_health(client, settings, model.label)
                return address, client, self._verify_owner(address, context)
            except BackendError:
                # Another process may take a free port before the server does.
                own = self._process.pids() if self._process is not None else set()
                is_taken = settings.address is None and bool(find_listeners(address) - own)
                if not is_taken or tries + 1 == PORT_TRIES:
                    raise
                self.close()
        raise AssertionError("unreachable")

    def _precision(self, client: Client) -> Precision | None:
        """Return what the server reports: llama.cpp's the file type of its model."""
        weights = self._read_field(client, self._dialect.weights)
        return Precision(weights=type_name(weights)) if weights else None

    def _options(self, settings: ServerSettings, context: RankContext) -> dict[str, Primitive]:
        return {
            "server": self._dialect.name,
            "command": settings.recorded_command or None,
            "attached": self._process is None,
            "api_model": _model_label(self._model),
            "connections": "kept" if self._endpoint.client.keeps else "one for each request",
            "prefix_cache": (
                "switched off in each request"
                if self._dialect.switches_cache
                else "as configured by the server"
            ),
            "threads": context.threads if any("{threads}" in word for word in settings.words) else None,
        }

    def _start(
        self, model: ModelSource, settings: ServerSettings, address: Address, context: RankContext
    ) -> ServerProcess:
        pids = sorted(find_listeners(address))
        if pids:
            raise BackendError(f"server: port {address.port} is used by process {pids[0]}; choose another")
        location = ""
        if settings.names_model:
            # The server resolves a hub id itself; a random preset is converted to a directory.
            location = model.location if model.kind != "random" else str(pretrained_path(model))
        return ServerProcess(
            settings.command(
                model=location,
                port=str(address.port),
                host=address.host,
                threads=str(context.threads),
                gpus=str(0 if context.devices == ("cpu",) else len(context.devices)),
            )
        )

    def _await_health(self, client: Client, settings: ServerSettings, label: str) -> None:
        """Wait until the server is healthy; one that was already running must be so at once.

        Raises ``BackendError`` if it dies or is late. ``label`` is the model, for messages.
        """
        named = f" with the model {label}" if settings.names_model else ""
        last = "no answer"
        deadline = time.monotonic() + (settings.timeout_s if settings.words else 0.0)
        while True:
            try:
                status, body = client.get(settings.health, HEALTH_TIMEOUT_S)
                if status == 200:
                    return
                last = f"{status}: {error_text(body.decode(errors='replace'))}"
            except NoAnswerError as error:
                last = f"no answer ({error})"
            self._check_alive(f"{named} before GET {settings.health} gave 200")
            if time.monotonic() > deadline:
                break
            # Servers do not notify when they are ready.
            time.sleep(HEALTH_POLL_S)
        if self._process is None:
            raise BackendError(
                f"server: GET {settings.health} at {client.url}: {last}; is it running, and ready?"
            )
        self._process.show_tail()
        raise ServerError(
            f"server: not ready after {settings.timeout_s:g} s, GET {settings.health}: {last}; see the "
            "load option health and --energy-timeout"
        )

    def _verify_owner(self, address: Address, context: RankContext) -> list[Flag]:
        """Check that the expected process listens. Returns a flag if that cannot be determined."""
        if self._process is not None:
            pids = find_listeners(address)
            if not pids & self._process.pids():
                who = f"process {sorted(pids)[0]}" if pids else "a process that is not visible here"
                raise BackendError(
                    f"server: port {address.port} is answered by {who}, which the command did not start (a "
                    "container, a daemon?); start it yourself and give its URL"
                )
            return []
        family = self._family = find_family(address)
        if context.devices == ("cpu",) and family.uses_gpu():
            raise BackendError(
                f"server: process {family.root} at {address.url} uses a GPU, but this test has leased none; "
                "mark it with @pytest.mark.gpus(n)"
            )
        if family.root is not None:
            return []
        detail = f"the processes of the server at {address.url} are unknown: {family.reason}"
        return [Flag(name="gpu-processes", severity="warning", detail=detail)]

    def _list_models(self, client: Client) -> dict[str, Any]:
        """Return the answer of ``/v1/models``; empty if the server lacks it."""
        try:
            status, body = client.get(MODELS_PATH)
            found = msgspec.json.decode(body) if status == 200 else {}
        except (NoAnswerError, msgspec.DecodeError) as error:
            self._check_alive()
            raise BackendError(f"server: GET {MODELS_PATH}: {error}") from None
        return found if isinstance(found, dict) else {}

    def _probe(self, client: Client, served: Sequence[str]) -> None:
        """Request one token, so that a wrong model name or a stream without counts fails before any
        measurement.

        A second request finds out whether connections are kept.
        """
        encoder = Encoder(self._model, self._dialect, GenerationParams(max_new_tokens=1))
        body = encoder.encode(Request(prompt="a"))
        stream = client.detect_keepalive(body)
        if stream.broke:
            self._check_alive()
        try:
            read_answer(stream, self._dialect, f"model {_model_label(self._model)!r}")
        except ModelError as error:
            names = ", ".join(map(_model_label, served)) or "nothing"
            raise ModelError(f"{error}; it serves: {names}") from None

    def _read_field(self, client: Client, place: tuple[str, str] | None) -> str | None:
        """Return a field of an answer in JSON; None if the server does not have it."""
        if place is None:
            return None
        path, name = place
        try:
            status, body = client.get(path)
            found = msgspec.json.decode(body) if status == 200 else {}
        except (NoAnswerError, msgspec.DecodeError):
            found = {}
        value = found.get(name) if isinstance(found, dict) else None
        return None if value is None else str(value)

    def _check_alive(self, when: str = "") -> None:
        """Raise ``ServerError`` with the last output line if the server has died."""
        died = (
            self._process.exit_reason(EXIT_WAIT_S if not when else 0.0) if self._process is not None else None
        )
        if died is not None and self._process is not None:
            self._process.show_tail()
            how, _, last = died.partition(": ")
            raise ServerError(f"server: {how}{when}: {last}")


def _model_label(name: str) -> str:
    """Return a model's name in the API; of a path only the last part."""
    return Path(name).name if Path(name).is_absolute() else name
