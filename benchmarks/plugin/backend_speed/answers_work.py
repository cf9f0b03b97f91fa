# SPDX-License-Identifier: Apache-2.0
"""The plugin's answers to each prompt. Its file name keeps it out of ``pytest benchmarks``.

``speed_run.py`` gives the file of the answers in the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from speed_setting import NEW_TOKENS, PROMPTS

from pytest_llenergy.api import BackendHandle, Energy


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_answer(energy: Energy, backend: BackendHandle, number: int) -> None:
    """Append token ids and text of one answer to the file."""
    run = energy(backend.generate, [PROMPTS[number]], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    answer = {"number": number, "ids": run.result.token_ids[0], "text": run.result.texts[0]}
    with Path(os.environ["BACKEND_SPEED_ANSWERS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(answer) + "\n")
