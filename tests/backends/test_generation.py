# SPDX-License-Identifier: Apache-2.0
"""Tokens and phases of transformers and OpenVINO, beyond the conformance suite.

tests/conformance/test_builtin.py compares token counts with counts by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends import openvino
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import ModelError

from .loaded_ranks import ASKED, PROMPTS, SMOLLM_CHAT, TINY, TRAFFIC, LoadedRanks, counts

Read = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def smollm() -> Iterator[LoadedRanks]:
    with LoadedRanks(openvino.SPEC, model=None) as ranks:
        yield ranks


class TestTransformers:
    def test_ignore_eos_ignores_the_models_default_end(self, tiny: LoadedRanks, tmp_path: Path) -> None:
        """generate() takes a missing end token from the model's defaults, and pads silently."""
        free, _ = tiny.generate(PROMPTS)
        end = free.token_ids[0][2]
        model = tmp_path / "ends-soon"
        shutil.copytree(pretrained_path(resolve_model(TINY)), model)
        defaults = model / "generation_config.json"
        defaults.write_text(
            json.dumps({**json.loads(defaults.read_text()), "eos_token_id": end, "repetition_penalty": 9.0})
        )
        with LoadedRanks(model=str(model), dtype="float32") as ranks:
            ignored, _ = ranks.generate(PROMPTS)
            heeded, _ = ranks.generate(PROMPTS, ignore_eos=False)
        assert ignored.token_ids == free.token_ids
        assert heeded.token_ids[0] == free.token_ids[0][: free.token_ids[0].index(end) + 1]

    def test_prompts_have_the_tokens_that_were_asked_for(self, tiny: LoadedRanks) -> None:
        assert counts(tiny.generate(TRAFFIC, max_new_tokens=3)[0]) == ASKED

    def test_each_iteration_of_a_round_counts_its_tokens(self, tiny: LoadedRanks) -> None:
        workload = tiny.prepare(PROMPTS, GenerationParams(max_new_tokens=5, ignore_eos=True))
        workload.prepare_round()
        workload.work(3)
        timeline = workload.timeline()
        assert timeline.iterations == len(timeline.borders_ns) == 3
        assert [request.output_tokens for request in timeline.requests] == [5] * 9
        assert [request.input_tokens for request in timeline.requests] == [3, 11, 1] * 3
        assert Generation.merge(workload.results()).output_tokens == 15

    def test_a_directory_without_a_model_gives_a_one_line_error(self, tmp_path: Any) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelError, match=f"model {tmp_path.name}: ") as caught:
            LoadedRanks(model=str(tmp_path))
        assert "\n" not in str(caught.value)


class TestOpenVino:
    def test_the_end_of_sequence_is_respected_or_ignored(self, smollm: LoadedRanks) -> None:
        """The chat model answers in a few tokens; with ignore_eos it says the same first."""
        heeded, _ = smollm.generate([SMOLLM_CHAT], max_new_tokens=30, ignore_eos=False)
        ignored, _ = smollm.generate([SMOLLM_CHAT], max_new_tokens=30)
        ids = heeded.token_ids[0]
        assert len(ids) < 30
        assert ids[-1] == 2
        assert "Paris" in heeded.texts[0]
        assert counts(ignored)[0][1] == 30
        assert ignored.token_ids[0][: len(ids)] == ids
        third = ids[2]
        stopped, _ = smollm.generate([SMOLLM_CHAT], max_new_tokens=30, stop_token_ids=[third])
        assert stopped.token_ids[0] == ids[: ids.index(third) + 1]

    def test_prompts_have_the_tokens_that_were_asked_for(self, smollm: LoadedRanks) -> None:
        assert counts(smollm.generate(TRAFFIC, max_new_tokens=3)[0]) == ASKED
