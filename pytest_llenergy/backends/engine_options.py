# SPDX-License-Identifier: Apache-2.0
"""Load options: those with one meaning in every backend, and those passed on to an inference library.

An adapter refuses what it sets itself; everything else is for the library to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.secrets import find_secret, is_secret

if TYPE_CHECKING:
    from typing_extensions import Self

#: Load options that mean the same in every backend that declares them. A backend that does not declare one
#: refuses it, even if its library has an option of that name.
COMMON_OPTIONS: Mapping[str, str] = {
    "dtype": "type of the weights that are not quantised, and of the arithmetic",
    "quantization": "quantisation of the weights when they are loaded",
    "kv_cache_dtype": "type of the key-value cache",
    "attention": "attention implementation",
    "chunked_prefill": "whether a prompt may be processed in several steps; a number is their tokens",
    "speculative": "how tokens are drafted, as a dict: num_tokens, and model or method",
    "prefix_cache": "whether prompts may reuse the cache of earlier ones",
    "lora": "LoRA adapter to apply: its directory, for llama-cpp its .gguf file",
    "compile": "whether the model is compiled, or the compilation mode",
}

#: Methods of ``speculative`` that mean the same in every backend: a smaller model drafts, or the continuation
#: of an earlier occurrence of the last tokens is the draft. Other methods are names of the library.
DRAFT_MODEL, PROMPT_LOOKUP = "draft_model", "prompt_lookup"

#: On a round that has taken prompt tokens from the prefix cache.
PREFIXES_REUSED = Flag(
    name="prefix-cache",
    severity="note",
    detail="prefix_cache=True: prompts reuse what earlier ones computed, so rounds after the first do not "
    "prefill them whole; tokens.cached counts the tokens",
)

#: Why an adapter refuses what would keep prefixes.
NO_PREFIX_CACHE = "rounds repeat their prompts, and all but the first would be nearly free"

#: Why an adapter refuses options of its library that choose devices, or the model.
DEVICES = "the devices are those of the test; use the marks gpus and parallel"
SOURCE = "the plugin names the model and its tokenizer; use --energy-model or energy_model"

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load option ``speculative``.

    Attributes:
        num_tokens: Tokens drafted per step, at most.
        model: Name of the model that drafts, as for ``--energy-model``.
        method: ``draft_model``, ``prompt_lookup``, or a method of the library; by default what ``model``
            implies.
        max_ngram: Longest sequence of last tokens that ``prompt_lookup`` searches for.
    """

    num_tokens: Positive
    model: str | None = None
    method: str | None = None
    max_ngram: Positive = 2

    @property
    def kind(self) -> str:
        """The method, also where it was not given."""
        return self.method or DRAFT_MODEL


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load options in ``COMMON_OPTIONS``, with their types; None for the default of the backend."""

    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    attention: str | None = None
    chunked_prefill: bool | Positive | None = None
    speculative: Speculative | None = None
    prefix_cache: bool | None = None
    lora: str | None = None
    compile: bool | str | None = None

    @classmethod
    def parse(cls, backend: str, options: Mapping[str, Any]) -> Self:
        """Check the types of the common options among the load options of a test.

        Args:
            backend: Name of the backend, for messages.
            options: All load options.

        Raises:
            BackendError: If a value has another type.
        """
        given = {name: value for name, value in options.items() if name in cls.__struct_fields__}
        if isinstance(given.get("lora"), Path):
            given["lora"] = str(given["lora"])
        try:
            parsed = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            name = re.split(r"\W", place)[0]
            where = place.rstrip("`")
            raise BackendError(f"{backend}: {name} is {given[name]!r}: {what} at {where}") from None
        draft = parsed.speculative
        if draft is not None and (draft.kind, draft.model is None) in (
            (DRAFT_MODEL, True),
            (PROMPT_LOOKUP, False),
        ):
            raise BackendError(
                f"{backend}: speculative needs model, the name of the model that drafts, or "
                f"method={PROMPT_LOOKUP!r} without a model"
            )
        return parsed

    def find_step_tokens(self, backend: str) -> int | None:
        """Return the tokens of a step in a library that has no default; None for whole prompts.

        Raises:
            BackendError: If ``chunked_prefill`` is True.
        """
        if self.chunked_prefill is True:
            raise BackendError(f"{backend}: chunked_prefill is True, needs False or the tokens of a step")
        return self.chunked_prefill or None

    @property
    def lora_rank(self) -> int:
        """Rank of the adapter in ``lora``."""
        return int(json.loads(Path(str(self.lora), "adapter_config.json").read_bytes())["r"])


def refuse_options(backend: str, given: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Refuse load options that an adapter sets itself, arguments of ``generate``, and secrets.

    Args:
        backend: Name of the backend, for messages.
        given: The options.
        reserved: Why each of those that it sets is refused.

    Raises:
        BackendError: Names the first of them.
    """
    for name, value in given.items():
        reason = reserved.get(name)
        if is_secret(name) or find_secret(value) is not None:
            reason = "it is a secret, and options are recorded; set an environment variable, such as HF_TOKEN"
        elif reason is None and name in GenerationParams.__struct_fields__:
            reason = "it is an argument of generate"
        if reason is not None:
            raise BackendError(f"{backend}: the load option {name} is not available: {reason}")


def combine_options(
    backend: str, common: Mapping[str, Mapping[str, Any]], passed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords for a library: those that common options set, and those passed on to it.

    Args:
        backend: Name of the backend.
        common: What each common option sets in the library.
        passed: Options of the library that the test gives.

    Raises:
        BackendError: If a test gives a common option and what it sets.
    """
    for name, keywords in common.items():
        twice = sorted(keywords.keys() & passed.keys())
        if twice:
            raise BackendError(f"{backend}: {name} sets {', '.join(twice)} as well; give one of them")
    return {**{key: value for keywords in common.values() for key, value in keywords.items()}, **passed}


def show_options(options: Mapping[str, Any]) -> str:
    """Return options as a test writes them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
