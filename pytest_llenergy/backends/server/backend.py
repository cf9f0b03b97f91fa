# SPDX-License-Identifier: Apache-2.0
"""The server backend in a rank: start or find a server, and send it requests over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.backends.base import BackendWorker, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.precision import type_name
from pytest_llenergy.backends.server.answers import NAME_IT, read_answer
from pytest_llenergy.backends.server.client import Client
from pytest_llenergy.backends.server.dialects import Encoder, select_dialect
from pytest_llenergy.backends.server.endpoint import (
    MODELS_PATH,
    Endpoint,
    await_ready,
    list_models,
    model_label,
    probe_endpoints,
)
from pytest_llenergy.backends.server.jobs import BatchJob, LoadJob
from pytest_llenergy.backends.server.process import (
    ProcessFamily,
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
from pytest_llenergy.backends.timeouts import PROBE_TIMEOUT_S
from pytest_llenergy.backends.traffic.requests import Inputs, Request, as_request
from pytest_llenergy.backends.traffic.texts import Writer
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Flag, Precision

#: Prompts of fewer bytes are in no server's way, and two halves may have so much fewer tokens than both.
LONG_PROMPT, HALVES_SHARE = 2000, 0.9


class ServerBackend:
    """Completions of any server with the OpenAI API on this host; each prompt is a streamed request.

    Load options: ``command`` to start a server, with the placeholders ``{model}``, ``{port}``, ``{host}``,
    ``{threads}`` and ``{gpus}``; ``url`` of a running one; ``model``, its name in the API; ``key_env``, the
    environment variable with its API key; ``timeout_s``, the time it may take to start.
    """

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._client: Client | None = None
        self._family: ProcessFamily | None = None
        #: Texts written last, with what they were written for: a load curve sends the same at each rate.
        self._written: tuple[tuple[str, list[Request]], Writer, list[Request]] | None = None
        #: Prompts that the server was seen to process whole.
        self._whole: set[tuple[str, str]] = set()

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        settings = ServerSettings.parse(options)
        try:
            return self._connect(model, settings, context)
        except BaseException:
            # No other code knows of the server yet, so stop it whatever went wrong.
            self.close()
            raise

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> BatchJob:
        endpoint = self._endpoint
        endpoint.check_offered("completions")
        self._check_whole(prompts, "completions")
        encoder = Encoder(endpoint.model, endpoint.dialect, params)
        return BatchJob(endpoint, [encoder.encode(Request(prompt=prompt)) for prompt in prompts], params)

    def prepare_serve(self, inputs: Inputs, params: ServeParams) -> LoadJob:
        """Prepare the requests of a load; inputs are used in turn."""
        endpoint = self._endpoint
        endpoint.check_offered(params.endpoint)
        encoder = Encoder(
            endpoint.model,
            endpoint.dialect,
            params,
            endpoint=params.endpoint,
            keeps_prefixes=params.prefix_cache,
        )
        requests, reopen = [as_request(each) for each in inputs], None
        if any(request.blocks or request.answer for request in requests):
            asked = params.endpoint, requests
            if self._written is None or self._written[0] != asked:
                writer = Writer(lambda texts: self.count_tokens(texts, params.endpoint), "server")
                self._written = asked, writer, writer.write(requests)
            _, writer, requests = self._written
            reopen = writer.reopen if params.prefix_cache else None
        self._check_whole([each.text for each in requests], params.endpoint)
        requests = [requests[number % len(requests)] for number in range(params.requests)]
        return LoadJob(endpoint, requests, params, encoder, reopen)

    def count_tokens(self, texts: Sequence[str], endpoint: str = "completions") -> list[int]:
        """Return the tokens of each text as a prompt, as the server tells or counts in a request."""
        server = self._endpoint
        server.check_offered(endpoint)
        encoder = Encoder(server.model, server.dialect, GenerationParams(max_new_tokens=1), endpoint=endpoint)
        counts: list[int] = []
        for text in texts:
            count = server.dialect.count_tokens(server.client, server.model, text, endpoint == "chat")
            if count is None:
                body = encoder.encode(Request(prompt=text))
                stream = server.client.run(server.client.stream(body, encoder.path, PROBE_TIMEOUT_S))
                if stream.broke:
                    server.check_alive()
                count = read_answer(stream, "counting tokens").request.input_tokens
            counts.append(count)
        return counts

    def _check_whole(self, prompts: Sequence[str], endpoint: str) -> None:
        """Check that the longest prompt has the tokens of its halves: some servers cut prompts in silence."""
        longest = max(prompts, key=lambda prompt: len(prompt.encode(errors="replace")))
        asked, length = (endpoint, longest), len(longest.encode(errors="replace"))
        if self._endpoint.dialect.refuses_long or length < LONG_PROMPT or asked in self._whole:
            return
        middle = len(longest) // 2
        parts = longest, longest[:middle], longest[middle:], "a"
        whole, first, second, added = self.count_tokens(parts, endpoint)
        if whole < HALVES_SHARE * (first + second - added):
            raise BackendError(
                f"server: it counts {whole} tokens in a prompt of {len(longest)} characters, and {first} and "
                f"{second} in its halves, so it cuts long prompts; give it a longer context"
            )
        self._whole.add(asked)

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
        address = settings.address or Address(HOST, find_free_port())
        command = self._fill_in(model, settings, address, context)
        degrees = find_degrees(command)
        if command:
            if pids := find_listeners(address):
                raise BackendError(
                    f"server: port {address.port} is used by process {min(pids)}; choose another"
                )
            self._process = ServerProcess(command)
        client = self._client = Client(address.url, settings.key)
        names_model = settings.names("model")
        named = f" with the model {model.label}" if names_model else ""
        ready = await_ready(client, settings, self._check_alive, named)
        if self._process is not None:
            check_listener(address, self._process)
        flags = [] if self._process is not None else self._find_owner(address, context)
        models = list_models(client)
        served = [str(each["id"]) for each in models if each.get("id")]
        name = settings.model or (model.location if model.location in served else next(iter(served), ""))
        if not name:
            raise BackendError(f"server: GET {MODELS_PATH} names no model; {NAME_IT}")
        dialect = select_dialect(models)
        offered, refusal = probe_endpoints(client, dialect, name, served, self._check_alive)
        endpoint = Endpoint(client, dialect, name, offered, refusal, ready, self._check_alive, address, flags)
        self._endpoint = endpoint
        weights = endpoint.read_field(dialect.weights)
        parallelism = show_degrees(degrees) or "none stated"
        return BackendInfo(
            name="server",
            version=endpoint.read_field(dialect.version) or "unknown",
            # The model given to the server; otherwise only its name in the API is known.
            model=model.label if names_model else model_label(name),
            # llama.cpp's server reports the file type of its model.
            precision=Precision(weights=type_name(weights)) if weights else None,
            options={
                "server": dialect.name,
                "command": settings.recorded_command or None,
                "attached": not command,
                "api_model": model_label(name),
                "prefix_cache": (
                    "switched off in each request" if dialect.cache(False) else "as configured by the server"
                ),
                "parallelism": parallelism if command else "unknown",
                "threads": context.threads if settings.names("threads") else None,
            },
        )

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

    def _find_owner(self, address: Address, context: RankContext) -> list[Flag]:
        """Find the processes of a server that was running. Returns a flag if they are unknown."""
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

    def _check_alive(self, when: str = "") -> None:
        """Raise ``ServerError`` with the last output line if the server has died."""
        if self._process is not None:
            self._process.check_alive(when)
