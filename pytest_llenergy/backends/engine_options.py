# SPDX-License-Identifier: Apache-2.0
"""Load options: those with one meaning in every backend, and those passed on to an inference library."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.secrets import hide_secrets, is_secret
from pytest_llenergy.record.text import did_you_mean

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

#: Values of them, for messages. The others are names.
_NEEDS: Mapping[str, str] = {
    "chunked_prefill": "True, False or the tokens of a step",
    "speculative": "a dict with num_tokens, and model or method; max_ngram for prompt_lookup",
    "prefix_cache": "True or False",
    "lora": "the path of an adapter",
    "compile": "True, False or a mode",
}

#: Methods of ``speculative`` that mean the same in every backend: a smaller model drafts, or the continuation
#: of an earlier occurrence of the last tokens is the draft. Other methods are names of the library.
DRAFT_MODEL, PROMPT_LOOKUP = "draft_model", "prompt_lookup"

#: Longest sequence of last tokens that prompt lookup searches for.
LOOKUP_NGRAM = 2

#: On a round that has taken prompt tokens from the prefix cache.
PREFIXES_REUSED = Flag(
    name="prefix-cache-used",
    severity="note",
    detail="prefix_cache=True: prompts reuse what earlier ones computed, so rounds after the first do not "
    "prefill them whole; tokens.cached counts the tokens",
)

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
    max_ngram: Positive = LOOKUP_NGRAM

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
    def parse(
        cls, backend: str, options: Mapping[str, Any], *, lora: Literal["directory", "file"] = "directory"
    ) -> Self:
        """Check the types of the common options among the load options of a test.

        Args:
            backend: Name of the backend, for messages.
            options: All load options.
            lora: What holds an adapter.

        Raises:
            BackendError: If a value has another type, or ``lora`` holds no adapter.
        """
        given = {name: value for name, value in options.items() if name in cls.__struct_fields__}
        if isinstance(given.get("lora"), Path):
            given["lora"] = str(given["lora"])
        try:
            parsed = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            name = re.split(r"\W", place)[0]
            within = f" ({what} at {place.rstrip('`')})" if isinstance(given[name], Mapping) else ""
            raise BackendError(
                f"{backend}: {name} is {given[name]!r}, needs {_NEEDS.get(name, 'a name')}{within}"
            ) from None
        parsed._check_speculative(backend)
        if parsed.lora is not None and lora == "file" and not Path(parsed.lora).is_file():
            raise BackendError(f"{backend}: lora is {parsed.lora!r}, needs a .gguf file of an adapter")
        if parsed.lora is not None and lora == "directory" and not _adapter_config(parsed.lora).is_file():
            raise BackendError(
                f"{backend}: lora is {parsed.lora!r}, which is no directory with adapter_config.json"
            )
        return parsed

    def _check_speculative(self, backend: str) -> None:
        draft = self.speculative
        if draft is None:
            return
        if draft.model is None and draft.kind == DRAFT_MODEL:
            raise BackendError(
                f"{backend}: speculative needs model, the name of the model that drafts, or "
                f"method={PROMPT_LOOKUP!r}"
            )
        if draft.model is not None and draft.kind == PROMPT_LOOKUP:
            raise BackendError(f"{backend}: speculative: {PROMPT_LOOKUP} has no model; leave it out")

    def under_names(self, **names: str) -> dict[str, dict[str, Any]]:
        """Return what each of these options sets in a library that only calls it otherwise.

        Options that were not given are left out.
        """
        values = {name: getattr(self, name) for name in names}
        return {name: {names[name]: value} for name, value in values.items() if value is not None}

    def find_step_tokens(self, backend: str) -> int | None:
        """Return the tokens of a step in a library that has no default; None for whole prompts.

        Raises:
            BackendError: If ``chunked_prefill`` is True.
        """
        if self.chunked_prefill is True:
            raise BackendError(
                f"{backend}: chunked_prefill is True, needs False or the tokens of a step: the library has "
                "no size of its own"
            )
        return self.chunked_prefill or None

    @property
    def lora_rank(self) -> int:
        """Rank of the adapter in ``lora``."""
        return int(json.loads(_adapter_config(str(self.lora)).read_text(encoding="utf-8"))["r"])


def _adapter_config(directory: str) -> Path:
    return Path(directory) / "adapter_config.json"


def combine_options(
    backend: str,
    common: Mapping[str, Mapping[str, Any]],
    passed: Mapping[str, Any],
    *,
    decides: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Any]:
    """Return the keywords for a library: those that common options set, and those passed on to it.

    Args:
        backend: Name of the backend.
        common: What each common option sets in the library.
        passed: Options of the library that the test gives.
        decides: Further options of the library that would contradict a common option.

    Raises:
        BackendError: If a test gives a common option and what it sets.
    """
    for name, keywords in common.items():
        twice = sorted({*keywords, *(decides or {}).get(name, ())} & set(passed))
        if twice:
            raise BackendError(f"{backend}: {name} sets {', '.join(twice)} as well; give one of them")
    return {**{key: value for keywords in common.values() for key, value in keywords.items()}, **passed}


#: Why a backend refuses options of its library that choose devices, or the model: the plugin sets them.
DEVICES = "the devices are those of the test; use the marks gpus and parallel"
SOURCE = "the plugin names the model, its configuration and its tokenizer; use --energy-model or energy_model"

#: Why every backend refuses a secret.
SECRET = "it is a secret, and options are recorded"

#: Secrets for the Hugging Face hub, whose client also reads an environment variable.
_HUB_TOKENS = ("token", "use_auth_token", "hf_token")

#: Why a backend refuses what its method ``generate`` takes.
ARGUMENT = "it is an argument of generate"

#: Most names in a message.
_MOST_NAMES = 20

#: Why a backend refuses ``prefix_cache``.
NO_PREFIX_CACHE = "rounds repeat their prompts, and all but the first would be nearly free"


def check_engine_options(
    backend: str,
    given: Mapping[str, Any],
    accepted: Collection[str],
    *,
    declared: Collection[str],
    where: str,
    reserved: Mapping[str, str] | None = None,
) -> None:
    """Check the names of options that a backend passes on to its library.

    Args:
        backend: Name of the backend.
        given: The options.
        accepted: What the installed version of the library takes.
        declared: Load options of the backend itself.
        where: Where ``accepted`` comes from, such as ``vllm.EngineArgs of vLLM 0.11``.
        reserved: Options that the backend sets itself, each with the reason.

    Raises:
        BackendError: If an option is reserved or unknown, or has a secret in its value.
    """
    refused = reserved or {}
    for name, value in given.items():
        if reason := explain_secret(name) or refused.get(name):
            raise BackendError(f"{backend}: the load option {name} is not available: {reason}")
        if (shown := hide_secrets(value)) is not value:
            raise BackendError(
                f"{backend}: the load option {name} holds a secret, and options are recorded: {shown}"
            )
    unknown = [name for name in given if name not in accepted]
    if not unknown:
        return
    for name in unknown:
        if name in GenerationParams.__struct_fields__:
            raise BackendError(f"{backend}: the load option {name} is not available: {ARGUMENT}")
    offered = {name for name in accepted if name not in refused and not is_secret(name)}
    taken = sorted({*declared, *offered})
    if len(taken) > _MOST_NAMES:
        taken = [*sorted(declared), f"and {len(offered - set(declared))} others that it lists"]
    # A slip may be meant as an option of the backend, and the library cannot know those.
    known = sorted({*declared, *COMMON_OPTIONS, *offered})
    hint = did_you_mean(unknown, known) or f"it takes: {', '.join(taken)}"
    raise BackendError(f"{backend}: {where} has no option {', '.join(unknown)}; {hint}")


def explain_secret(name: str) -> str | None:
    """Return why an option of this name is refused as a secret; None if it is not one."""
    if not is_secret(name):
        return None
    return f"{SECRET}; set the environment variable HF_TOKEN" if name.lower() in _HUB_TOKENS else SECRET


def list_keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of the keyword arguments of a function or class, without ``self`` and ``**``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]
