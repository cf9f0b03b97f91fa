# SPDX-License-Identifier: Apache-2.0
"""The backend in the rank: a server that is started or found, asked over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendWorker, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.server.client import COMPLETIONS_PATH, Client, NoAnswerError, select_dialect
from pytest_llenergy.backends.server.load import EXIT_WAIT_S, BatchJob, Endpoint, LoadJob
from pytest_llenergy.backends.server.process import ProcessFamily, ServerProcess, find_family, find_listeners
from pytest_llenergy.backends.server.settings import HOST, Address, ServerSettings, find_free_port
from pytest_llenergy.backends.server.stream import error_text, read_answer
from pytest_llenergy.backends.tasks import GenerationParams, ServeParams
from pytest_llenergy.errors import BackendError, ModelError, ServerError
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.record import BackendInfo, Flag

#: How often a server that starts is asked whether it is ready (seconds), and how long it may think.
HEALTH_POLL_S, HEALTH_TIMEOUT_S = 0.1, 5.0

MODELS_PATH = "/v1/models"


class ServerBackend:
    """Text completions of any server of the OpenAI API on this host, each prompt a streamed request.

    Load options: ``command`` to start one, with the placeholders ``{model}``, ``{port}``, ``{host}`` and
    ``{threads}``; ``url`` of one that runs; ``health``, the path that answers 200 when it is ready;
    ``model``, its name in the API; ``timeout_s``, how long it may take to start.
    """

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._client: Client | None = None
        self._family: ProcessFamily | None = None

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        settings = ServerSettings.parse(options)
        try:
            return self._loaded(model, settings, context)
        except BaseException:
            # Nobody else knows of the server yet, whatever it was that went wrong.
            self.close()
            raise

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> BatchJob:
        bodies = [self._body(prompt, params, keeps_prefixes=False) for prompt in prompts]
        return BatchJob(self._endpoint, bodies, params)

    def prepare_serve(self, prompts: Sequence[str], params: ServeParams) -> LoadJob:
        """The requests of a load; the prompts in turn."""
        bodies = [self._body(prompt, params, keeps_prefixes=params.prefix_cache) for prompt in prompts]
        return LoadJob(self._endpoint, [bodies[i % len(bodies)] for i in range(params.requests)], params)

    def synchronize(self) -> None:
        """A request is done when its stream has ended."""

    def workers(self) -> Sequence[BackendWorker]:
        """The command's process, or that of the server which ran already; pid 0 if that is not told."""
        if self._process is not None:
            return [BackendWorker(pid=self._process.pid, rank=0, world_size=1)]
        root = self._family.root if self._family is not None else None
        return [BackendWorker(pid=root or 0, rank=0, world_size=1, attached=True)]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.end()
            self._process = None

    def _loaded(self, model: ModelSource, settings: ServerSettings, context: RankContext) -> BackendInfo:
        address = settings.address or Address(HOST, find_free_port())
        if settings.words:
            self._process = self._started(model, settings, address, context)
        client = self._client = Client(address.url)
        self._await_health(client, settings)
        flags = self._whose(address, context)
        models = self._models(client)
        self._dialect = select_dialect(models)
        served = [str(each.get("id")) for each in models.get("data") or ()]
        if not settings.model and not served:
            raise BackendError(f"server: GET {MODELS_PATH} names no model; give --energy-server-model=NAME")
        self._model = settings.model or served[0]
        self._endpoint = Endpoint(client, self._dialect, settings.health, self._check, address, flags)
        self._probe(client, served)
        return BackendInfo(
            name="server",
            version=self._version(client),
            # What the server was given; else all that is known is what it calls it.
            model=model.label if settings.names_model else _model_label(self._model),
            options=self._options(settings, context),
        )

    def _options(self, settings: ServerSettings, context: RankContext) -> dict[str, Primitive]:
        return {
            "server": self._dialect.name,
            "command": settings.recorded_command or None,
            "attached": self._process is None,
            "api_model": _model_label(self._model),
            "endpoint": COMPLETIONS_PATH,
            "connections": "kept" if self._endpoint.client.keeps else "one for each request",
            "prefix_cache": (
                "asked off in each request"
                if self._dialect.switches_cache
                else "the server's own switch counts"
            ),
            "threads": context.threads if any("{threads}" in word for word in settings.words) else None,
        }

    def _started(
        self, model: ModelSource, settings: ServerSettings, address: Address, context: RankContext
    ) -> ServerProcess:
        busy = sorted(find_listeners(address))
        if busy:
            raise BackendError(f"server: port {address.port} is taken by process {busy[0]}; choose another")
        location = ""
        if settings.names_model:
            # A hub id is for the server to find; what has to be converted is a directory then.
            location = model.location if model.kind != "random" else str(pretrained_path(model))
        return ServerProcess(
            settings.command(
                model=location, port=str(address.port), host=address.host, threads=str(context.threads)
            )
        )

    def _await_health(self, client: Client, settings: ServerSettings) -> None:
        """Raises ``BackendError`` when it dies or is late; one that runs already must be ready."""
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
            self._check(f" before GET {settings.health} gave 200")
            if time.monotonic() > deadline:
                break
            # Servers do not tell when they are ready.
            time.sleep(HEALTH_POLL_S)
        if self._process is None:
            raise BackendError(
                f"server: GET {settings.health} at {client.url}: {last}; is it running, and ready?"
            )
        self._process.show()
        raise ServerError(
            f"server: not ready after {settings.timeout_s:g} s, GET {settings.health}: {last}; see "
            "--energy-server-health and --energy-timeout"
        )

    def _whose(self, address: Address, context: RankContext) -> list[Flag]:
        """Hold who listens against who should. Returns what cannot be told, as a flag."""
        if self._process is not None:
            found = find_listeners(address)
            if not found & self._process.pids():
                who = f"process {sorted(found)[0]}" if found else "nobody who can be seen from here"
                raise BackendError(
                    f"server: port {address.port} is answered by {who}, which the command has not started (a "
                    "container, a daemon?); start it yourself and give --energy-server-url"
                )
            return []
        family = self._family = find_family(address)
        if context.devices == ("cpu",) and family.uses_gpu():
            raise BackendError(
                f"server: process {family.root} at {address.url} uses a GPU, and this test has leased none; "
                "mark it @pytest.mark.gpus(1)"
            )
        if family.root is not None:
            return []
        detail = f"the processes of the server at {address.url} are not known: {family.reason}"
        return [Flag(name="server-unknown", severity="warning", detail=detail)]

    def _models(self, client: Client) -> dict[str, Any]:
        """What ``/v1/models`` says; nothing where there is no such thing."""
        try:
            status, body = client.get(MODELS_PATH)
            found = msgspec.json.decode(body) if status == 200 else {}
        except (NoAnswerError, msgspec.DecodeError) as error:
            self._check()
            raise BackendError(f"server: GET {MODELS_PATH}: {error}") from None
        return found if isinstance(found, dict) else {}

    def _probe(self, client: Client, served: Sequence[str]) -> None:
        """One token, so that a wrong name or a stream without counts is told before anything is measured.

        Then one more, to learn whether connections are kept.
        """
        body = self._body("a", GenerationParams(max_new_tokens=1), keeps_prefixes=False)

        stream = client.learn(body)
        if stream.broke:
            self._check()
        try:
            read_answer(stream, self._dialect, f"model {_model_label(self._model)!r}")
        except ModelError as error:
            names = ", ".join(map(_model_label, served)) or "nothing"
            raise ModelError(f"{error}; it serves: {names}") from None

    def _version(self, client: Client) -> str:
        if self._dialect.version is None:
            return "unknown"
        path, name = self._dialect.version
        try:
            status, body = client.get(path)
            found = msgspec.json.decode(body) if status == 200 else {}
        except (NoAnswerError, msgspec.DecodeError):
            found = {}
        return str(found.get(name, "unknown")) if isinstance(found, dict) else "unknown"

    def _body(self, prompt: str, params: GenerationParams, *, keeps_prefixes: bool) -> bytes:
        dialect = self._dialect
        if params.stop_token_ids and not dialect.stops:
            raise BackendError(f"server: {dialect.name} servers take no stop_token_ids; leave them out")
        if params.do_sample and not dialect.takes_top_k:
            raise BackendError(
                f"server: {dialect.name} servers take no top_k, which is {params.top_k}; use do_sample=False"
            )
        told: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": params.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, **dialect.stream_options},
            # Greedy is no temperature at all, as everywhere in this API.
            "temperature": params.temperature if params.do_sample else 0.0,
            "seed": params.seed,
            **dialect.always,
            **dialect.cache(keeps_prefixes),
        }
        if params.do_sample:
            told["top_p"], told["top_k"] = params.top_p, params.top_k
        if params.ignore_eos:
            told["ignore_eos"] = True
        if params.stop_token_ids:
            told["stop_token_ids"] = list(params.stop_token_ids)
        return msgspec.json.encode(told)

    def _check(self, when: str = "") -> None:
        """Raises ``BackendError`` with the last words of a server that has died."""
        died = self._process.died(EXIT_WAIT_S if not when else 0.0) if self._process is not None else None
        if died is not None and self._process is not None:
            self._process.show()
            how, _, last = died.partition(": ")
            raise ServerError(f"server: {how}{when}: {last}")


def _model_label(name: str) -> str:
    """A model as the API calls it: of a path only its last part."""
    return Path(name).name if Path(name).is_absolute() else name
