# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers that conflict with a call or with each other, and compilation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from pytest_llenergy.errors import BackendError

from .loaded_ranks import LoadedRanks

#: Prepares a batch twice with two rounds each, without and with ``compile``; then lists child processes.
COMPILES = """
import json
import psutil
from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.transformers.backend import TransformersBackend
from pytest_llenergy.backends.transformers.compiling import count_compiled_graphs

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
    ("params", "prompts", "message"),
    [
        ({}, ["a", "b"], "assisted generate is only supported for batch_size = 1"),
        ({"cache": "static"}, ["a"], "assisted generate is not supported with Static cache"),
    ],
)
def test_what_the_library_refuses_late_is_one_line(
    params: dict[str, Any], prompts: list[str], message: str
) -> None:
    with (
        LoadedRanks(dtype="float32", prompt_lookup_num_tokens=3) as ranks,
        pytest.raises(
            BackendError,
            match=f"cannot generate with [^\n]*=3: {message}[^\n]*$",
        ),
    ):
        ranks.generate(prompts, **params)


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
