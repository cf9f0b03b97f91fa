# SPDX-License-Identifier: Apache-2.0
"""What each kind of server supports beyond the OpenAI API, and requests as the bodies that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.server.client import PATHS, Client
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError

#: Sampling settings that a server would otherwise take from its own or the model's defaults.
PLAIN_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0}
#: Samplers of llama.cpp without min_p and penalties.
LLAMA_CPP_SAMPLERS = ["temperature", "top_k", "top_p"]


def _count_with_llama_cpp(client: Client, _model: str, text: str, is_chat: bool) -> int | None:
    """Count as ``tools/server/README.md`` describes: POST /apply-template and POST /tokenize."""
    if is_chat:
        templated = client.post("/apply-template", {"messages": [{"role": "user", "content": text}]})
        if templated is None:
            return None
        text = templated["prompt"]
    answer = client.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return None if answer is None else len(answer["tokens"])


def _count_with_vllm(client: Client, model: str, text: str, is_chat: bool) -> int | None:
    """Count as ``vllm/entrypoints/serve/tokenize`` does: POST /tokenize."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    answer = client.post("/tokenize", {"model": model, **asked})
    return None if answer is None else int(answer["count"])


@dataclass(frozen=True)
class Dialect:
    """How to talk to one kind of server. A field that a server does not know may be refused.

    Attributes:
        always: Fields of every request.
        cache: Fields that allow or forbid keeping prefixes.
        stops: Whether ``stop_token_ids`` is supported.
        refuses_long: Whether the server refuses prompts that are too long, which others cut.
        count_tokens: Asks the server for the tokens of a text or chat message; None if it does not tell.
        version, weights: Path and field of the server's version, and of the types of the model's weights.
    """

    name: str
    always: Mapping[str, Any] = field(default_factory=dict)
    cache: Callable[[bool], Mapping[str, Any]] = lambda _: {}
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    stops: bool = False
    takes_top_k: bool = False
    refuses_long: bool = True
    version: tuple[str, str] | None = None
    count_tokens: Callable[[Client, str, str, bool], int | None] = lambda *_: None
    weights: tuple[str, str] | None = None


#: Dialects by ``owned_by`` of ``/v1/models``.
DIALECTS = {
    # tools/server/README.md of llama.cpp: POST /completion, whose options its OpenAI endpoints take as well.
    "llamacpp": Dialect(
        "llama.cpp",
        always={"timings_per_token": True, "samplers": LLAMA_CPP_SAMPLERS},
        cache=lambda kept: {"cache_prompt": kept},
        takes_top_k=True,
        version=("/props", "build_info"),
        count_tokens=_count_with_llama_cpp,
        weights=("/props", "model_ftype"),
    ),
    # vllm/entrypoints: openai/completion/protocol.py (CompletionRequest), generate/base/protocol.py
    # (StreamOptions).
    "vllm": Dialect(
        "vLLM",
        always={"return_token_ids": True, **PLAIN_SAMPLING},
        stream_options={"continuous_usage_stats": True},
        stops=True,
        takes_top_k=True,
        version=("/version", "version"),
        count_tokens=_count_with_vllm,
    ),
    # python/sglang/srt/entrypoints/openai/protocol.py.
    "sglang": Dialect("SGLang", always=PLAIN_SAMPLING, stops=True, takes_top_k=True),
    # tensorrt_llm/serve/openai_protocol.py.
    "tensorrt_llm": Dialect("TensorRT-LLM"),
}

UNKNOWN_DIALECT = Dialect("unknown", refuses_long=False)


def select_dialect(models: Sequence[Mapping[str, Any]]) -> Dialect:
    """Select the dialect from the models that ``GET /v1/models`` lists."""
    owner = str(models[0].get("owned_by", "")).lower() if models else ""
    return DIALECTS.get(owner, UNKNOWN_DIALECT)


class Encoder:
    """Writes bodies with the same settings. ``path`` is where they are sent."""

    def __init__(
        self,
        model: str,
        dialect: Dialect,
        params: GenerationParams,
        *,
        endpoint: str = "completions",
        keeps_prefixes: bool = False,
    ) -> None:
        """Raises ``BackendError`` for parameters that the server does not take."""
        if params.stop_token_ids and not dialect.stops:
            raise BackendError(
                f"server: {dialect.name} servers do not support stop_token_ids; leave them out"
            )
        if params.do_sample and not dialect.takes_top_k:
            raise BackendError(f"server: {dialect.name} servers do not support top_k; use do_sample=False")
        self.path = PATHS[endpoint]
        self._is_chat = endpoint == "chat"
        self._max_new_tokens = params.max_new_tokens
        self._settings: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True, **dialect.stream_options},
            # Temperature 0 means greedy throughout this API.
            "temperature": params.temperature if params.do_sample else 0.0,
            "seed": params.seed,
            **dialect.always,
            **dialect.cache(keeps_prefixes),
        }
        if params.do_sample:
            self._settings |= {"top_p": params.top_p, "top_k": params.top_k}
        if params.ignore_eos:
            self._settings["ignore_eos"] = True
        if params.stop_token_ids:
            self._settings["stop_token_ids"] = list(params.stop_token_ids)

    def output_tokens(self, request: Request) -> int:
        """Return the tokens to generate for a request."""
        return request.output_tokens or self._max_new_tokens

    def encode(self, request: Request) -> bytes:
        """Return the body of a request."""
        said: dict[str, Any] = {"prompt": request.text}
        if self._is_chat:
            messages = [*request.history, ("user", request.prompt)]
            said = {"messages": [{"role": role, "content": text} for role, text in messages]}
        return json.dumps({**self._settings, **said, "max_tokens": self.output_tokens(request)}).encode()
