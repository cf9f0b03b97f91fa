# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: the files of LLenergyMeasure's repository become tests that no backend refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends import registry, tensorrt_llm
from pytest_llenergy.backends.engine_options import CommonOptions
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.transformers import options as transformers_options
from pytest_llenergy.backends.vllm import options as vllm_options
from pytest_llenergy.study_import.case import KNOWN

from .studies import REPOSITORY, STUDIES, cases_of, convert

pytest.importorskip("yaml")
STAND_INS = REPOSITORY / "tests" / "backends" / "stand_ins"

VLLM_PYTHON = os.environ.get("LLENERGY_TEST_VLLM_PYTHON")

#: Cases of each file, counted by hand from its axes; those that differ only in the number of prompts of
#: transformers, or in an option that no backend has, are one case.
CASES = {
    "experiment-pytorch": 1,
    "experiment-tensorrt": 1,
    "experiment-vllm": 1,
    "study-cross-backend": 3 * 2,
    "study-docker-test": 2,
    "study-realistic": 2 * 3 * 3,
    # Two models, two precisions, two temperatures; vLLM with 50 or 100 prompts; and one listed experiment.
    "study-reference": 2 * 2 * 2 + 2 * 2 * 2 * 2 + 1,
    "study-tensorrt-quant-sweep": 1,
    "pytorch_example": 1,
    "sigint_study": 1,
}


@pytest.mark.parametrize("name", CASES)
def test_every_example_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(STUDIES / f"{name}.yaml", tmp_path) == 0
    (file,) = tmp_path.iterdir()
    source = file.read_text()
    assert len(cases_of(source)) == CASES[name]
    printed = capsys.readouterr()
    assert f"{CASES[name]} case" in printed.out
    notes = [line.partition(".yaml: ")[2] for line in printed.err.splitlines()]
    assert all(f"#   {note}" in source for note in notes)
    assert "prompts" in printed.err or "dataset" in printed.err


def test_what_is_carried_over(tmp_path: Path) -> None:
    for name in ("experiment-pytorch", "study-reference", "experiment-vllm", "pytorch_example"):
        convert(STUDIES / f"{name}.yaml", tmp_path)
    (first,) = cases_of((tmp_path / "test_experiment_pytorch.py").read_text())
    assert first == (
        "transformers",
        "meta-llama/Llama-3.2-1B",
        1,
        {"dtype": "bfloat16", "attention": "sdpa"},
        {"max_new_tokens": 128, "seed": 42, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "do_sample": True},
    )
    (vllm,) = cases_of((tmp_path / "test_experiment_vllm.py").read_text())
    assert vllm[2] == 100, "vLLM gets all prompts at once"
    assert vllm[3]["gpu_memory_utilization"] == 0.9
    listed = cases_of((tmp_path / "test_study_reference.py").read_text())[-1]
    assert listed == (
        "transformers",
        "meta-llama/Llama-3.2-1B",
        8,
        {"dtype": "float32", "attention": "flash_attention_2"},
        {"max_new_tokens": 128, "seed": 42},
    )
    parallel = (tmp_path / "test_pytorch_example.py").read_text()
    assert "marks=[pytest.mark.gpus(4), pytest.mark.parallel(data=4)]" in parallel
    assert cases_of(parallel)[0][2] == 4 * 8, "each of its processes has a batch of 8"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Return the cases of the largest example."""
    directory = tmp_path_factory.mktemp("whole")
    assert convert(STUDIES / "example-study-full.yaml", directory) == 0
    return cases_of((directory / "test_example_study_full.py").read_text())


def test_the_whole_suite_of_the_current_version(whole: list[tuple[Any, ...]]) -> None:
    """Axes by engine, groups whose variants are alternatives, and listed experiments."""
    assert {case[0] for case in whole} == {"transformers", "vllm", "tensorrt-llm"}
    assert {case[2] for case in whole if case[0] == "transformers"} == {1, 4, 8, 16, 32}
    assert {case[4].get("cache") for case in whole if case[0] == "transformers"} == {None, "static"}
    assert [case[3]["speculative"] for case in whole if "speculative" in case[3]] == [
        {"method": "prompt_lookup", "num_tokens": 3}
    ]
    assert {case[4].get("num_beams") for case in whole} == {None, 4}, "beams are no option of loading"
    assert {case[3].get("quantization") for case in whole} == {None, "8bit", "nf4"}
    assert {case[3].get("compile") for case in whole} == {
        *(None, "default", "reduce-overhead", "max-autotune")
    }
    for option in ("enforce_eager", "chunked_prefill", "prefix_cache"):
        assert {case[3].get(option) for case in whole if case[0] == "vllm"} == {None, True, False}
    assert {case[3].get("free_gpu_memory_fraction") for case in whole} == {None, 0.9, 0.85}
    assert {case[3].get("attention") for case in whole if case[0] == "vllm"} == {
        *(None, "FLASH_ATTN", "FLASHINFER")
    }


@pytest.fixture
def examples(whole: list[tuple[Any, ...]], tmp_path: Path) -> list[tuple[Any, ...]]:
    """Return the cases of all examples, those that differ in model or prompts alone once."""
    found = list(whole)
    for name in CASES:
        convert(STUDIES / f"{name}.yaml", tmp_path)
    for file in tmp_path.iterdir():
        found += cases_of(file.read_text())
    distinct = {repr((case[0], case[0] == "transformers" and case[2], *case[3:5])): case for case in found}
    return list(distinct.values())


def distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({repr(each): each for each in values}.values())


def test_no_backend_refuses_a_case_of_an_example(
    examples: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checks that loading makes. Packages such as flash attention count as installed."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    from pytest_llenergy.backends.transformers.library_options import sort_library_options

    monkeypatch.setattr(transformers_options, "is_installed", lambda module: True)
    monkeypatch.syspath_prepend(STAND_INS)
    parse = transformers_options.LoadOptions.parse
    passed: list[dict[str, Any]] = []
    for name, spec in registry.load_backends().items():
        cases = [case for case in examples if case[0] == name]
        for params in distinct(case[4] for case in cases):
            spec.capabilities.refuse_params(name, GenerationParams.parse(params))
        for options in distinct(case[3] for case in cases):
            assert spec.capabilities.unknown_options(options) == []
            if name == "transformers":
                passed.append(transformers_options.LoadOptions.not_ours(options))
            elif name == "vllm":
                assert set(vllm_options.parse_options(options, on_cpu=False)[1]) <= set(KNOWN["vllm"])
            else:
                tensorrt_llm._engine_keywords(CommonOptions.parse(name, options), options)
        if name == "transformers":
            for _, _, batch, options, params, *_ in cases:
                parse(options, on_cpu=False).check(GenerationParams.parse(params), batch)
    for options in distinct(passed):
        sort_library_options(options, LlamaConfig())
    for module in [each for each in sys.modules if each.partition(".")[0] in ("tensorrt_llm", "words")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.skipif(not VLLM_PYTHON, reason="LLENERGY_TEST_VLLM_PYTHON names no Python with vLLM")
def test_vllm_itself_takes_the_options_of_the_examples(examples: list[tuple[Any, ...]]) -> None:
    options = distinct(case[3] for case in examples if case[0] == "vllm")
    options += [{name: None} for name in KNOWN["vllm"]]
    code = (
        "import json, sys\n"
        "from pytest_llenergy.backends.vllm.options import engine_keywords, parse_options\n"
        "for options in json.load(sys.stdin):\n"
        "    engine_keywords(*parse_options(options, on_cpu=False), on_cpu=False)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [str(VLLM_PYTHON), "-c", code], input=json.dumps(options), text=True, env=environment, check=True
    )


def test_known_options_of_transformers_are_its_own() -> None:
    pytest.importorskip("transformers")
    from transformers import PretrainedConfig

    from pytest_llenergy.backends.transformers.library_options import sort_library_options

    sort_library_options(dict.fromkeys(KNOWN["transformers"]), PretrainedConfig())
