# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: the files of LLenergyMeasure's repository become tests that run.

``llenergymeasure/`` holds its eight example files, an example of its first layout, and two files of version
0.9, under its licence.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main

pytest.importorskip("yaml")
STUDIES = Path(__file__).with_name("llenergymeasure")

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


def convert(file: Path, output: Path, *options: str) -> int:
    return main(["import", str(file), "-o", str(output), *options])


def cases_of(source: str) -> list[tuple[Any, ...]]:
    """Return the values of each case of a test file."""
    (assigned,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    ]
    assert isinstance(assigned, ast.List)
    rows = [each.args if isinstance(each, ast.Call) else getattr(each, "elts", []) for each in assigned.elts]
    return [tuple(ast.literal_eval(part) for part in row) for row in rows]


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
        {"dtype": "bfloat16", "attn_implementation": "sdpa", "trust_remote_code": True},
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
        {"dtype": "float32", "attn_implementation": "flash_attention_2"},
        {"max_new_tokens": 128, "seed": 42},
    )
    parallel = (tmp_path / "test_pytorch_example.py").read_text()
    assert "marks=[pytest.mark.gpus(4), pytest.mark.parallel(data=4)]" in parallel
    assert cases_of(parallel)[0][2] == 4 * 8, "each of its processes has a batch of 8"


def test_the_whole_suite_of_the_current_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Axes by engine, groups whose variants are alternatives, and listed experiments."""
    assert convert(STUDIES / "example-study-full.yaml", tmp_path) == 0
    cases = cases_of((tmp_path / "test_example_study_full.py").read_text())
    assert {case[0] for case in cases} == {"transformers", "vllm", "tensorrt-llm"}
    assert {case[2] for case in cases if case[0] == "transformers"} == {1, 4, 8, 16, 32}
    assert {case[4].get("cache") for case in cases if case[0] == "transformers"} == {None, "static"}
    assert {case[3].get("prompt_lookup_num_tokens") for case in cases} == {None, 3}
    assert {case[4].get("num_beams") for case in cases} == {None, 4}, "beams are no option of loading"
    assert not any("length_penalty" in case[3] or "num_beams" in case[3] for case in cases)
    errors = capsys.readouterr().err
    assert (
        'transformers.cache_implementation = "offloaded_static" | "sliding_window": transformers has no'
        in errors
    )


def test_a_converted_file_runs(quick: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """With a random model on the CPU: loaded, generated and measured as the study says."""
    pytest.importorskip("transformers")
    study = quick.path / "small.yaml"
    study.write_text(
        "name: small\nmodel: random:llama-tiny\nbackend: pytorch\nprecision: fp32\n"
        "n: 20\nmax_output_tokens: 5\n"
        "decoder: {preset: deterministic}\n"
        "sweep:\n  pytorch.batch_size: [1, 3]\n"
    )
    assert convert(study, quick.path, "--fallback=cpu") == 0
    capsys.readouterr()
    result = quick.runpytest("test_small.py", "--energy-backend=transformers", "--energy-report")
    result.assert_outcomes(passed=2)
    records = json.loads((quick.path / "energy.json").read_text())["records"]
    assert {record["backend"]["dtype"] for record in records} == {"float32"}
    assert [record["params"]["batch_size"] for record in records] == [1, 3]
    each = [record["rounds"][0] for record in records]
    assert [round_["requests"] / round_["iterations"] for round_ in each] == [1, 3]
    assert {record["backend"]["generation"]["max_new_tokens"] for record in records} == {5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n", "is no study of LLenergyMeasure: needs keys such as model and engine"),
        ("a: [", "is no YAML: while parsing"),
        ("model: m\nbackend: ollama\n", 'converted: engine = "ollama": no backend here'),
        ("name: x\n", "converted: model = null: an experiment needs one"),
        ("model: m\npytorch: {batch_size: many}\n", 'converted: batch_size = "many": needs a whole number'),
        ("model: m\nsweep: [1]\n", "sweep needs lists by key, and experiments a list of mappings"),
        (
            '{"total_energy_j": 1.0}',
            "is a result of LLenergyMeasure: one total without",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.yaml").write_text(content)
    assert convert(tmp_path / "study.yaml", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_sigint_study.py"
    file.write_text("mine")
    assert convert(STUDIES / "sigint_study.yaml", tmp_path) == 2
    assert file.read_text() == "mine"
    assert "test_sigint_study.py exists; remove it, or choose another" in capsys.readouterr().err


def test_the_directory_is_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(STUDIES / "sigint_study.yaml", tmp_path / "new" / "tests") == 0
    assert (tmp_path / "new" / "tests" / "test_sigint_study.py").exists()
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert convert(STUDIES / "sigint_study.yaml", tmp_path / "file" / "tests") == 2
    assert capsys.readouterr().err.endswith("tests: the directory cannot be created (Not a directory)\n")


def test_tests_are_named_by_what_differs(quick: pytest.Pytester) -> None:
    study = quick.path / "small.yaml"
    study.write_text(
        "model: gpt2\nbackend: pytorch\nmax_output_tokens: 5\n"
        "sweep:\n  pytorch.batch_size: [1, 3]\n  dtype: [fp32, bf16]\n"
    )
    assert convert(study, quick.path) == 0
    result = quick.runpytest("test_small.py", "--collect-only", "-q", "--energy-backend=transformers")
    for batch_size in (1, 3):
        for dtype in ("float32", "bfloat16"):
            result.stdout.fnmatch_lines(
                [f"test_small.py::test_study[[]*batch_size={batch_size}-dtype={dtype}]"]
            )
    assert "options0" not in result.stdout.str()


def test_names_differ_whatever_the_values_are(tmp_path: Path) -> None:
    long = "x" * 60
    study = tmp_path / "s.yaml"
    study.write_text(
        f"model: a/m\nbackend: vllm\nsweep:\n  vllm.quantization: [{long}1, {long}2, 'ä/b', 'ö/b']\n"
    )
    assert convert(study, tmp_path) == 0
    source = (tmp_path / "test_s.py").read_text()
    names = [line.partition("id='")[2].partition("'")[0] for line in source.splitlines() if "id='" in line]
    assert len(set(names)) == 4
    assert all(name.isascii() and "/" not in name for name in names)


def test_a_warning_of_many_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "s.yaml"
    study.write_text(f"model: m\nbackend: vllm\nsweep:\n  random_seed: {list(range(501))}\n")
    assert convert(study, tmp_path) == 0
    assert "warning: s.yaml makes 501 tests, each measured by itself" in capsys.readouterr().err


def test_reasons_say_what_replaces_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "s.yaml"
    study.write_text(
        "model: m\nstudy_execution:\n  experiment_timeout_seconds: 600\n  max_consecutive_failures: 3\n"
        "  cycle_gap_seconds: 9\n  experiment_order: shuffle\n  skip_preflight: true\n"
    )
    assert convert(study, tmp_path) == 0
    errors = capsys.readouterr().err
    for line in (
        "experiment_timeout_seconds = 600, study_execution.max_consecutive_failures = 3: pytest's own "
        "options: --energy-timeout, --maxfail",
        "cycle_gap_seconds = 9: quiet gaps around each round (--energy-gap)",
        'experiment_order = "shuffle": tests run in file order',
        "skip_preflight = true: no counterpart",
    ):
        assert f"study_execution.{line}\n" in errors
