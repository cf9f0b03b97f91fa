# SPDX-License-Identifier: Apache-2.0
"""Lengths of synthetic requests, and texts of exactly these lengths with tokenizers of several kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import pytest

from pytest_llenergy.backends.traffic import Request, synthetic
from pytest_llenergy.backends.traffic.requests import (
    check_inputs,
    complete_arguments,
    describe_inputs,
    digest_inputs,
)
from pytest_llenergy.backends.traffic.texts import Writer, write_texts
from pytest_llenergy.errors import BackendError, LLEnergyError


def words(text: str) -> int:
    """A token for each word, after one that begins the text."""
    return 1 + len(text.split())


def letters(text: str) -> int:
    """A token for each byte."""
    return len(text.encode())


def pairs(text: str) -> int:
    """A token for each two letters of a word, and for anything else."""
    return sum(-(-len(each) // 2) for each in re.findall(r"\w+|\S", text))


def merging(text: str) -> int:
    """A token for each word, and one for two words of which one ends as the other begins."""
    return len(text.split()) - len(re.findall(r"(\w) (?=\1)", text))


def each(count: Callable[[str], int]) -> Callable[[Sequence[str]], list[int]]:
    return lambda texts: [count(text) for text in texts]


class TestTexts:
    @pytest.mark.parametrize("count", [words, letters, pairs, merging])
    @pytest.mark.parametrize("tokens", [9, 10, 127, 512, 2048])
    def test_prompts_have_exactly_the_tokens(self, count: Callable[[str], int], tokens: int) -> None:
        made = write_texts(synthetic(count=3, input_tokens=tokens), "x", each(count))
        assert [count(text) for text in made] == [tokens] * 3
        assert len(set(made)) == 3

    def test_the_shared_part_is_the_same_text_and_the_rest_is_not(self) -> None:
        made = write_texts(synthetic(count=4, input_tokens=101, shared_prefix=0.4), "x", each(words))
        split = [text.split() for text in made]
        # 40 tokens, one of which begins every text.
        assert len({tuple(row[:39]) for row in split}) == 1
        assert len({tuple(row[39:45]) for row in split}) == 4

    def test_a_reopened_text_has_as_many_tokens_and_another_beginning(self) -> None:
        writer = Writer(each(letters), "x")
        (request,) = writer.write(synthetic(count=1, input_tokens=200))
        again = {writer.reopen(request.prompt, number) for number in range(4096)}
        assert len(again) == 4096
        assert {letters(text) for text in again} == {200}

    def test_tokenizers_without_a_rule_are_refused_in_one_line(self) -> None:
        def odd(texts: Sequence[str]) -> list[int]:
            return [7 for _ in texts]

        with pytest.raises(BackendError) as caught:
            write_texts(synthetic(count=1, input_tokens=30), "odd", odd)
        assert str(caught.value) == (
            "odd: cannot write prompts of a number of tokens: one word has 7 and three have 7; give texts"
        )


class TestLengths:
    def test_lengths_have_the_mean_and_the_spread(self) -> None:
        made = synthetic(
            count=4000, input_tokens=500, input_stdev=50, output_tokens=100, output_stdev=10, seed=3
        )
        inputs = [request.input_tokens or 0 for request in made]
        outputs = [request.output_tokens or 0 for request in made]
        assert fmean(inputs) == pytest.approx(500, abs=3)
        assert stdev(inputs) == pytest.approx(50, rel=0.05)
        assert fmean(outputs) == pytest.approx(100, abs=0.6)
        assert stdev(outputs) == pytest.approx(10, rel=0.05)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"input_tokens": 0}, "input_tokens is 0, needs a whole number, 1 or more"),
            ({"count": 2.5}, "count is 2.5, needs a whole number, 1 or more"),
            ({"output_tokens": 0}, "output_tokens is 0, needs a whole number, 1 or more"),
            ({"input_stdev": -1}, "input_stdev is -1, needs a number, 0 or more"),
            ({"input_stdev": float("nan")}, "input_stdev is nan, needs a number, 0 or more"),
            ({"output_stdev": 3}, "output_stdev needs output_tokens, its mean"),
            ({"shared_prefix": 1}, "shared_prefix is 1, needs 0 or more and less than 1"),
        ],
    )
    def test_bad_arguments_are_refused_in_one_line(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(LLEnergyError) as caught:
            synthetic(**{"count": 1, "input_tokens": 8, **arguments})
        assert str(caught.value) == f"synthetic: {message}"


class TestRecord:
    CHANGES = (
        {"input_tokens": 65},
        {"count": 5},
        {"output_tokens": 9},
        {"shared_prefix": 0.5},
        {"seed": 1},
        {"input_stdev": 1.0},
    )

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
    def test_the_digest_changes_with_every_argument(self, change: dict[str, Any]) -> None:
        base: dict[str, Any] = {"count": 4, "input_tokens": 64, "output_tokens": 8}
        assert digest_inputs(synthetic(**base)) == digest_inputs(synthetic(**base))
        assert digest_inputs(synthetic(**base)) != digest_inputs(synthetic(**{**base, **change}))

    def test_the_record_says_what_was_asked(self) -> None:
        made = synthetic(count=2, input_tokens=64, output_tokens=8)
        described = describe_inputs("serve", made, {"max_new_tokens": 64, "seed": 0})
        assert described == {
            "max_new_tokens": "of each request",
            "seed": 0,
            "requests": "synthetic(count=2, input_tokens=64, output_tokens=8, seed=0)",
        }
        mixed: list[str | Request] = [made[0], "text"]
        assert describe_inputs("serve", mixed, {"max_new_tokens": 64})["max_new_tokens"] == (
            "of each request, else 64"
        )
        assert describe_inputs("serve", ["text"], {"max_new_tokens": 64}) == {"max_new_tokens": 64}


class TestBatches:
    def test_one_output_length_is_that_of_the_batch(self) -> None:
        made = synthetic(count=2, input_tokens=64, output_tokens=8)
        assert complete_arguments("generate", made, {}) == {"max_new_tokens": 8}
        assert complete_arguments("generate", synthetic(count=2, input_tokens=64), {}) == {}

    @pytest.mark.parametrize(
        ("requests", "message"),
        [
            (
                synthetic(count=9, input_tokens=64, output_tokens=9, output_stdev=4),
                "generate: the requests have unlike output lengths",
            ),
            ([Request(prompt="a", answer="b")], "generate: the requests have unlike output lengths"),
        ],
    )
    def test_what_a_batch_cannot_have_is_refused(self, requests: Sequence[Request], message: str) -> None:
        with pytest.raises(BackendError, match=message):
            complete_arguments("generate", requests, {})

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ("text", "serve: prompts must be a list of one or more strings, or of requests, found 'text'"),
            ([], "serve: prompts must be a list of one or more strings, or of requests, found []"),
            (Request(prompt="a"), "serve: prompts must be a list of one or more strings, or of requests, fo"),
            (iter("a"), "serve: prompts must be a list of one or more strings, or of requests, found <"),
            ([3], "serve: prompts must be a list of one or more strings, or of requests, found [3]"),
            ([Request()], "serve: request 1: needs a prompt or blocks, and not both"),
            (
                ["a", Request(prompt="a", output_tokens=0)],
                "serve: request 2: Expected `int` >= 1 - at `output_tokens`",
            ),
            ([Request(prompt="a", at_s=-1.0)], "serve: request 1: Expected `float` >= 0.0 - at `at_s`"),
            (
                ["a", "b\ud800"],
                "serve: prompt 2 is not valid Unicode: a lone surrogate, '\\ud800' at character 1",
            ),
        ],
    )
    def test_unusable_inputs_are_refused_in_one_line(self, inputs: Any, message: str) -> None:
        with pytest.raises(BackendError) as caught:
            check_inputs("serve", inputs)
        assert str(caught.value).startswith(message)
