# SPDX-License-Identifier: Apache-2.0
"""GGUF files, read by the package gguf: what they say, and copies with other types."""

from __future__ import annotations

import struct
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.convert import build_cached, source_key
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.precision import list_types
from pytest_llenergy.errors import BackendError, ModelError

#: GGUF's number types by their names in load options and records, for those that torch has too.
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@lru_cache(maxsize=4)
def read_gguf(file: Path) -> Any:
    """Return the ``gguf.GGUFReader`` of a file, without its arrays: a vocabulary takes seconds to read."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data = memoryview(self.data)
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            end = orig_offs + 12
            if kind == gguf.GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
            else:
                end += count * self.gguf_scalar_to_np[kind]().itemsize
            return end - orig_offs, [], [], [raw_type]

    try:
        return Reader(file)
    except Exception as error:
        # A damaged file can make its reader raise anything.
        raise ModelError(f"model {file.name}: a damaged GGUF file ({error})") from error


def read_gguf_field(file: Path, name: str) -> Any:
    """Return a number or text of a file, such as ``context_length`` of its architecture; None without it."""
    fields = read_gguf(file).fields
    kind = fields["general.architecture"].contents() if "general.architecture" in fields else None
    field = fields.get(name, fields.get(f"{kind}.{name}"))
    return None if field is None else field.contents()


def describe_gguf_weights(file: Path) -> str | None:
    """Return the types of the tensors in a GGUF file, such as ``q4_1, q8_0``."""
    parameters: Counter[str] = Counter()
    for tensor in read_gguf(file).tensors:
        parameters[tensor.tensor_type.name.lower()] += int(tensor.n_elements)
    return list_types(parameters)


def converted_gguf(backend: str, model: ModelSource, dtype: str) -> Path:
    """Return a copy of a GGUF file with its matrices as ``dtype``, made on first use.

    Quantised weights are widened and rounded to bfloat16, as those of the ``transformers`` backend are, so
    that all backends multiply the same numbers.
    """
    file = Path(model.location)
    if dtype not in FLOATS:
        raise BackendError(
            f"{backend}: dtype is {dtype!r}, needs one of {', '.join(FLOATS)}; leave it out to run "
            f"{model.label} as it is ({describe_gguf_weights(file)})"
        )
    with translate_load_errors("gguf", model):
        name = f"{source_key(model)}-{dtype}"
        made = build_cached(name, lambda directory: _convert(file, directory, FLOATS[dtype]))
    return made / "model.gguf"


def _convert(file: Path, directory: Path, kind: str) -> None:
    import gguf

    reader: Any = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(directory / "model.gguf", reader.fields["general.architecture"].contents())
    for entry in reader.fields.values():
        if entry.name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        elif not entry.name.startswith("GGUF.") and entry.name != "general.architecture":
            is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
            sub_type = entry.types[-1] if is_array else None
            writer.add_key_value(entry.name, entry.contents(), entry.types[0], sub_type=sub_type)
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # Norms and biases stay float32, as llama.cpp's own converter leaves them.
        wanted = gguf.GGMLQuantizationType["F32" if len(tensor.shape) == 1 else kind]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(numbers, bfloat16), bfloat16)
        writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
