# SPDX-License-Identifier: Apache-2.0
"""Synthetic prompts in every backend: its own counts of a round are what was asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.backends import llama_cpp, onnxruntime, openvino, transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.traffic import synthetic
from pytest_llenergy.record.record import Parallel

from .loaded_ranks import TINY, LoadedRanks, counts

Read = Callable[..., dict[str, Any]]

TRAFFIC = synthetic(count=4, input_tokens=70, input_stdev=20, shared_prefix=0.5)
ASKED = [(request.input_tokens, 3) for request in TRAFFIC]


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        # Byte by byte, and the tokenizer of SmolLM2 in four implementations.
        (transformers.SPEC, TINY),
        (transformers.SPEC, None),
        (openvino.SPEC, None),
        (llama_cpp.SPEC, None),
        (onnxruntime.SPEC, TINY),
    ],
    ids=["transformers-bytes", "transformers", "openvino", "llama-cpp", "onnxruntime-bytes"],
)
def test_a_backend_counts_the_tokens_that_were_asked_for(spec: BackendSpec, model: str | None) -> None:
    missing = [each for each in spec.requires if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"no module {', '.join(missing)}: {spec.install}")
    with LoadedRanks(spec, model=model) as ranks:
        made, _ = ranks.generate(TRAFFIC, max_new_tokens=3)
    assert counts(made) == ASKED
    assert len(set(ASKED)) == 4


def test_data_parallel_ranks_split_the_requests() -> None:
    pytest.importorskip("torch")
    with LoadedRanks(degrees=Parallel(data=2)) as ranks:
        made, _ = ranks.generate(TRAFFIC[:3], max_new_tokens=3)
    assert counts(made) == ASKED[:3]


def test_a_batch_and_a_text_embedding_take_requests(quick: pytest.Pytester, read_report: Read) -> None:
    pytest.importorskip("transformers")
    quick.makepyfile(
        """
        import pytest
        from pytest_llenergy.backends.traffic import synthetic
        REQUESTS = synthetic(count=3, input_tokens=20, output_tokens=2)
        def test_generate(energy, backend):
            energy(backend.generate, REQUESTS, ignore_eos=True)
        def test_embed(energy, backend):
            energy(backend.embed, REQUESTS)
        def test_text(energy, backend):
            energy(backend.generate, ["a" * 20] * 3, max_new_tokens=2, ignore_eos=True)
        """
    )
    quick.runpytest(
        "--energy-report", "--energy-backend=transformers", "--energy-model=random:llama-tiny"
    ).assert_outcomes(passed=3)
    batch, embedded, text = read_report()["records"]
    assert batch["rounds"][0]["tokens"] == {"input": 60, "output": 6} == text["rounds"][0]["tokens"]
    assert embedded["rounds"][0]["tokens"]["input"] == 60
    recorded = batch["backend"]["generation"]
    assert recorded["requests"] == "synthetic(count=3, input_tokens=20, output_tokens=2, seed=0)"
    assert recorded["max_new_tokens"] == 2
    assert batch["backend"]["prompts_digest"] != text["backend"]["prompts_digest"]
