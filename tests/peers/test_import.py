# SPDX-License-Identifier: Apache-2.0
"""``llenergy import`` writes tests that run and pass a linter, and names what it leaves out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.errors import ExperimentError
from pytest_llenergy.peers.conversion import converted
from pytest_llenergy.peers.keys import Case
from pytest_llenergy.peers.pytest_file import code
from pytest_llenergy.peers.study import flat, read_study

from .studies import STUDIES, TASK

Read = Callable[..., dict[str, Any]]


@pytest.fixture
def study(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "study.yaml"
        file.write_text(text)
        return file

    return write


def only(file: Path) -> Case:
    (case,) = converted(file).cases
    return case


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_written_has_as_many_cases_and_passes_a_linter(
    name: str, study: Callable[[str], Path], pytester: pytest.Pytester
) -> None:
    text, number = STUDIES[name]
    output = pytester.path / "test_imported.py"
    assert main(["import", str(study(text)), "-o", str(output)]) == 0
    rules = ["--isolated", "--line-length=110", "--select=E,F,W,I,UP,B,PT,RUF"]
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, output], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    # Without one, tests of several engines would be there for each.
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef backend(): pass\n")
    result = pytester.runpytest("--collect-only", "-q", output)
    assert len([line for line in result.outlines if "::" in line]) == number


def test_what_is_written_runs(
    study: Callable[[str], Path], quick: pytest.Pytester, read_report: Read
) -> None:
    output = quick.path / "test_imported.py"
    text = STUDIES["two axes"][0].replace("max: 4", "max: 2")
    assert main(["import", str(study(text)), "--fallback=cpu", "-o", str(output)]) == 0
    args = ("--energy-report", "--energy-backend=transformers")
    quick.runpytest_subprocess("test_imported.py", *args).assert_outcomes(passed=4)
    records = read_report()["records"]
    assert [(each["params"]["dtype"], each["params"]["batch_size"]) for each in records] == [
        *(("float32", 1), ("float32", 2)),
        *(("bfloat16", 1), ("bfloat16", 2)),
    ]
    assert [each["backend"]["dtype"] for each in records] == ["float32", "float32", "bfloat16", "bfloat16"]
    assert {each["backend"]["model"] for each in records} == {"random:llama-tiny"}
    assert {each["backend"]["generation"]["max_new_tokens"] for each in records} == {3}
    assert [each["rounds"][0]["requests"] for each in records] == [1, 2, 1, 2]


def test_cases_that_nothing_tells_apart_any_more_are_there_and_skipped(
    study: Callable[[str], Path], quick: pytest.Pytester
) -> None:
    """Four of eight variants differ in quantisation alone, which is not carried over."""
    text, _ = STUDIES["groups with lists in them"]
    output = quick.path / "test_imported.py"
    assert main(["import", str(study(text)), "--fallback=cpu", "-o", str(output)]) == 0
    result = quick.runpytest_subprocess(
        "test_imported.py", "--energy-backend=transformers", "-rs", "-k", "not float16-1 or load_in"
    )
    assert "float16-load_in_8bit=True" in output.read_text()
    result.assert_outcomes(passed=2, skipped=6)
    result.stdout.fnmatch_lines(["SKIPPED*what its name tells is not carried over; see the earlier case"])


def test_a_test_of_another_engine_is_skipped(study: Callable[[str], Path], quick: pytest.Pytester) -> None:
    text, _ = STUDIES["a list of experiments"]
    output = quick.path / "test_imported.py"
    assert main(["import", str(study(text)), "--fallback=cpu", "-o", str(output)]) == 0
    result = quick.runpytest_subprocess("test_imported.py", "--energy-backend=transformers", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*a case of vllm"])


def test_every_key_is_carried_over_or_named(study: Callable[[str], Path]) -> None:
    text, _ = STUDIES["an experiment with everything"]
    file = study(text)
    (experiment,) = read_study(file).experiments
    made = converted(file)
    named = {note.split(" = ")[0] for note in made.notes}
    carried = {
        "serving_mode",
        "engine",
        "sampling_preset",
        "task.model",
        "task.random_seed",
        "task.max_output_tokens",
        "transformers.engine_params.dtype",
        "transformers.engine_params.attn_implementation",
        "transformers.engine_params.use_cache",
        "transformers.sampling_params.do_sample",
        "transformers.llem_execution.batch_size",
    }
    assert {path for path, _ in flat(experiment)} == carried | named
    assert not carried & named
    (case,) = made.cases
    assert (case.engine, case.model, case.batch) == ("transformers", "Qwen/Qwen2.5-0.5B", 8)
    assert case.options == {"dtype": "bfloat16", "attn_implementation": "eager"}
    assert case.params == {
        "max_new_tokens": 64,
        "seed": 7,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def test_what_is_not_carried_over_stands_on_standard_error_and_in_the_file(
    study: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(study(TASK + "study_execution: {gpu_indices: [0]}\ntypo: {a: 1}\n"))]) == 0
    out, err = capsys.readouterr()
    told = {
        "study_execution.gpu_indices = [0]": "--energy-gpus chooses for a whole run",
        "typo.a = 1": "there is nothing like it here",
        "task.max_input_tokens = 256": "prompts are taken whole; give shorter ones",
    }
    for key, why in told.items():
        assert f"llenergy import: not carried over: {key}: {why}\n" in err
        assert f"# - {key}: {why}\n" in out
    assert err.endswith("llenergy import: 1 case\n")


def test_degrees_become_marks(study: Callable[[str], Path]) -> None:
    text = converted(study(STUDIES["axes of engines"][0])).text("test_a.py")
    assert "marks=[pytest.mark.gpus(2), pytest.mark.parallel(tensor=2)]" in text
    assert 'id="2-tensor4"' in text
    alone = converted(study(TASK + "engine: vllm\nvllm: {engine_params: {pipeline_parallel_size: 2}}\n"))
    assert "@pytest.mark.gpus(2)\n@pytest.mark.parallel(pipeline=2)\ndef test_vllm(" in alone.text(
        "test_a.py"
    )


def test_the_command_has_the_engines_and_the_warm_up(study: Callable[[str], Path]) -> None:
    warmup = "offline: {warmup: {n_prompts: 4}}\n"
    text = converted(study(STUDIES["axes of engines"][0] + warmup)).text("test_a.py")
    command = "pytest test_a.py --energy-backend=transformers,vllm --energy-warmup=4 --energy-report"
    assert f"#   {command}\n" in text


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ("temperature: 0.0", {}),
        ("{do_sample: true, temperature: 0.7}", {"do_sample": True, "temperature": 0.7}),
        ("{do_sample: true, temperature: 0.0}", {}),
        ("{do_sample: false, top_k: 5}", {}),
        ("temperature: 0.7", {}),
    ],
)
def test_sampling_is_what_transformers_would_do(
    given: str, params: dict[str, Any], study: Callable[[str], Path]
) -> None:
    text = TASK + f"transformers: {{sampling_params: {given if given[0] == '{' else '{' + given + '}'}}}\n"
    assert only(study(text)).params == {"max_new_tokens": 3, "seed": 42, **params}


def test_sampling_is_what_vllm_would_do(study: Callable[[str], Path]) -> None:
    """Its temperature is 1 unless it is told another, and it has no do_sample."""
    assert only(study(TASK + "engine: vllm\n")).params["temperature"] == 1.0
    greedy = only(study(TASK + "engine: vllm\nsampling_preset: deterministic\n"))
    assert "do_sample" not in greedy.params


def test_older_places_of_the_same_keys_are_read(study: Callable[[str], Path]) -> None:
    text = TASK.replace("serving_mode: offline\n", "") + (
        "name: old\ntransformers: {dtype: float32, batch_size: 2}\nmeasurement: {warmup: {n_warmup: 3}}\n"
    )
    made = converted(study(text))
    (case,) = made.cases
    assert (case.options, case.batch) == ({"dtype": "float32"}, 2)
    assert "--energy-warmup=3" in made.text("test_a.py")
    harness = TASK + "harness: {batch_size: 2}\n"
    assert only(study(harness)).batch == 2


def test_prompts_of_a_data_set_are_read_from_it(
    study: Callable[[str], Path], quick: pytest.Pytester, read_report: Read
) -> None:
    (quick.path / "set.jsonl").write_text('{"_license": "x"}\n{"text": "abc"}\n{"prompt": "hello world"}\n')
    text = TASK.replace("{n_prompts: 2}", "{source: set.jsonl, n_prompts: 2}")
    output = quick.path / "test_imported.py"
    source = study(text + "transformers: {llem_execution: {batch_size: 2}}\n")
    assert main(["import", str(source), "--fallback=cpu", "-o", str(output)]) == 0
    result = quick.runpytest_subprocess(
        "test_imported.py", "--energy-backend=transformers", "--energy-report"
    )
    result.assert_outcomes(passed=1)
    assert read_report()["records"][0]["rounds"][0]["tokens"]["input"] == 3 + 11


def test_a_file_that_is_there_is_kept(
    study: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "test_mine.py"
    output.write_text("mine")
    assert main(["import", str(study(TASK)), "-o", str(output)]) == 2
    assert output.read_text() == "mine"
    told = f"llenergy: {output} is there already; remove it, or name another file with -o\n"
    assert capsys.readouterr().err == told


def test_without_the_module_that_reads_yaml_it_says_how_to_get_it(
    study: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ExperimentError) as error:
        converted(study(TASK))
    assert str(error.value) == ("reading YAML needs the module yaml; pip install 'pytest-llenergy[import]'")


@pytest.mark.parametrize(
    "value", ["a\"b'c\\d", "tab\tnew\nline", "π\u2028", 1.5, None, True, [1, {"a": "b"}]]
)
def test_values_are_written_as_they_are(value: Any) -> None:
    assert eval(code(value)) == value


def test_hostile_text_stays_in_its_comment(study: Callable[[str], Path]) -> None:
    text = converted(study(TASK + 'study_name: "a\\nimport os\\u202eb"\n')).text("test_a.py")
    assert text.startswith("# a import os\\u202eb: 1 case, made of study.yaml")
    compile(text, "test_a.py", "exec")
