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
from pytest_llenergy.model.record import Parallel

from .loaded_ranks import LoadedRanks

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
            {"attn_implementation": "fast"},
            "attn_implementation is 'fast', needs one of sdpa, eager, flash_attention_2, flash_attention_3, "
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
            {"prompt_lookup_num_tokens": 0},
            "prompt_lookup_num_tokens is 0, needs a whole number of 1 or more",
        ),
        ({"batching": "continuous", "num_blocks": True}, "num_blocks is True, needs a whole number of 1 or"),
        ({"assistant": 1}, "assistant is 1, needs a model's name, as for --energy-model"),
        (
            {"attn_implementation": "flash_attention_2"},
            "flash_attention_2 does not run on a CPU; use sdpa or eager",
        ),
        (
            {"attn_implementation": "flex_attention"},
            "flex_attention does not run on a CPU; use sdpa or eager",
        ),
        (
            {"compile": True, "batching": "continuous"},
            "compile and batching='continuous' cannot be combined; leave one out",
        ),
        (
            {"assistant": "m", "batching": "continuous"},
            "assisted generation takes one prompt at a time; leave out batching='continuous'",
        ),
        (
            {"assistant": "m", "compile": True},
            "assisted generation needs a growing cache, compile a static one; leave one out",
        ),
        (
            {"assistant": "m", "prompt_lookup_num_tokens": 3},
            "assistant and prompt_lookup_num_tokens both draft tokens; leave one out",
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
        ({"assistant": "m"}, "assistant"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ],
)
def test_options_of_one_device_are_refused_on_several(given: dict[str, Any], named: str, kind: str) -> None:
    options = LoadOptions(**given)
    with pytest.raises(BackendError) as caught:
        options.check_degrees(Parallel(**{kind: 2}))
    assert str(caught.value) == (f"transformers: {named} and {kind}=2 cannot be combined; leave one out")
    options.check_degrees(Parallel(data=2))


def test_missing_flash_attention_gives_the_install_command() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    with pytest.raises(BackendError) as caught:
        LoadOptions.parse({"attn_implementation": "flash_attention_2"}, on_cpu=False)
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
            {"prompt_lookup_num_tokens": 3},
            {},
            2,
            "assisted generation takes one prompt at a time, not 2; give one, or leave out assistant "
            "and prompt_lookup_num_tokens",
        ),
        (
            {"assistant": "m"},
            {"cache": "static"},
            1,
            "assisted generation needs a growing cache; leave out cache='static'",
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
    assert (options.continuous, options.assisted, options.compile) == (False, False, None)
    options.check(GenerationParams.parse({"cache": "static", "do_sample": True}), 8)
    options.check_embedding()


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
