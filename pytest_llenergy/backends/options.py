# SPDX-License-Identifier: Apache-2.0
"""Load options: those with one meaning in every backend, and those passed on to an inference library.

An adapter refuses what it sets itself; everything else is for the library to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pytest_llenergy.backends.secrets import find_secret, is_secret
from pytest_llenergy.backends.tasks import GenerationParams, Positive
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag

#: Load options that mean the same in every backend that declares them. A backend that does not declare one
#: refuses it, even if its library has an option of that name.
COMMON_OPTIONS = (
    *("dtype", "quantization", "kv_cache_dtype", "attention", "chunked_prefill"),
    *("speculative", "prefix_cache", "lora", "compile"),
)

#: Methods of ``speculative`` that mean the same in every backend. Others are names of the library.
DRAFT_MODEL, PROMPT_LOOKUP = "draft_model", "prompt_lookup"

#: On a round that has taken prompt tokens from the prefix cache.
PREFIXES_REUSED = Flag(
    name="prefix-cache",
    severity="note",
    detail="prefix_cache=True: prompts reuse what earlier ones computed, so rounds after the first do not "
    "prefill them whole; tokens.cached counts the tokens",
)

#: Why an adapter refuses options that keep prefixes, choose devices, or name the model.
NO_PREFIX_CACHE = "rounds repeat their prompts, and all but the first would be nearly free"
DEVICES = "the devices are those of the test; use the marks gpus and parallel"
SOURCE = "the plugin names the model and its tokenizer; use --energy-model or energy_model"


class Speculative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load option ``speculative``.

    Attributes:
        num_tokens: Tokens drafted per step, at most.
        model: Name of the model that drafts, as for ``--energy-model``.
        method: ``draft_model``, ``prompt_lookup`` or a method of the library.
        max_ngram: Longest sequence of last tokens that ``prompt_lookup`` searches for.
    """

    num_tokens: Positive
    model: str | None = None
    method: str = DRAFT_MODEL
    max_ngram: Positive = 2

    @classmethod
    def parse(cls, backend: str, options: Mapping[str, Any]) -> Speculative | None:
        """Return the option ``speculative`` among the load options of a test."""
        given = options.get("speculative")
        if given is None:
            return None
        try:
            draft = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise BackendError(f"{backend}: speculative is {given!r}: {error}") from None
        if (draft.method, draft.model is None) in ((DRAFT_MODEL, True), (PROMPT_LOOKUP, False)):
            raise BackendError(
                f"{backend}: speculative needs model, the name of the model that drafts, or "
                f"method={PROMPT_LOOKUP!r} without a model"
            )
        return draft


def find_step_tokens(backend: str, options: Mapping[str, Any]) -> int | None:
    """Return the tokens of a step in a library that has no default for it; None for whole prompts."""
    chunk = options.get("chunked_prefill")
    if chunk is True or not (chunk is None or isinstance(chunk, int)):
        raise BackendError(f"{backend}: chunked_prefill is {chunk!r}, needs False or the tokens of a step")
    return chunk or None


def select_options(
    backend: str, options: Mapping[str, Any], own: Collection[str], reserved: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that are passed on to the library: those that the adapter does not apply itself.

    ``reserved`` has the reason for each that is refused because the adapter sets it.
    """
    passed = {name: value for name, value in options.items() if name not in own}
    for name, value in passed.items():
        reason = reserved.get(name)
        if is_secret(name) or find_secret(value) is not None:
            reason = "it is a secret, and options are recorded; set an environment variable, such as HF_TOKEN"
        elif reason is None and name in GenerationParams.__struct_fields__:
            reason = "it is an argument of generate"
        if reason is not None:
            raise BackendError(f"{backend}: the load option {name} is not available: {reason}")
    return passed


def show_options(options: Mapping[str, Any]) -> str:
    """Return options as a test writes them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
