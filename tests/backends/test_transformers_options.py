# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers: invalid ones are refused in one line, valid ones are recorded."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.backends.transformers.options import LoadOptions
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Parallel

from .loaded_ranks import LoadedRanks

DRAFTED = {"model": "m", "num_tokens": 3}
LOOKED_UP = {"method": "prompt_lookup", "num_tokens": 3}

#: Prepares a batch twice with two rounds each, without and with ``compile``; then lists child processes.
COMPILES = """
import json
import psutil
from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.transformers.backend import TransformersBackend
from pytest_llenergy.backends.transformers.options import count_compiled_graphs

def tell(options):
    backend = TransformersBackend()
    info = backend.load(resolve_model("random:llama-tiny"), {"dtype": "float32", **options}, RankContext())
    actual = {"tokens": [], "graphs": [], "options": {}}
    actual["options"] = {name: value for name, value in info.options.items() if "compile" in name}
    params = GenerationParams(max_new_tokens=6, ignore_eos=True, cache="static")
    for _ in range(2):
        job = backend.prepare(["abc", "hello world"], params)
        prepared = count_compiled_graphs()
        actual["tokens"] += [job.result(job.run()).token_ids for _ in range(2)]
        actual["graphs"].append([prepared, count_compiled_graphs()])
    backend.close()
    return actual

actual = {"eager": tell({}), "compiled": tell({"compile": "default"})}
actual["children"] = [child.name() for child in psutil.Process().children()]
print(json.dumps(actual))
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', needs one of auto, float32, bfloat16, float16"),
        (
            {"attention": "fast"},
            "attention is 'fast', needs one of sdpa, eager, flash_attention_2, flash_attention_3, "
            "flex_attention",
        ),
        (
            {"compile": "fast"},
            "compile is 'fast', needs one of default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs",
        ),
        ({"batching": "paged"}, "batching is 'paged', needs one of static, continuous"),
        (
            {"quantization": "int2"},
            "quantization is 'int2', needs one of int8wo, int8dyn, int8, 8bit, nf4",
        ),
        (
            {"speculative": {"method": "prompt_lookup", "num_tokens": 0}},
            "speculative is {'method': 'prompt_lookup', 'num_tokens': 0}, needs a dict with num_tokens, and "
            "model or method; max_ngram for prompt_lookup (Expected `int` >= 1 at speculative.num_tokens)",
        ),
        ({"speculative": {"num_tokens": 3}}, "speculative needs model, the name of the model that drafts"),
        ({"speculative": {"num_tokens": 3, "method": "mtp"}}, "speculative: transformers does not draft by"),
        ({"chunked_prefill": True}, "chunked_prefill is True, needs False or the tokens of a step"),
        ({"prefix_cache": True}, "prefix_cache=True: transformers computes each prompt anew"),
        ({"lora": "/nowhere"}, "lora is '/nowhere', which is no directory with adapter_config.json"),
        ({"batching": "continuous", "num_blocks": True}, "num_blocks is True, needs a whole number of 1 or"),
        ({"speculative": "m"}, "speculative is 'm', needs a dict with num_tokens, and model or"),
        (
            {"attention": "flash_attention_2"},
            "flash_attention_2 does not run on a CPU; use sdpa or eager",
        ),
        (
            {"attention": "flex_attention"},
            "flex_attention does not run on a CPU; use sdpa or eager",
        ),
        (
            {"compile": True, "batching": "continuous"},
            "compile and batching='continuous' cannot be combined; leave one out",
        ),
        (
            {"speculative": DRAFTED, "batching": "continuous"},
            "speculative decoding takes one prompt at a time; leave out batching='continuous'",
        ),
        (
            {"speculative": DRAFTED, "compile": True},
            "speculative needs a growing cache, compile a static one; leave one out",
        ),
        (
            {"speculative": {"model": "m", "method": "prompt_lookup", "num_tokens": 3}},
            "speculative: prompt_lookup has no model; leave it out",
        ),
        ({"num_blocks": 4}, "num_blocks is an option of batching='continuous'; leave it out"),
    ],
)
def test_invalid_options_give_a_one_line_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        LoadOptions.parse(given, on_cpu=True)
    assert str(caught.value).startswith(f"transformers: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["tensor", "placement"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"compile": True}, "compile"),
        ({"batching": "continuous"}, "batching='continuous'"),
        ({"speculative": LOOKED_UP}, "speculative"),
    ],
)
def test_options_of_one_device_are_refused_on_several(given: dict[str, Any], named: str, kind: str) -> None:
    options = LoadOptions.parse(given, on_cpu=True)
    with pytest.raises(BackendError) as caught:
        options.check_degrees(Parallel(**{kind: 2}))
    assert str(caught.value) == (f"transformers: {named} and {kind}=2 cannot be combined; leave one out")
    options.check_degrees(Parallel(data=2))


def test_missing_flash_attention_gives_the_install_command() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    with pytest.raises(BackendError) as caught:
        LoadOptions.parse({"attention": "flash_attention_2"}, on_cpu=False)
    assert str(caught.value) == (
        "transformers: flash_attention_2 needs the module flash_attn, which is not installed; "
        "pip install flash-attn --no-build-isolation"
    )


@pytest.mark.parametrize(
    ("given", "params", "batch", "message"),
    [
        ({"compile": True}, {}, 1, "compile needs cache='static', whose shapes do not change"),
        (
            {"batching": "continuous"},
            {"cache": "static"},
            1,
            "batching='continuous' has its own paged cache; leave out cache='static'",
        ),
        (
            {"batching": "continuous"},
            {"do_sample": True},
            1,
            "batching='continuous' samples in the order in which requests are scheduled",
        ),
        (
            {"speculative": LOOKED_UP},
            {},
            2,
            "speculative takes one prompt at a time, not 2; give one, or leave out speculative",
        ),
        (
            {"speculative": DRAFTED},
            {"cache": "static"},
            1,
            "speculative needs a growing cache; leave out cache='static'",
        ),
    ],
)
def test_calls_that_conflict_with_the_options_are_refused(
    given: dict[str, Any], params: dict[str, Any], batch: int, message: str
) -> None:
    options = LoadOptions.parse(given, on_cpu=True)
    with pytest.raises(BackendError) as caught:
        options.check(GenerationParams.parse(params), batch)
    assert str(caught.value).startswith(f"transformers: {message}")


def test_without_options_nothing_is_refused() -> None:
    options = LoadOptions.parse({}, on_cpu=True)
    assert (options.continuous, options.speculative, options.compile) == (False, None, None)
    options.check(GenerationParams.parse({"cache": "static", "do_sample": True}), 8)
    options.check_embedding([])


def test_capabilities_name_every_option() -> None:
    assert set(LoadOptions.__dataclass_fields__) <= set(SPEC.capabilities.options)


def test_the_recorded_dtype_is_that_of_the_weights() -> None:
    with LoadedRanks(dtype="bfloat16") as ranks:
        assert (ranks.info.dtype, ranks.info.options["dtype"]) == ("bfloat16", "bfloat16")
        ranks.load(dtype="auto")
        # The dtype in which the weights were saved.
        assert (ranks.info.dtype, ranks.info.options["dtype"]) == ("bfloat16", "auto")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_steps_give_the_same_tokens_and_compile_before_the_window() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    eager, compiled = actual["eager"], actual["compiled"]
    assert compiled["tokens"] == eager["tokens"]
    assert eager["graphs"] == [[0, 0], [0, 0]]
    # Number of graphs after preparing, and after two rounds.
    (first, first_after), (second, second_after) = compiled["graphs"]
    assert 0 < first == first_after < second == second_after
    assert compiled["options"] == {"compile": "default", "compiled": "decoding steps"}
    assert actual["children"] == []
