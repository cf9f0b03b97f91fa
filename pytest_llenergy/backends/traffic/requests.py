# SPDX-License-Identifier: Apache-2.0
"""Requests with their lengths and times, which a rank turns into texts by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from pytest_llenergy.errors import BackendError, LLEnergyError
from pytest_llenergy.record.outputs import digest_prompts

#: Largest number that is accepted: what 64 bits hold.
MOST = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, with the text of its prompt or with the lengths of blocks to write one.

    Attributes:
        prompt: Text of the prompt; empty if it is to be written.
        blocks: Parts of the prompt to write, each with a name and its number of tokens. Prompts that begin
            with the same blocks begin with the same text.
        history: Messages before the prompt, each a role and a text. Other work than chat puts their texts
            before that of the prompt, with blank lines between.
        output_tokens: Tokens to generate; None for ``max_new_tokens``.
        answer: If ``output_tokens`` is None, generate as many tokens as this text has.
        at_s: When to send it, in seconds from the start; None without a schedule.
    """

    prompt: str = ""
    blocks: tuple[tuple[str, Count], ...] = ()
    history: tuple[tuple[str, str], ...] = ()
    output_tokens: Count | None = None
    answer: str = ""
    at_s: Seconds | None = None

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt to write, counted with the tokenizer's special tokens; None for a text."""
        return sum(tokens for _, tokens in self.blocks) if self.blocks else None

    @property
    def text(self) -> str:
        """Prompt and history as one text."""
        return "\n\n".join([*(text for _, text in self.history), self.prompt])


class Requests(tuple[Request, ...]):
    """Requests in order. ``description`` is what the record says of them, in one line."""

    description: str

    def __new__(cls, requests: Iterable[Request], description: str) -> Requests:
        made = super().__new__(cls, requests)
        made.description = description
        return made

    def __repr__(self) -> str:
        return f"<{len(self)} requests: {self.description}>"


Inputs = Sequence[str | Request]


def as_request(each: str | Request) -> Request:
    """Return a text as a request."""
    return Request(prompt=each) if isinstance(each, str) else each


def check_inputs(task: str, inputs: Any) -> None:
    """Raise ``BackendError`` for inputs that are no list of texts and requests, and for unusable ones."""
    is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if not is_list or not inputs or not all(isinstance(each, (str, Request)) for each in inputs):
        raise BackendError(
            f"{task}: prompts must be a list of one or more strings, or of requests, found {shorten(inputs)}"
        )
    for number, request in enumerate(inputs, 1):
        if isinstance(request, Request) and (fault := _find_fault(request)):
            raise BackendError(f"{task}: request {number}: {fault}")
        try:
            (request if isinstance(request, str) else request.text + request.answer).encode()
        except UnicodeEncodeError as error:
            raise BackendError(
                f"{task}: prompt {number} is not valid Unicode: a lone surrogate, "
                f"{error.object[error.start]!a} at character {error.start}; replace it"
            ) from None


def _find_fault(request: Request) -> str | None:
    try:
        msgspec.convert(msgspec.to_builtins(request), Request)
    except (msgspec.ValidationError, TypeError) as error:
        return str(error).replace("$.", "")
    return None if bool(request.prompt) != bool(request.blocks) else "needs a prompt or blocks, and not both"


def complete_arguments(task: str, inputs: Inputs, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a task with those that follow from its requests.

    A load has one request for each input, at their times unless the test gives others. A batch has one
    output length.
    """
    found = dict(arguments)
    requests = [each for each in inputs if isinstance(each, Request)]
    if not requests:
        return found
    if task == "serve":
        times = [request.at_s for request in requests]
        timed = [at_s for at_s in times if at_s is not None]
        is_timed = len(timed) == len(inputs)
        paced = bool({"request_rate", "concurrency"} & set(found))
        asked = found.get("arrivals", "poisson" if paced else "trace")
        if is_timed and asked == "trace" and "trace" not in found:
            found |= {"arrivals": "trace", "trace": timed}
        if found.get("arrivals") != "trace":
            found.setdefault("num_requests", len(inputs))
        return found
    lengths = {each.output_tokens if isinstance(each, Request) else None for each in inputs}
    if len(lengths) > 1 or any(request.answer for request in requests):
        raise BackendError(
            "generate: the requests have unlike output lengths, and a batch has one; use backend.serve, or "
            "requests without output_tokens and max_new_tokens"
        )
    (length,) = lengths
    if length is not None:
        found.setdefault("max_new_tokens", length)
    return found


def describe_inputs(task: str, inputs: Inputs, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record says of a task: its arguments, and the requests if they are not only texts."""
    requests = [each for each in inputs if isinstance(each, Request)]
    if not requests:
        return dict(arguments)
    described = {**arguments, "requests": getattr(inputs, "description", None) or f"{len(inputs)} requests"}
    own = [each for each in requests if each.output_tokens is not None or each.answer]
    if task == "serve" and own:
        others = "" if len(own) == len(inputs) else ", else "
        described["max_new_tokens"] = (
            f"of each request{others}{arguments['max_new_tokens'] if others else ''}"
        )
    return described


def encode_inputs(inputs: Inputs) -> list[str]:
    """Return each input as a text that changes with every length, block and time of a request."""
    return [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in inputs]


def digest_inputs(inputs: Inputs) -> str:
    """Return the digest of inputs; it changes with every length, block and time of a request."""
    return digest_prompts(encode_inputs(inputs))


def is_number(value: object) -> bool:
    """Whether a value is a finite number, 0 or more."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST


def check_whole(where: str, name: str, value: Any, least: int = 1) -> int:
    """Return a whole number. Raises ``LLEnergyError`` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise LLEnergyError(f"{where}: {name} is {shorten(value)}, needs a whole number, {least} or more")
    return int(value)


def shorten(value: object) -> str:
    """Return a value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
