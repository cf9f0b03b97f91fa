# SPDX-License-Identifier: Apache-2.0
"""Requests of given lengths, drawn from a seed."""

from __future__ import annotations

import random

from pytest_llenergy.backends.traffic.requests import Request, Requests, check_whole, is_number, shorten
from pytest_llenergy.errors import LLEnergyError


def synthetic(
    *,
    count: int,
    input_tokens: int,
    output_tokens: int | None = None,
    input_stdev: float = 0.0,
    output_stdev: float = 0.0,
    shared_prefix: float = 0.0,
    seed: int = 0,
) -> Requests:
    """Make requests whose prompts have an exact number of tokens, by the tokenizer of whatever model runs.

    Lengths are drawn from normal distributions, rounded, and at least 1. They depend on the arguments alone,
    so every round and every backend gets the same.

    Args:
        count: Number of requests.
        input_tokens: Mean tokens of a prompt, with the special tokens that the tokenizer adds. In the chat
            endpoint they include the chat template.
        output_tokens: Mean tokens to generate; None for ``max_new_tokens``.
        input_stdev: Standard deviation of ``input_tokens``.
        output_stdev: Standard deviation of ``output_tokens``.
        shared_prefix: Share of ``input_tokens`` with which all prompts begin, from 0 to less than 1.
        seed: Of lengths and texts.

    Raises:
        LLEnergyError: An argument is out of bounds.
    """
    given = dict(locals())
    for name, least in {"count": 1, "input_tokens": 1, "seed": 0}.items():
        check_whole("synthetic", name, given[name], least)
    if output_tokens is not None:
        check_whole("synthetic", "output_tokens", output_tokens)
    for name in ("input_stdev", "output_stdev"):
        if not is_number(given[name]):
            raise LLEnergyError(f"synthetic: {name} is {shorten(given[name])}, needs a number, 0 or more")
    if not is_number(shared_prefix) or shared_prefix >= 1:
        raise LLEnergyError(
            f"synthetic: shared_prefix is {shorten(shared_prefix)}, needs 0 or more and less than 1"
        )
    if output_stdev and output_tokens is None:
        raise LLEnergyError("synthetic: output_stdev needs output_tokens, its mean")
    shared = round(shared_prefix * input_tokens)
    draw = random.Random(seed)

    def length(mean: int, stdev: float, least: int) -> int:
        return max(least, round(draw.gauss(mean, stdev)) if stdev else mean)

    common = ((f"{seed}/shared", shared),) if shared else ()
    requests = []
    for number in range(count):
        tokens = length(input_tokens, input_stdev, shared + 1)
        requests.append(
            Request(
                blocks=(*common, (f"{seed}/{number}", tokens - shared)),
                output_tokens=None if output_tokens is None else length(output_tokens, output_stdev, 1),
            )
        )
    defaults = synthetic.__kwdefaults__ or {}
    shown = {name: value for name, value in given.items() if name == "seed" or value != defaults.get(name)}
    return Requests(requests, f"synthetic({', '.join(f'{name}={value}' for name, value in shown.items())})")
