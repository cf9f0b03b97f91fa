# SPDX-License-Identifier: Apache-2.0
"""Beams, penalties and min_p: honoured as in a loop written by hand, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.registry import BUILTIN
from pytest_llenergy.backends.tasks import EXTRA_PARAMS, GenerationParams
from pytest_llenergy.errors import BackendError

from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

#: For each parameter, a value that has an effect.
VALUES: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "min_p": {"min_p": 0.1, "do_sample": True},
}

TOKENS = 8


class ByHand:
    """The tiny model in 32-bit floats, one forward pass over the whole sequence per step."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = pretrained_path(resolve_model(TINY))
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def log_probabilities(self, ids: list[int]) -> Any:
        return self._logits(ids).log_softmax(0)

    def beam_search(self, prompt: str, num_beams: int) -> list[int]:
        """Return the continuation of the highest probability among those kept."""
        start = self.tokenizer(prompt)["input_ids"]
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(TOKENS):
            longer = []
            for score, ids in beams:
                top = self.log_probabilities(start + ids).topk(num_beams)
                longer += [
                    (score + value, [*ids, token])
                    for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
                ]
            beams = sorted(longer, key=lambda beam: -beam[0])[:num_beams]
        return beams[0][1]

    def penalised(self, prompt: str, penalty: float) -> list[int]:
        """Return the greedy continuation with a repetition penalty."""
        start: list[int] = self.tokenizer(prompt)["input_ids"]
        ids = start
        for _ in range(TOKENS):
            logits = self._logits(ids)
            for token in set(ids):
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            ids = [*ids, int(logits.argmax())]
        return ids[len(start) :]

    def _logits(self, ids: list[int]) -> Any:
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([ids])).logits[0, -1]


def search_beams(prompts: list[str], num_beams: int) -> list[list[int]]:
    by_hand = ByHand()
    return [by_hand.beam_search(prompt, num_beams) for prompt in prompts]


def penalise(prompts: list[str], penalty: float) -> list[list[int]]:
    by_hand = ByHand()
    return [by_hand.penalised(prompt, penalty) for prompt in prompts]


@pytest.fixture(scope="module")
def ranks() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as loaded:
        yield loaded


@pytest.mark.parametrize("spec", BUILTIN, ids=lambda spec: spec.name)
def test_every_backend_honours_or_refuses_each_parameter(spec: Any) -> None:
    row = spec.capabilities
    for name in EXTRA_PARAMS:
        params = GenerationParams.parse(VALUES[name])
        if name in row.sampling:
            row.refuse_params(spec.name, params)
            continue
        takes = ", ".join(row.sampling) or f"none of {', '.join(EXTRA_PARAMS)}"
        with pytest.raises(BackendError, match=f"^{spec.name} does not honour {name}; it takes: {takes}$"):
            row.refuse_params(spec.name, params)
    neutral = {"num_beams": 1, "repetition_penalty": 1, "presence_penalty": 0, "min_p": 0}
    row.refuse_params(spec.name, GenerationParams.parse(neutral))


def test_only_values_with_an_effect_are_recorded() -> None:
    recorded = GenerationParams.parse({"num_beams": 3, "min_p": 0}).primitives()
    assert recorded["num_beams"] == 3
    assert set(EXTRA_PARAMS) & set(recorded) == {"num_beams"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"presence_penalty": 3}, "generate: presence_penalty is 3, needs float <= 2.0"),
        (
            {"min_p": 0.1},
            "generate: min_p is 0.1, needs do_sample=True, since greedy decoding draws nothing",
        ),
    ],
)
def test_invalid_values_give_a_one_line_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        GenerationParams.parse(given)
    assert str(caught.value) == message


def test_beams_give_the_best_sequence_and_count_its_tokens_only(ranks: LoadedRanks) -> None:
    generation, timeline = ranks.generate(PROMPTS, max_new_tokens=TOKENS, num_beams=3)
    assert [generation.token_ids] == ranks.call(search_beams, PROMPTS, 3)
    greedy, _ = ranks.generate(PROMPTS, max_new_tokens=TOKENS)
    assert generation.token_ids != greedy.token_ids, "equal outputs would prove nothing"
    assert counts(generation) == [(3, TOKENS), (11, TOKENS), (1, TOKENS)]
    assert [request.computed_tokens for request in timeline.requests] == [3 * TOKENS] * 3
    ((start_ns, border_ns),) = timeline.borders_ns
    assert start_ns < border_ns < timeline.end_ns


def test_a_beam_that_ends_early_counts_up_to_its_end(ranks: LoadedRanks) -> None:
    free, _ = ranks.generate(["abc"], max_new_tokens=TOKENS, num_beams=3)
    stop = free.token_ids[0][2]
    generation, _ = ranks.generate(["abc"], max_new_tokens=TOKENS, num_beams=3, stop_token_ids=[stop])
    (ids,) = generation.token_ids
    assert ids.count(stop) <= 1
    assert generation.requests[0].output_tokens == len(ids)


def test_a_repetition_penalty_gives_the_tokens_of_a_loop_by_hand(ranks: LoadedRanks) -> None:
    prompts = ["abcabc", "xyzxyz"]
    generation, _ = ranks.generate(prompts, max_new_tokens=TOKENS, repetition_penalty=1.5)
    assert [generation.token_ids] == ranks.call(penalise, prompts, 1.5)
    plain, _ = ranks.generate(prompts, max_new_tokens=TOKENS)
    assert generation.token_ids != plain.token_ids


def test_the_largest_min_p_leaves_only_the_likeliest_token(ranks: LoadedRanks) -> None:
    greedy, _ = ranks.generate(PROMPTS, max_new_tokens=TOKENS)
    drawn, _ = ranks.generate(PROMPTS, max_new_tokens=TOKENS, do_sample=True, min_p=1.0)
    free, _ = ranks.generate(PROMPTS, max_new_tokens=TOKENS, do_sample=True)
    assert drawn.token_ids == greedy.token_ids != free.token_ids
