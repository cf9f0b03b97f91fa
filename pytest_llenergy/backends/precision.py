# SPDX-License-Identifier: Apache-2.0
"""Number types that a library executes with: their names in records, and what libraries print about them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

#: Names in records of the types of OpenVINO, ONNX and llama.cpp; torch's names are used as they are.
_NAMES = {
    **{"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"},
    **{"double": "float64", "float": "float32"},
    **{f"u{bits}": f"uint{bits}" for bits in (1, 2, 3, 4, 6, 8, 16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
}


def type_name(name: str) -> str:
    """Return the name of a type in records: ``float32`` for ``f32``, ``FLOAT``, ``torch.float32``."""
    name = name.lower().removeprefix("torch.")
    return _NAMES.get(name, name)


def list_types(parameters: Mapping[str, int]) -> str | None:
    """Return the types of at least 1 % of the parameters, counted by type, most frequent first."""
    least = 0.01 * sum(parameters.values())
    counted = Counter(parameters).most_common()
    return ", ".join(type_name(name) for name, count in counted if count and count >= least) or None


@contextmanager
def captured_log(stream: int, directory: str | None = None) -> Iterator[Path]:
    """Redirect standard output (1) or error (2) of this process to a file and yield its path.

    Libraries in C++ print there what they do not return. If the block raises, the text is printed after all.
    """
    python_stream = sys.stdout if stream == 1 else sys.stderr
    python_stream.flush()
    original = os.dup(stream)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        os.dup2(file.fileno(), stream)
        try:
            yield Path(file.name)
        except BaseException:
            os.dup2(original, stream)
            python_stream.write(Path(file.name).read_text(errors="replace"))
            python_stream.flush()
            raise
        finally:
            os.dup2(original, stream)
            os.close(original)
