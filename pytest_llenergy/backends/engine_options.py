# SPDX-License-Identifier: Apache-2.0
"""Load options: those with one meaning in every backend, and those passed on to an inference library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.text import did_you_mean

#: Load options that mean the same in every backend that declares them. A backend that does not declare one
#: refuses it, even if its library has an option of that name.
COMMON_OPTIONS: Mapping[str, str] = {
    "dtype": "type of the weights that are not quantised, and of the arithmetic",
    "quantization": "quantisation of the weights when they are loaded",
    "kv_cache_dtype": "type of the key-value cache",
    "attention": "attention implementation",
    "chunked_prefill": "whether a prompt may be processed in several steps; a number is their tokens",
    "speculative": "how tokens are drafted: settings by name",
    "prefix_cache": "whether prompts may reuse the cache of earlier ones",
    "lora": "directory of a LoRA adapter to apply",
    "compile": "whether the model is compiled, or the compilation mode",
}

#: Why a backend refuses ``prefix_cache``.
NO_PREFIX_CACHE = "rounds repeat their prompts, and all but the first would be nearly free"


def check_engine_options(
    backend: str,
    given: Collection[str],
    accepted: Collection[str],
    *,
    where: str,
    reserved: Mapping[str, str] | None = None,
) -> None:
    """Check the names of options that a backend passes on to its library.

    Args:
        backend: Name of the backend.
        given: Names of the options.
        accepted: What the installed version of the library takes.
        where: Where ``accepted`` comes from, such as ``vllm.EngineArgs of vLLM 0.11``.
        reserved: Options that the backend sets itself, each with the reason.

    Raises:
        BackendError: If an option is reserved or unknown.
    """
    for name in given:
        if reserved is not None and name in reserved:
            raise BackendError(f"{backend}: the load option {name} is not available: {reserved[name]}")
    unknown = [name for name in given if name not in accepted]
    if unknown:
        hint = did_you_mean(unknown, sorted(accepted)) or f"it takes: {', '.join(sorted(accepted))}"
        raise BackendError(f"{backend}: {where} has no option {', '.join(unknown)}; {hint}")


def list_keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of the keyword arguments of a function or class, without ``self`` and ``**``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]
