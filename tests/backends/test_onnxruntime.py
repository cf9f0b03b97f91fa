# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI in real ranks, on a random model that its own builder converts.

tests/conformance/test_builtin.py compares token counts with counts by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.onnxruntime import SPEC, OnnxRuntimeBackend, onnx_directory
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError, ModelError

from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

pytest.importorskip("onnxruntime_genai", reason=SPEC.install)


@pytest.fixture(scope="module")
def tiny() -> Iterator[LoadedRanks]:
    with LoadedRanks(SPEC) as ranks:
        yield ranks


@pytest.fixture
def converted(tiny: LoadedRanks, tmp_path: Path) -> Path:
    """A converted model directory, to be modified."""
    directory = tmp_path / "converted"
    shutil.copytree(onnx_directory(resolve_model(TINY), "fp32", tiny.info.version), directory)
    return directory


def change(directory: Path, **sections: dict[str, Any]) -> None:
    file = directory / "genai_config.json"
    actual = json.loads(file.read_text())
    for section, values in sections.items():
        actual[section].update(values)
    file.write_text(json.dumps(actual))


def in_process(model: str, **options: str) -> OnnxRuntimeBackend:
    backend = OnnxRuntimeBackend()
    backend.load(resolve_model(model), options, RankContext())
    return backend


class TestTokens:
    def test_a_batch_stops_when_all_sequences_have_ended(self, tiny: LoadedRanks) -> None:
        free, _ = tiny.generate(PROMPTS[:1])
        stop = free.token_ids[0][2]
        made, timeline = tiny.generate(
            PROMPTS[:1] * 2, max_new_tokens=3000, ignore_eos=False, stop_token_ids=[stop]
        )
        length = free.token_ids[0].index(stop) + 1
        assert [out for _, out in counts(made)] == [length] * 2
        assert len(timeline.requests[0].token_ns) == length


class TestModels:
    def test_the_loaded_model_is_described(self, tiny: LoadedRanks) -> None:
        assert (tiny.info.model, tiny.info.dtype) == (TINY, "float32")
        actual = {"precision": "fp32", "threads": 1, "device": "CPU", "padding_token": 0}
        assert actual.items() <= tiny.info.options.items()

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["int8", "int4"])
    def test_quantised_precisions_are_separate_models(self, tiny: LoadedRanks, precision: str) -> None:
        with LoadedRanks(SPEC, precision=precision) as small:
            assert (small.info.dtype, small.info.options["precision"]) == (precision, precision)
            made, _ = small.generate(PROMPTS, max_new_tokens=5)
        assert counts(made) == [(3, 5), (11, 5), (1, 5)]
        folders = [
            onnx_directory(resolve_model(TINY), each, tiny.info.version) for each in ("fp32", precision)
        ]
        whole, part = ((each / "model.onnx.data").stat().st_size for each in folders)
        assert part < whole / 2

    def test_a_converted_directory_is_read_without_its_sampling_defaults(
        self, tiny: LoadedRanks, converted: Path
    ) -> None:
        """The end of sequence is respected or ignored; sampling settings and penalties of the directory are
        not used.
        """
        free, _ = tiny.generate(PROMPTS)
        end = free.token_ids[0][2]
        change(
            converted,
            model={"eos_token_id": [end]},
            search={"repetition_penalty": 9.0, "do_sample": True, "temperature": 5.0, "num_beams": 2},
        )
        with LoadedRanks(SPEC, str(converted)) as ranks:
            assert (ranks.info.model, ranks.info.dtype) == ("converted", None)
            ignored, _ = ranks.generate(PROMPTS)
            heeded, _ = ranks.generate(PROMPTS, ignore_eos=False)
        assert ignored.token_ids == free.token_ids
        assert heeded.token_ids[0] == free.token_ids[0][: free.token_ids[0].index(end) + 1]

    def test_a_model_that_pads_with_its_end_token_gets_another_padding_token(
        self, tiny: LoadedRanks, converted: Path
    ) -> None:
        free, _ = tiny.generate(PROMPTS)
        end = free.token_ids[0][2]
        change(converted, model={"eos_token_id": end, "pad_token_id": end})
        backend = in_process(str(converted))
        job = backend.prepare(PROMPTS, GenerationParams(max_new_tokens=8, ignore_eos=True))
        assert job.search["min_length"] == 11 + 8
        assert int(job.inputs[2][-1]) == 258
        assert job.result(job.run()).token_ids == free.token_ids


class TestRefusals:
    def test_a_precision_for_a_converted_model_is_refused(self, converted: Path) -> None:
        with pytest.raises(BackendError, match="converted is already ONNX; leave out precision"):
            in_process(str(converted), precision="int4")

    @pytest.mark.parametrize("precision", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
    def test_a_converted_model_runs_in_the_dtype_asked_for_or_not_at_all(
        self, tiny: LoadedRanks, precision: str
    ) -> None:
        directory = str(onnx_directory(resolve_model(TINY), precision, tiny.info.version))
        if precision == "fp32":
            in_process(directory, dtype="float32")
            return
        with pytest.raises(BackendError, match=r"dtype is .float32., and .* runs with weights int4"):
            in_process(directory, dtype="float32")

    @pytest.mark.slow
    def test_a_model_that_cannot_be_converted_gives_a_one_line_error(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(
            ModelError, match=f"model {tmp_path.name}: .*builder cannot convert it to fp32"
        ) as caught:
            in_process(str(tmp_path))
        assert "\n" not in str(caught.value)

    def test_unequal_prompts_are_refused_for_a_model_with_position_ids(self, converted: Path) -> None:
        actual = json.loads((converted / "genai_config.json").read_text())["model"]["decoder"]
        actual["inputs"]["position_ids"] = "position_ids"
        change(converted, model={"decoder": actual})
        backend = in_process(str(converted))
        with pytest.raises(BackendError, match="this model takes position_ids"):
            backend.prepare(PROMPTS, GenerationParams())
