# SPDX-License-Identifier: Apache-2.0
"""Checks of what was generated and how it was counted. Each returns what is wrong, or ``None``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llenergy.conformance.engine import Made

Tokens = Sequence[Sequence[int]]


def prompts_counted(made: Made, counted: Mapping[str, int]) -> str | None:
    """``counted`` has the prompts of the batch, in its order, each with its tokens counted by hand."""
    for request, (prompt, tokens) in zip(made.requests, counted.items(), strict=True):
        if request.input_tokens != tokens:
            padded = max(counted.values()) == request.input_tokens
            why = ", the length of the padded batch: sum the attention mask" if padded else ""
            return (
                f"prompt {prompt!r} has {tokens} tokens, and input_tokens is {request.input_tokens}{why}; "
                "count the tokens of the prompt itself"
            )
    return None


def outputs_counted(made: Made, max_new_tokens: int) -> str | None:
    """With ``ignore_eos`` each sequence is ``max_new_tokens`` long."""
    for number, (request, ids) in enumerate(zip(made.requests, made.token_ids, strict=True)):
        if len(ids) != max_new_tokens:
            return (
                f"max_new_tokens={max_new_tokens} with ignore_eos made {len(ids)} tokens of prompt {number}; "
                "token_ids are the output without prompt and padding, and nothing ends it before"
            )
        if request.output_tokens != len(ids):
            return (
                f"output_tokens of prompt {number} is {request.output_tokens}, and token_ids has {len(ids)}; "
                "count what was produced"
            )
    return None


def stop_token(free: Tokens) -> int | None:
    """A token at which one sequence ends early, and another later or not at all; ``None`` without one."""
    found = {token: [_length(ids, token) for ids in free] for ids in free for token in ids}
    useful = [token for token, lengths in found.items() if 1 < min(lengths) < max(lengths)]
    return min(useful, key=lambda token: (min(found[token]), token), default=None)


def stopped(made: Made, free: Tokens, stop: int) -> str | None:
    """What a batch makes with a stop token, of what it makes without: the same until one has ended."""
    first = min(range(len(free)), key=lambda number: _length(free[number], stop))
    expected = list(free[first][: _length(free[first], stop)])
    asked = f"stop_token_ids=[{stop}]"
    for number, (request, ids) in enumerate(zip(made.requests, made.token_ids, strict=True)):
        if number == first and list(ids) != expected:
            return (
                f"{asked} made {_show(ids)} of prompt {number}, needs {_show(expected)}: a sequence ends "
                "with the stop token, which is the last of its output, also with ignore_eos"
            )
        if stop in ids[:-1] or (len(ids) < len(free[number]) and ids[-1] != stop):
            return (
                f"{asked} made {_show(ids)} of prompt {number}: a sequence ends at the stop token and "
                "nowhere else"
            )
        if request.output_tokens != len(ids):
            return (
                f"with {asked} output_tokens of prompt {number} is {request.output_tokens}, and token_ids "
                f"has {len(ids)}; what follows the end is padding and no output"
            )
    return None


def same(found: Tokens, expected: Tokens, prompts: Sequence[str], names: tuple[str, str]) -> str | None:
    """Two ways to the same tokens; ``names`` are those of the two ways."""
    for prompt, ids, others in zip(prompts, found, expected, strict=True):
        if list(ids) != list(others):
            place = next(
                (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other),
                min(len(ids), len(others)),
            )
            return (
                f"prompt {prompt!r}: token {place} differs; {names[0]}: {_show(ids)}, "
                f"{names[1]}: {_show(others)}"
            )
    return None


def alike(found: Tokens) -> str | None:
    """Whether sequences tell prompts apart: equal ones would prove nothing."""
    if len({tuple(ids) for ids in found}) < len(found):
        return f"two prompts have equal outputs, which proves nothing: {_show(found[0])}; give other prompts"
    return None


def _length(ids: Sequence[int], stop: int) -> int:
    """How long a sequence is that ends with its first stop token."""
    return ids.index(stop) + 1 if stop in ids else len(ids)


def _show(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}{', …' if len(ids) > 16 else ''}] ({len(ids)} tokens)"
