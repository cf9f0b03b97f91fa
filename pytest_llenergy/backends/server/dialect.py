# SPDX-License-Identifier: Apache-2.0
"""What servers of the OpenAI API understand beyond it. A field that a server does not know may be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _by_usage(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    return usage.get("completion_tokens") if usage else None


def _by_timings(event: Mapping[str, Any]) -> int | None:
    timings = event.get("timings")
    return timings.get("predicted_n") if timings else None


@dataclass(frozen=True)
class Dialect:
    """How to ask one kind of server.

    ``always`` goes with every request, ``cache`` says whether prefixes may be kept. ``so_far`` reads from a
    chunk how many tokens there are by now, where the server tells; ``stops`` is whether it takes
    ``stop_token_ids``, ``takes_top_k`` whether ``top_k``. ``version`` is the path that tells its version, and
    the field there.
    """

    name: str
    always: Mapping[str, Any] = field(default_factory=dict)
    cache: Callable[[bool], Mapping[str, Any]] = lambda _: {}
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    so_far: Callable[[Mapping[str, Any]], int | None] = lambda _: None
    stops: bool = False
    takes_top_k: bool = False
    version: tuple[str, str] | None = None

    @property
    def switches_cache(self) -> bool:
        """Whether a request says that no prefix is to be kept."""
        return bool(self.cache(False))


#: Ways to choose a token that a server would take from defaults of its own or of the model.
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0}
#: Of llama.cpp those that are wanted, which leaves its min_p and its penalties out.
SAMPLERS = ["temperature", "top_k", "top_p"]

#: By what ``/v1/models`` calls its owner.
DIALECTS = {
    # tools/server/README.md of llama.cpp: POST /completion, whose options its OpenAI endpoints take as well.
    "llamacpp": Dialect(
        "llama.cpp",
        always={"timings_per_token": True, "samplers": SAMPLERS},
        cache=lambda kept: {"cache_prompt": kept},
        so_far=_by_timings,
        takes_top_k=True,
        version=("/props", "build_info"),
    ),
    # vllm/entrypoints: openai/completion/protocol.py (CompletionRequest), generate/base/protocol.py
    # (StreamOptions).
    "vllm": Dialect(
        "vLLM",
        always={"return_token_ids": True, **PLAIN},
        stream_options={"continuous_usage_stats": True},
        so_far=_by_usage,
        stops=True,
        takes_top_k=True,
        version=("/version", "version"),
    ),
    # python/sglang/srt/entrypoints/openai/protocol.py.
    "sglang": Dialect("SGLang", always=PLAIN, stops=True, takes_top_k=True),
}

UNKNOWN = Dialect("unknown")


def dialect_of(models: Mapping[str, Any]) -> Dialect:
    """By the answer of ``GET /v1/models``."""
    owners = [str(each.get("owned_by", "")) for each in models.get("data") or ()]
    return DIALECTS.get(owners[0].lower(), UNKNOWN) if owners else UNKNOWN
