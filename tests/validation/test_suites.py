# SPDX-License-Identifier: Apache-2.0
"""Suites that the parts pass to pytest, and the backend with random weights."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams

from .conftest import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from validation import suite_plugin  # noqa: E402
from validation.random_weights import SIZES, RandomWeightsBackend, write_model  # noqa: E402
from validation.session import SUITE, pytest_command  # noqa: E402

CPU_CELLS = 2
QUIETLY = ("--collect-only", "-q", "--energy-backend=transformers")


def pytest_run(*options: str, suite: str, **variables: str) -> str:
    """Run a suite as a part does; returns pytest's output."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "LLENERGY_VALIDATION_DRY": "1", **variables}
    command = pytest_command(suite, *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given, cwd=ROOT)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_suites_are_collected_only_by_path() -> None:
    suites = sorted(path.stem for path in SUITE.glob("suite_*.py"))
    command = [
        *pytest_command("", *QUIETLY)[:-1],
        *(str(SUITE / f"{one}.py") for one in suites),
    ]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "LLENERGY_VALIDATION_DRY": "1"}
    given["LLENERGY_VALIDATION_MODELS"] = "nowhere"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given, cwd=ROOT)
    for one in suites:
        assert f"{one}.py" in done.stdout, done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    # ``pytest benchmarks`` would collect such files too.
    assert not list(SUITE.parent.rglob("test_*.py"))


@pytest.mark.slow
def test_tests_are_skipped_after_the_deadline(tmp_path: Path) -> None:
    output = pytest_run(
        "--energy-backend=transformers",
        suite="suite_inference",
        LLENERGY_VALIDATION_MODELS=str(tmp_path),
        LLENERGY_VALIDATION_UNTIL=str(time.monotonic() + 1),
    )
    assert f"{CPU_CELLS} skipped" in output
    assert "out of time" in output


def test_cuda_is_not_initialised_in_pytest() -> None:
    state = suite_plugin.cuda_state()
    assert not state["uvm"]
    assert state["torch"] is False
    if state["driver"] is not None:
        assert state["driver"] == suite_plugin.NOT_INITIALIZED


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    """Return a model directory without weights."""
    write_model("tiny", tmp_path / "tiny")
    assert not list((tmp_path / "tiny").glob("*.safetensors"))
    return ModelSource("directory", str(tmp_path / "tiny"))


def made(model: ModelSource, **options: Any) -> tuple[RandomWeightsBackend, Any]:
    """Load the model on the CPU."""
    backend = RandomWeightsBackend()
    return backend, backend.load(model, {"dtype": "bfloat16", **options}, RankContext())


def test_random_weights_are_reproducible_and_recorded(model: ModelSource) -> None:
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained
    backend, info = made(model, attn_implementation="eager")
    assert info.options["weights"] == "drawn at random"
    assert info.options["attn_implementation"] == "eager"
    assert info.dtype == "bfloat16"
    hidden = SIZES["tiny"][0]
    assert info.options["parameters"] > 2 * 32000 * hidden
    again, _ = made(model)
    pairs = zip(backend._model.parameters(), again._model.parameters(), strict=True)
    assert all(bool(torch.equal(one, other)) for one, other in pairs)
    assert AutoModelForCausalLM.from_pretrained == before


def test_requested_number_of_tokens_is_generated(model: ModelSource) -> None:
    backend, _ = made(model)
    params = GenerationParams(max_new_tokens=5, ignore_eos=True)
    job = backend.prepare(["joule joule", "jou"], params)
    result: Any = job.result(job.run())
    assert [len(ids) for ids in result.token_ids] == [5, 5]
    backend.close()


def test_decoder_repeats_the_same_step() -> None:
    from validation.decoder import Decoder

    decoder = Decoder("cpu")
    with torch.inference_mode():
        first, second = decoder._step(), decoder._step()
    assert bool(torch.isfinite(first).all())
    assert bool(torch.equal(first, second))
    decoder.run(2)
