# SPDX-License-Identifier: Apache-2.0
"""How many positions a model has, of files that the module gguf writes and of what is no such file."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from pytest_llenergy.backends.models import ModelSource, read_max_positions, resolve_model


def test_context_length_of_the_default_model() -> None:
    assert read_max_positions(resolve_model(None)) == 8192


def written(file: Path, context: int | None) -> ModelSource:
    """Values of each kind are before the number that is looked for."""
    writer = gguf.GGUFWriter(str(file), "phi3")
    writer.add_description("é" * 70_000)
    writer.add_token_list([b"a", b"", "ß".encode()])
    writer.add_token_scores([0.5, 1.5])
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.size", 1 << 40)
    writer.add_float64("a.share", 0.5)
    # Of another part of the model.
    writer.add_uint32("clip.context_length", 77)
    if context is not None:
        writer.add_context_length(context)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource("gguf", str(file))


def test_values_of_every_kind_are_skipped(tmp_path: Path) -> None:
    assert read_max_positions(written(tmp_path / "a.gguf", 4096)) == 4096


def test_a_file_without_a_context_length_gives_none(tmp_path: Path) -> None:
    assert read_max_positions(written(tmp_path / "a.gguf", None)) is None


def test_a_truncated_file_gives_none(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "a.gguf", 4096).location).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 80), *range(len(whole) - 120, len(whole) - 40)]:
        cut.write_bytes(whole[:length])
        assert read_max_positions(ModelSource("gguf", str(cut))) is None


def test_a_damaged_length_gives_none(tmp_path: Path) -> None:
    whole = bytearray(Path(written(tmp_path / "a.gguf", 4096).location).read_bytes())
    # Of the first name.
    whole[24:32] = b"\xff" * 8
    (tmp_path / "a.gguf").write_bytes(whole)
    assert read_max_positions(ModelSource("gguf", str(tmp_path / "a.gguf"))) is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ('{"max_position_embeddings": 2048}', 2048),
        ("{}", None),
        ('{"max_position_embeddings": null}', None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_context_length_of_a_directory(tmp_path: Path, config: str | None, found: int | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert read_max_positions(ModelSource("directory", str(tmp_path))) == found
