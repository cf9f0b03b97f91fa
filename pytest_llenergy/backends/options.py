# SPDX-License-Identifier: Apache-2.0
"""Load options: ``dtype`` has one meaning in every backend; others go to the inference library as they are.

An adapter refuses what it sets itself; everything else is for the library to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError

#: Endings of the names of credentials, which options of no backend may hold: options are recorded.
SECRETS = ("api_key", "api_keys", "auth_token", "hf_token", "password", "secret")


def select_options(
    backend: str, options: Mapping[str, Any], own: Collection[str], reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options that are passed on to the library: those that the adapter does not apply itself.

    Those that the adapter sets (``reserved``), arguments of ``generate`` and secrets are refused.
    """
    passed = {name: value for name, value in options.items() if name not in own}
    for name in passed:
        reason = None
        if name == "token" or name.endswith(SECRETS):
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
