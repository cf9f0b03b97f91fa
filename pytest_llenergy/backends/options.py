# SPDX-License-Identifier: Apache-2.0
"""Load options: a few with one meaning in every backend; all others go to the inference library as they are.

An adapter refuses what it sets itself; everything else is for the library to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pytest_llenergy.backends.secrets import find_secret, is_secret
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag

#: Load options that mean the same in every backend that declares them. A backend that does not declare one
#: refuses it, even if its library has an option of that name.
COMMON_OPTIONS = ("dtype", "prefix_cache")

#: On a round that has taken prompt tokens from the prefix cache.
PREFIXES_REUSED = Flag(
    name="prefix-cache",
    severity="note",
    detail="prefix_cache=True: prompts reuse what earlier ones computed, so rounds after the first do not "
    "prefill them whole; tokens.cached counts the tokens",
)


def select_options(
    backend: str, options: Mapping[str, Any], own: Collection[str], reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options that are passed on to the library: those that the adapter does not apply itself.

    Those that the adapter sets (``reserved``), arguments of ``generate`` and secrets are refused.
    """
    passed = {name: value for name, value in options.items() if name not in own}
    for name, value in passed.items():
        reason = None
        if is_secret(name) or find_secret(value) is not None:
            reason = "it is a secret, and options are recorded; set an environment variable, such as HF_TOKEN"
        elif name in GenerationParams.__struct_fields__:
            reason = "it is an argument of generate"
        elif name in reserved:
            reason = "the plugin sets it"
        if reason is not None:
            raise BackendError(f"{backend}: the load option {name} is not available: {reason}")
    return passed


def show_options(options: Mapping[str, Any]) -> str:
    """Return options as a test writes them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
