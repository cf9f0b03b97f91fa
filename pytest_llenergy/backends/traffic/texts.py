# SPDX-License-Identifier: Apache-2.0
"""Write prompts of an exact number of tokens, knowing only how to count the tokens of a text.

Texts are words of four letters. Most tokenizers have each of them as one token, and those that split words
split all of them alike, so the number of words follows from the number of tokens. Every text is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from pytest_llenergy.backends.traffic.requests import Inputs, Request, as_request
from pytest_llenergy.errors import BackendError

#: Returns the tokens of each text, with what is added to every prompt, such as a first token or a template.
Count = Callable[[Sequence[str]], list[int]]

_WORDS = (
    "time year work life hand part case week city book room idea game line head side kind name door care "
    "mind body face fact half news road form food land view club team town bank wall rate plan rule tree "
    "test list page post date note song film park farm ship wind rain fire gold wood rock cold warm dark "
    "blue good high long"
)
WORDS = tuple(_WORDS.split())

#: Appended, one to several times, where whole words do not give the number of tokens.
FILLERS = (".", "a", " a", "1", "\n")

#: How often a text is changed that has not the expected number of tokens.
MAX_TRIES = 8

#: Characters of the first two words of a text.
OPENING = len("time year")


class Writer:
    """Writes texts for one tokenizer.

    Attributes:
        words: Words that have the same number of tokens.
        added: Tokens added to every prompt.
    """

    def __init__(self, count: Count, backend: str) -> None:
        """Find out how words are split. Raises ``BackendError`` if they have no number of tokens."""
        self._count, self._backend = count, backend
        once, thrice = count(WORDS), count([f"{word} {word} {word}" for word in WORDS])
        (one, three), _ = Counter(zip(once, thrice, strict=True)).most_common(1)[0]
        self._first, (self._each, rest) = one, divmod(three - one, 2)
        if rest or self._each < 1:
            raise BackendError(
                f"{backend}: cannot write prompts of a number of tokens: one word has {one} and three have "
                f"{three}; give texts"
            )
        self.added = max(0, one - self._each)
        counted = zip(WORDS, once, thrice, strict=True)
        self.words = tuple(word for word, *tokens in counted if tokens == [one, three])

    def write(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with texts in place of blocks, and with the output lengths of their answers."""
        asked = {each.blocks: each.input_tokens or 0 for each in requests if each.blocks}
        texts = {blocks: self._draft(blocks) for blocks in asked}
        for blocks, counted in zip(texts, self._count(list(texts.values())) if texts else [], strict=True):
            if counted != asked[blocks]:
                texts[blocks] = self._fit(texts[blocks], counted, asked[blocks])
        measured = (each.answer for each in requests if each.answer and each.output_tokens is None)
        answers = list(dict.fromkeys(measured))
        lengths = dict(zip(answers, self._count(answers) if answers else [], strict=True))

        def written(request: Request) -> Request:
            length = request.output_tokens
            if length is None and request.answer:
                length = max(1, lengths[request.answer] - self.added)
            prompt = texts.get(request.blocks, request.prompt)
            return msgspec.structs.replace(request, prompt=prompt, output_tokens=length)

        return list(map(written, requests))

    def reopen(self, text: str, number: int) -> str:
        """Return a written text with other first words, so that nothing of it is in a prefix cache.

        Texts that begin alike do so with the same ``number`` as well; it repeats after a few thousand.
        """
        second, first = divmod(number, len(self.words))
        opening = f"{self.words[first]} {self.words[second % len(self.words)]}"
        return opening + text[OPENING:] if len(text) >= OPENING else text

    def _draft(self, blocks: Sequence[tuple[str, int]]) -> str:
        total = sum(tokens for _, tokens in blocks)
        if total < self._first:
            raise BackendError(f"{self._backend}: a prompt of {total} tokens: one word has {self._first}")
        words: list[str] = []
        for (name, _), end in zip(blocks, accumulate(tokens for _, tokens in blocks), strict=True):
            size = max(0, (end - self._first) // self._each + 1)
            words += random.Random(name).choices(self.words, k=max(0, size - len(words)))
        return " ".join(words)

    def _fit(self, text: str, counted: int, asked: int) -> str:
        """Add or drop words until less than a word is missing, then append fillers."""
        extra = random.Random(text)
        for _ in range(MAX_TRIES):
            missing = asked - counted
            if 0 < missing < max(self._each, 2):
                tries = [text + filler * times for filler in FILLERS for times in range(1, missing + 1)]
                counts = self._count(tries)
                if asked in counts:
                    return tries[counts.index(asked)]
            words, whole = text.split(" "), missing // self._each
            words = words[:whole] if whole < 0 else [*words, *extra.choices(self.words, k=max(1, whole))]
            text = " ".join(words)
            (counted,) = self._count([text])
            if counted == asked:
                return text
        raise BackendError(f"{self._backend}: cannot write a prompt of exactly {asked} tokens; give a text")


def write_texts(inputs: Inputs, backend: str, count: Count | None) -> list[str]:
    """Return the texts of a batch. ``count`` is None if the backend cannot count the tokens of a text."""
    requests = [as_request(each) for each in inputs]
    if any(request.blocks for request in requests):
        if count is None:
            raise BackendError(
                f"{backend} does not count the tokens of a text, so no prompt of a given number can be "
                "written; give texts, or add count_tokens to the backend"
            )
        requests = Writer(count, backend).write(requests)
    return [each.text for each in requests]
