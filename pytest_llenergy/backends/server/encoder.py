# SPDX-License-Identifier: Apache-2.0
"""Write requests as the bodies that a server takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llenergy.backends.server.client import PATHS, Dialect
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError

#: A role and a text.
Message = tuple[str, str]


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
            raise BackendError(
                f"server: {dialect.name} servers do not support top_k, which is {params.top_k}; "
                "use do_sample=False"
            )
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

    def encode(self, request: Request, history: Sequence[Message] = ()) -> bytes:
        """Return the body of a request that follows messages and answers.

        The completions endpoint takes one text, so there the messages are joined by blank lines.
        """
        system = [("system", request.system)] if request.system else []
        messages = [*system, *history, ("user", request.prompt)]
        said: dict[str, Any] = {"prompt": "\n\n".join(text for _, text in messages)}
        if self._is_chat:
            said = {"messages": [{"role": role, "content": text} for role, text in messages]}
        return msgspec.json.encode({**self._settings, **said, "max_tokens": self.output_tokens(request)})
