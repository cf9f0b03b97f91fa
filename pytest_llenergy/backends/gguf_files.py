# SPDX-License-Identifier: Apache-2.0
"""GGUF files: types of their weights, and copies with other types.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.convert import CACHE_FORMAT, build_cached, file_digest
from pytest_llenergy.backends.models import ModelSource, read_tensor_shapes
from pytest_llenergy.backends.precision import list_types
from pytest_llenergy.errors import BackendError, ModelError

#: GGUF's number types by their names in load options and records, for those that torch has too.
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

#: Names of tensor types by their numbers (``enum ggml_type``); removed ones have none.
_TYPE_NAMES = {
    **dict(enumerate(("float32", "float16", "q4_0", "q4_1"))),
    **dict(enumerate(("q5_0", "q5_1", "q8_0", "q8_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k"), 6)),
    **dict(enumerate(("iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s", "iq4_xs"), 16)),
    **dict(enumerate(("int8", "int16", "int32", "int64", "float64", "iq1_m", "bfloat16"), 24)),
    **{34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4"},
}


def describe_gguf_weights(path: Path) -> str | None:
    """Return the types of the tensors in a GGUF file, such as ``q4_1, q8_0``.

    Raises:
        ModelError: If the file is damaged.
    """
    parameters: Counter[str] = Counter()
    try:
        for kind, shape in read_tensor_shapes(path):
            parameters[_TYPE_NAMES.get(kind, f"type {kind}")] += math.prod(shape)
    except (OSError, ValueError, OverflowError, KeyError, struct.error) as error:
        raise ModelError(f"model {path.name}: a damaged GGUF file ({error})") from error
    return list_types(parameters)


def converted_gguf(backend: str, model: ModelSource, dtype: str) -> Path:
    """Return a copy of a GGUF file with its matrices as ``dtype``, made on first use.

    Quantised weights are widened and rounded to bfloat16, as those of the ``transformers`` backend are, so
    that all backends multiply the same numbers.

    Raises:
        BackendError: If ``dtype`` is unknown.
        ModelError: If the file cannot be converted.
    """
    file = Path(model.location)
    if dtype not in FLOATS:
        raise BackendError(
            f"{backend}: dtype is {dtype!r}, needs one of {', '.join(FLOATS)}; leave it out to run "
            f"{model.label} as it is ({describe_gguf_weights(file)})"
        )
    name = f"{file.stem}-{file_digest(file)[:16]}-{dtype}-v{CACHE_FORMAT}"
    return build_cached(name, lambda directory: _convert(file, directory, FLOATS[dtype])) / "model.gguf"


def _convert(file: Path, directory: Path, kind: str) -> None:
    try:
        import gguf
    except ImportError:
        raise ModelError(f"{file.name}: converting GGUF needs the module gguf; pip install gguf") from None
    try:
        reader: Any = gguf.GGUFReader(file)
        writer = gguf.GGUFWriter(directory / "model.gguf", reader.fields["general.architecture"].contents())
        _copy_metadata(reader, writer, gguf, kind)
        for tensor in reader.tensors:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            # Norms and biases stay float32, as llama.cpp's own converter leaves them.
            wanted = gguf.GGMLQuantizationType["F32" if len(tensor.shape) == 1 else kind]
            bfloat16 = gguf.GGMLQuantizationType.BF16
            rounded = gguf.quants.dequantize(gguf.quants.quantize(numbers, bfloat16), bfloat16)
            writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, wanted), raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except (ValueError, KeyError, IndexError, NotImplementedError, OverflowError) as error:
        raise ModelError(f"{file.name}: gguf cannot convert this file ({error})") from error


def _copy_metadata(reader: Any, writer: Any, gguf: Any, kind: str) -> None:
    for entry in reader.fields.values():
        if entry.name.startswith("GGUF.") or entry.name == "general.architecture":
            continue
        if entry.name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
            continue
        is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            entry.name, entry.contents(), entry.types[0], sub_type=entry.types[-1] if is_array else None
        )
