# SPDX-License-Identifier: Apache-2.0
"""What adapters of inference libraries share: checks of a batch before it runs, and its result afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.timeline import RequestTimeline


def check_lengths(backend: str, lengths: Sequence[int], max_new_tokens: int, limit: int | None) -> None:
    """Check that each prompt has tokens and that the longest one, with its output, fits the model.

    Beyond its context length most libraries silently generate nonsense.

    Args:
        backend: Name of the backend, for messages.
        lengths: Tokens of each prompt.
        max_new_tokens: Tokens to generate.
        limit: Context length of the model in tokens; None if unknown.

    Raises:
        BackendError: If a prompt is empty or too long.
    """
    if 0 in lengths:
        raise BackendError(f"{backend}: a prompt has no tokens; leave empty prompts out")
    tokens = max(lengths) + max_new_tokens
    if limit is not None and tokens > limit:
        raise BackendError(
            f"{backend}: longest prompt and max_new_tokens are {tokens} tokens; the model has room "
            f"for {limit}"
        )


def batch_result(
    texts: Sequence[str], token_ids: Sequence[list[int]], lengths: Sequence[int], steps_ns: Sequence[int] = ()
) -> Generation:
    """Return the result of a batch whose rows take the same steps, one token a row.

    Args:
        texts: Outputs as text.
        token_ids: Output tokens, with those that ended a sequence and without padding.
        lengths: Tokens of each prompt, without padding.
        steps_ns: When each step's tokens were available (``time.monotonic_ns()``); empty if unknown.
    """
    stamps = [tuple(steps_ns[: len(ids)]) for ids in token_ids]
    return stamped_result(texts, token_ids, lengths, stamps)


def stamped_result(
    texts: Sequence[str],
    token_ids: Sequence[list[int]],
    lengths: Sequence[int],
    token_ns: Sequence[Sequence[int]],
) -> Generation:
    """Return the result of a batch with the time of each token; other arguments as in ``batch_result``.

    Args:
        texts: Outputs as text.
        token_ids: Output tokens.
        lengths: Tokens of each prompt.
        token_ns: When each token of each output was available; empty if unknown.
    """
    requests = [
        RequestTimeline(
            input_tokens=length,
            output_tokens=len(ids),
            first_token_ns=stamps[0] if stamps else None,
            last_token_ns=stamps[-1] if stamps else None,
            token_ns=tuple(stamps),
        )
        for length, ids, stamps in zip(lengths, token_ids, token_ns, strict=True)
    ]
    return Generation(texts=list(texts), token_ids=list(token_ids), requests=requests)
