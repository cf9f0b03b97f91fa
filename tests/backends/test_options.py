# SPDX-License-Identifier: Apache-2.0
"""Load options: applied, or refused in one line by the library; what an adapter sets, it refuses itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends import llama_cpp, onnxruntime, openvino, transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.errors import BackendError, ModelError

from . import rank_functions
from .loaded_ranks import PROMPTS, TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]

#: The model of each backend, options, and a part of the message.
REFUSED: dict[str, tuple[BackendSpec, str | None, list[tuple[dict[str, Any], str]]]] = {
    "transformers": (
        transformers.SPEC,
        TINY,
        [
            (
                {"dtype": "float33"},
                "cannot load it with dtype='float33' (AttributeError: module 'torch'",
            ),
            ({"attn_implementation": "fast"}, 'attn_implementation="fast"` is not supported'),
            (
                {"num_hidden_layers": 9},
                "its files lack weights, or have them in another shape: 63 would be ran",
            ),
            ({"device_map": "auto"}, "the load option device_map is not available: the plugin sets it"),
            ({"output_loading_info": True}, "got multiple values for keyword argument 'output_loading_info'"),
            ({"hf_token": "x"}, "is not available: it is a secret, and options are recorded"),
        ],
    ),
    "llama-cpp": (
        llama_cpp.SPEC,
        None,
        [
            (
                {"n_ubach": 64},
                "with n_ubach=64 (AttributeError: 'xllamacpp.xllamacpp.CommonParams' object has no attr",
            ),
            (
                {"numa": "near"},
                "llama-cpp cannot load it with numa='near' (TypeError: an integer is required)",
            ),
            ({"n_ctx": 64}, "the load option n_ctx is not available: the plugin sets it"),
            ({"api_key": "x"}, "is not available: it is a secret"),
            ({"cache_prompt": True}, "the load option cache_prompt is not available: the plugin sets it"),
            ({"dtype": "int8"}, "dtype is 'int8', needs one of float32, float16, bfloat16"),
        ],
    ),
    "openvino": (
        openvino.SPEC,
        None,
        [
            ({"max_num_seqs": "many"}, "openvino cannot load it with max_num_seqs='many' (TypeError: "),
            (
                {"dtype": "float32", "KV_CACHE_PRECISION": "u8"},
                "the load option KV_CACHE_PRECISION is not available: the plugin sets it",
            ),
            ({"enable_prefix_caching": True}, "enable_prefix_caching is not available: the plugin sets it"),
            ({"INFERENCE_NUM_THREADS": 2}, "INFERENCE_NUM_THREADS is not available: the plugin sets it"),
            ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and it converts .gguf files to float32 only"),
        ],
    ),
    "onnxruntime": (
        onnxruntime.SPEC,
        TINY,
        [
            ({"enable_mem_patern": True}, "SessionOptions has no option enable_mem_patern"),
            ({"intra_op_num_threads": 2}, "not available: the plugin sets it"),
            ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and random:llama-tiny runs with weights float32"),
        ],
    ),
}


def needs(spec: BackendSpec) -> None:
    for module in spec.requires:
        pytest.importorskip(module)


#: Options, prompts, parameters, and a part of the message.
REFUSED_BATCHES: dict[str, list[tuple[dict[str, Any], list[str], dict[str, Any], str]]] = {
    "transformers": [
        ({}, ["a" * 4096], {"max_new_tokens": 2}, "4098 tokens; the model has room for 4096"),
        ({}, ["abc", ""], {}, "transformers: a prompt has no tokens"),
        ({"eos_token_id": 2}, ["a"], {}, "got multiple values for keyword argument 'eos_token_id'"),
        (
            {"no_repeat_ngram_size": 2, "watermarking_config": {"a": 1}},
            ["a"],
            {},
            "transformers cannot generate: ",
        ),
    ],
    "onnxruntime": [
        ({}, ["abc", ""], {}, "onnxruntime: a prompt has no tokens"),
        ({}, ["abc<pad>"], {}, "token 0 pads batches"),
        ({}, ["abc"], {"stop_token_ids": [0]}, "cannot be in one or end it"),
        ({}, ["abc"], {"max_new_tokens": 4096}, "are 4099 tokens; the model has room for 4096"),
    ],
    "llama-cpp": [
        ({}, ["abc", ""], {}, "llama-cpp: a prompt has no tokens"),
        ({}, ["abc"], {"stop_token_ids": [5]}, "stop_token_ids are not supported: its server stops at"),
        ({}, ["abc"], {"max_new_tokens": 9000}, "are 9001 tokens; the model has room for 8192"),
        ({}, ["abc"], {}, ""),
    ],
    "openvino": [
        ({}, ["abc", ""], {}, "openvino: a prompt has no tokens"),
        ({}, ["hello world", " a" * 8180], {"max_new_tokens": 12}, ""),
        (
            {},
            ["hello world", " a" * 8180],
            {"max_new_tokens": 13},
            "are 8193 tokens; the model has room for 8192",
        ),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_or_prepared_is_refused_in_one_line(name: str) -> None:
    """In ranks of transformers, whatever the backend: others have shared them already."""
    spec, model, cases = REFUSED[name]
    needs(spec)
    given = [options for options, _ in cases]
    batches = [case[:3] for case in REFUSED_BATCHES[name]]
    with LoadedRanks(dtype="float32") as ranks:
        (found,) = ranks.call(rank_functions.refusals, spec.factory, model, given)
        (refused,) = ranks.call(rank_functions.refused_batches, spec.factory, model, batches)
    for message, (options, part) in zip(found, cases, strict=True):
        assert part in str(message), options
        assert "\n" not in str(message), options
    for message, (*_, part) in zip(refused, REFUSED_BATCHES[name], strict=True):
        assert part in str(message or ""), part
        assert bool(part) is (message is not None)


class TestTransformers:
    def test_attributes_of_the_configuration_and_of_generation_are_passed_on(self) -> None:
        with LoadedRanks(dtype="float32") as ranks:
            plain, _ = ranks.generate(PROMPTS, max_new_tokens=16)
            ranks.load(dtype="float32", no_repeat_ngram_size=1, rms_norm_eps=1e-5)
            assert ranks.info.options["no_repeat_ngram_size"] == "1"
            generation, _ = ranks.generate(PROMPTS[:1], max_new_tokens=16)
            (ids,) = generation.token_ids
            assert len(set(ids)) == len(ids) == 16
            assert len(set(plain.token_ids[0])) < 16, "without the option tokens repeat"
            ranks.load(no_repeat_ngram_size="many")
            message = r"^transformers cannot generate: [^\n]*$"
            with pytest.raises(BackendError, match=message):
                ranks.generate(PROMPTS)

    def test_a_prompt_that_is_prefilled_in_chunks_gives_the_same_tokens(self) -> None:
        with LoadedRanks(dtype="float32") as ranks:
            expected, _ = ranks.generate(["abcdefghij" * 4])
            ranks.load(dtype="float32", prefill_chunk_size=16)
            assert ranks.info.options["prefill_chunk_size"] == "16"
            assert ranks.generate(["abcdefghij" * 4])[0].token_ids == expected.token_ids

    def test_a_model_whose_files_lack_weights_is_refused(self, tmp_path: Path) -> None:
        """transformers would make random ones."""
        whole = tmp_path / "whole"
        shutil.copytree(pretrained_path(resolve_model(TINY)), whole)
        config = json.loads((whole / "config.json").read_text())
        (whole / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        with pytest.raises(
            ModelError,
            match=r"^model whole: transformers cannot load it \(ValueError: its files[^\n]*: 9 w",
        ):
            LoadedRanks(model=str(whole))


class TestOthers:
    def test_llama_cpp_applies_and_reads_back(self) -> None:
        needs(llama_cpp.SPEC)
        options: dict[str, Any] = {
            "cache_type_k": "GGML_TYPE_Q8_0",
            "cache_type_v": "GGML_TYPE_Q8_0",
            "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
            "n_ubatch": 32,
        }
        with LoadedRanks(llama_cpp.SPEC, model=None, **options) as ranks:
            made, _ = ranks.generate(["one two three " * 50], max_new_tokens=3)
        assert made.output_tokens == 3
        info = ranks.info
        assert info.precision is not None
        assert info.precision.kv_cache == "q8_0"
        assert info.options["n_ubatch"] == "n_batch, 32 at most"

    @pytest.mark.slow
    def test_openvino_applies_and_reads_back(self) -> None:
        needs(openvino.SPEC)
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "max_num_batched_tokens": 32}
        options |= {"dynamic_split_fuse": True}
        options |= {"KEY_CACHE_PRECISION": "u8", "VALUE_CACHE_PRECISION": "u4"}
        with LoadedRanks(openvino.SPEC, model=None, **options) as ranks:
            made, _ = ranks.generate(["one two three " * 20], max_new_tokens=3)
            assert made.output_tokens == 3
            precision = ranks.info.precision
            assert precision is not None
            assert (precision.compute, precision.kv_cache) == ("float32", "uint8, uint4")
            assert ranks.info.options["max_num_batched_tokens"] == 32
            ranks.load(num_kv_blocks=1)
            message = r"^openvino cannot generate: Request 0 was dropped [^\n]*$"
            with pytest.raises(BackendError, match=message):
                ranks.generate(["one two three " * 20])

    def test_onnxruntime_applies_its_options(self) -> None:
        needs(onnxruntime.SPEC)
        with LoadedRanks(onnxruntime.SPEC, enable_mem_pattern=False, dtype="float32") as ranks:
            assert ranks.info.options["enable_mem_pattern"] == "False"
            assert ranks.info.precision is not None
            assert ranks.info.precision.weights == "float32"
