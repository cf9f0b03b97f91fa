# SPDX-License-Identifier: Apache-2.0
"""What adapters of inference libraries share: checks of a batch before it runs, and its result afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.timeline import RequestTimeline

#: A prompt of so many characters is checked for an end that its tokenizer has dropped.
LONG_PROMPT = 256

#: A space before a word, over which tokens hardly ever go.
_SPACE = re.compile(r" (?=\S)")

#: Tokens that a prompt encoded in two parts may have more than the same prompt encoded as one.
SEAM_TOKENS = 16


def encode_prompts(
    backend: str, encode: Callable[[str], Sequence[int]], prompts: Sequence[str]
) -> list[list[int]]:
    """Return the token ids of each prompt; ``encode`` returns those of one text.

    Raises:
        BackendError: A prompt has no tokens, or ``encode`` drops a part of it: what follows a NUL, or a fixed
            number of tokens.
    """
    rows = [list(map(int, encode(prompt))) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise BackendError(f"{backend}: a prompt has no tokens; leave empty prompts out")
        whole = _count_whole(encode, prompt, row)
        if whole is not None:
            what = "a NUL, at which it ends; remove it" if "\0" in prompt else "no room for it; shorten it"
            raise BackendError(
                f"{backend}: its tokenizer keeps {len(row)} of the {whole} tokens of a prompt: {what}"
            )
    return rows


def _count_whole(encode: Callable[[str], Sequence[int]], prompt: str, row: Sequence[int]) -> int | None:
    """Return how many tokens a prompt has if ``row`` lacks some of them, counted part by part."""
    special = len(encode(""))
    if "\0" in prompt:
        first, *others = prompt.split("\0")
        # Each NUL is a token of its own.
        rest = sum(1 + len(encode(text)) - special for text in others)
        return len(row) + rest if list(encode(first)) == list(row) else None
    if len(prompt) < LONG_PROMPT:
        return None
    space = _SPACE.search(prompt, len(prompt) // 2)
    middle = len(prompt) // 2 if space is None else space.start()
    parts = [list(encode(text)) for text in (prompt[:middle], prompt[middle:])]
    whole = sum(len(part) - special for part in parts) + special
    missing = whole - len(row)
    ends_otherwise = space is not None and parts[-1][-1:] != list(row[-1:])
    return whole if missing > SEAM_TOKENS or (missing > 0 and ends_otherwise) else None


def check_processed(backend: str, given: Sequence[int], processed: Sequence[int]) -> None:
    """Raise ``BackendError`` unless the library has processed the tokens that each prompt has."""
    for number, (wanted, done) in enumerate(zip(given, processed, strict=True)):
        if wanted != done:
            raise BackendError(f"{backend}: processed {done} of the {wanted} tokens of prompt {number}")


def check_lengths(backend: str, lengths: Sequence[int], max_new_tokens: int, limit: int | None) -> None:
    """Raise ``BackendError`` if the longest prompt and its output exceed the model's ``limit`` of tokens.

    Beyond it most libraries silently generate nonsense.
    """
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

    ``token_ids`` have the tokens that ended a sequence and no padding; ``steps_ns`` are the times of each
    step's tokens (``time.monotonic_ns()``), empty if unknown.
    """
    return stamped_result(texts, token_ids, lengths, [steps_ns[: len(ids)] for ids in token_ids])


def stamped_result(
    texts: Sequence[str],
    token_ids: Sequence[list[int]],
    lengths: Sequence[int],
    token_ns: Sequence[Sequence[int]],
) -> Generation:
    """Return the result of a batch with the time of each token of each output; empty if unknown."""
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
