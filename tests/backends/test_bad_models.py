# SPDX-License-Identifier: Apache-2.0
"""Damaged models and invalid model names end in one line of error at once."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings

from pytest_llenergy.backends.flops import shape_from_source
from pytest_llenergy.backends.models import ModelSource, read_max_positions, resolve_model
from pytest_llenergy.errors import LLEnergyError, ModelError

from ..cli.bad_files import FUZZ, WHOLE, spoiled

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "sliding_window": None,
    }
).encode()

HEADER = struct.Struct("<4sIQQ")

#: Heads of GGUF files that claim more than any model has.
HEADS = {
    "zeros": b"",
    "many pairs": HEADER.pack(b"GGUF", 3, 2**40, 2**60),
    "many tensors": HEADER.pack(b"GGUF", 3, 2**40, 0),
    "many names": HEADER.pack(b"GGUF", 3, 1, 1)
    + struct.pack("<Q", 1)
    + b"a"
    + struct.pack("<IIQ", 9, 8, 2**60),
    "long array": HEADER.pack(b"GGUF", 3, 1, 2)
    + struct.pack("<Q", 1)
    + b"a"
    + struct.pack("<IIQ", 9, 0, 2**62),
}


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_damaged_configuration_is_one_line(tmp_path: Path, examples: int) -> None:
    model = ModelSource("directory", str(tmp_path))

    def read(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        read_max_positions(model)
        with suppress(LLEnergyError):
            shape_from_source(model)

    read(CONFIG)
    assert read_max_positions(model) == 128
    assert shape_from_source(model).layers == 2
    for content in WHOLE.values():
        read(content)
    settings(FUZZ, max_examples=examples)(given(spoiled(CONFIG))(read))()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("head", HEADS)
def test_a_huge_file_with_a_damaged_head_is_refused(tmp_path: Path, head: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADS[head])
    os.truncate(path, 10**11)
    model = ModelSource("gguf", str(path))
    assert read_max_positions(model) is None
    with pytest.raises(ModelError, match=r"model\.gguf: its GGUF metadata cannot be read"):
        shape_from_source(model)


@pytest.mark.parametrize(
    "name",
    [
        "x" * 300,
        f"/{'x' * 300}.gguf",
        "~no-such-user/model",
        f"~{'x' * 5000}",
        "a\0b",
        "\ud800",
        "x/" * 3000,
        "a\nb",
    ],
)
def test_a_name_that_is_none_is_one_line(name: str) -> None:
    with suppress(ModelError):
        assert resolve_model(name).kind == "hub"
        return
    with pytest.raises(ModelError) as raised:
        resolve_model(name)
    assert str(raised.value).startswith("model ")
    assert "\n" not in str(raised.value)
