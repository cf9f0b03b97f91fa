# SPDX-License-Identifier: Apache-2.0
"""Digests of outputs: what share of tokens agrees, and what they do not reveal."""

from __future__ import annotations

import pytest

from pytest_llenergy.record.outputs import MAX_TOKENS, agreement_of, digest_outputs

PROMPTS = ["Name three rivers.", "What is a clock?"]
ROWS = [[11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]


def digests(*rows: list[int]) -> list[str]:
    return digest_outputs(PROMPTS, rows)


def test_equal_outputs_agree_entirely() -> None:
    assert agreement_of(digests(*ROWS), digests(*ROWS)) == 1.0
    assert agreement_of([], []) == 1.0


@pytest.mark.parametrize("place", range(10))
def test_only_tokens_before_the_first_difference_agree(place: int) -> None:
    changed = [*ROWS[1][:place], 999, *ROWS[1][place + 1 :]]
    assert agreement_of(digests(*ROWS), digests(ROWS[0], changed)) == pytest.approx((10 + place) / 20)


def test_a_missing_or_longer_output_does_not_agree() -> None:
    assert agreement_of(digests(*ROWS), digests(ROWS[0])) == 0.5
    assert agreement_of(digests(ROWS[0]), digests([*ROWS[0], *ROWS[1]])) == 0.5


def test_without_the_prompts_digests_say_nothing_about_the_tokens() -> None:
    """The same tokens have other digests for other prompts, so that nobody can look them up."""
    others = digest_outputs(["Name three lakes.", PROMPTS[1]], ROWS)
    assert agreement_of(digests(*ROWS), others) < 0.2
    assert all(set(each) <= set("0123456789abcdef") and len(each) == 20 for each in others)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 100_000), (100, 1000), (10_000, 3)])
def test_a_record_keeps_a_limited_number_of_digests(rows: int, tokens: int) -> None:
    found = digest_outputs(["x"] * rows, [list(range(tokens))] * rows)
    assert 0 < sum(map(len, found)) <= 2 * MAX_TOKENS
