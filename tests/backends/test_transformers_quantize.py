# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: by installed packages; others are refused with the install command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llenergy.backends.base import is_installed
from pytest_llenergy.backends.transformers.options import QUANTIZERS, LoadOptions, describe_quantization
from pytest_llenergy.errors import BackendError

from .loaded_ranks import PROMPTS, LoadedRanks

#: Two layers with seven matrices each; head and embedding are not quantised.
MATRICES = 14


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantised_layers_are_counted_in_the_record(name: str) -> None:
    package = QUANTIZERS[name]
    if not is_installed(package.module):
        pytest.skip(f"{package.name} is not installed; {package.install}")
    dtype = "float16" if name == "8bit" else "bfloat16"
    with LoadedRanks(dtype=dtype, quantization=name) as ranks:
        generation, _ = ranks.generate(PROMPTS)
        again, _ = ranks.generate(PROMPTS)
        options = ranks.info.options
    assert [len(ids) for ids in generation.token_ids] == [8, 8, 8]
    assert generation.token_ids == again.token_ids
    assert ranks.info.dtype == dtype
    assert (options["quantization"], options["quantized_layers"]) == (name, MATRICES)
    assert str(options["quantizer"]).startswith(f"{package.name} ")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_missing_quantizer_gives_the_install_command(name: str) -> None:
    package = QUANTIZERS[name]
    if is_installed(package.module):
        pytest.skip(f"{package.name} is installed")
    with pytest.raises(BackendError) as caught:
        LoadOptions.parse({"quantization": name, "dtype": "float16"}, on_cpu=True)
    assert str(caught.value) == (
        f"transformers: quantization {name!r} needs {package.name}, which is not installed; "
        f"pip install {package.name}"
    )


def test_a_model_without_quantised_layers_is_refused() -> None:
    class Linear:
        weight = 1.0

    plain: Any = SimpleNamespace(modules=lambda: [Linear()])
    with pytest.raises(BackendError, match="optimum-quanto quantised no layer of this model"):
        describe_quantization("int8", plain)


def test_bitsandbytes_8bit_needs_float16() -> None:
    """bitsandbytes casts to float16 itself, so the record would have another dtype."""
    if not is_installed("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed; pip install bitsandbytes")
    with pytest.raises(BackendError, match="multiplies in float16 whatever the dtype; give dtype='float16'"):
        LoadOptions.parse({"quantization": "8bit", "dtype": "float32"}, on_cpu=True)
