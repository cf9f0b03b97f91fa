# SPDX-License-Identifier: Apache-2.0
"""Studies of LLenergyMeasure become as many experiments as they are there, and bad ones one clear line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pytest_llenergy.errors import ExperimentError
from pytest_llenergy.peers.conversion import converted
from pytest_llenergy.peers.study import read_study

from .studies import STUDIES, TASK

#: A Python that can import llenergymeasure 0.7.0, to hold our expansion against its own.
PEER = "LLENERGYMEASURE_PYTHON"

#: Its own expansion: how many, those that its rules of engines leave out included, and what they are.
ASK = """
import json, sys
from pathlib import Path
import yaml
from llenergymeasure.config.grid import expand_grid
raw = yaml.safe_load(Path(sys.argv[1]).read_text())
raw.pop("version", None)
valid, skipped = expand_grid(raw, Path(sys.argv[1]))
tasks = [(each.engine.value, each.task) for each in valid]
told = [[engine, task.model, task.max_output_tokens, task.random_seed] for engine, task in tasks]
print(json.dumps([len(valid) + len(skipped), told]))
"""


def write(directory: Path, text: str) -> Path:
    file = directory / "study.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_as_many_experiments_as_are_counted_by_hand(name: str, tmp_path: Path) -> None:
    text, number = STUDIES[name]
    assert len(read_study(write(tmp_path, text)).experiments) == number


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.skipif(PEER not in os.environ, reason=f"{PEER} names no Python that has llenergymeasure 0.7.0")
def test_a_study_is_what_the_peers_own_code_makes_of_it(name: str, tmp_path: Path) -> None:
    text, _ = STUDIES[name]
    file = write(tmp_path, text)
    asked = subprocess.run([os.environ[PEER], "-c", ASK, file], capture_output=True, text=True, check=True)
    number, theirs = json.loads(asked.stdout)
    ours = converted(file).cases
    assert len(ours) == number
    if len(theirs) == number:
        told = [
            [case.engine, case.model, case.params["max_new_tokens"], case.params["seed"]] for case in ours
        ]
        assert told == theirs


def test_a_study_may_start_from_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TASK + "study_execution: {n_cycles: 9}\n")
    file = write(tmp_path, "base: base.yaml\nsweep: {task.random_seed: [1, 2]}\n")
    study = read_study(file)
    assert [each["task"] for each in study.experiments] == [
        {
            "model": "random:llama-tiny",
            "dataset": {"n_prompts": 2},
            "max_output_tokens": 3,
            "random_seed": seed,
        }
        for seed in (1, 2)
    ]
    assert "study_execution" not in study.settings


def test_ranges_are_the_numbers_that_they_are_there(tmp_path: Path) -> None:
    text = TASK + "sweep:\n  task.a: {min: 0, max: 1, num: 3}\n  task.b: {log: {min: 1, max: 100, num: 3}}\n"
    found = [each["task"] for each in read_study(write(tmp_path, text)).experiments]
    assert list(dict.fromkeys(each["a"] for each in found)) == [0.0, 0.5, 1.0]
    assert list(dict.fromkeys(each["b"] for each in found)) == [1, 10, 100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "study.yaml: no YAML (while parsing a flow sequence"),
        ("serving_mode: offline\ntask: &a {b: *a}\n", "study.yaml: a key holds itself"),
        ("- a", "study.yaml: needs keys such as task and engine, has a list"),
        ("", "study.yaml: needs keys such as task and engine, has nothing"),
        ("version: '3.0'\n" + TASK, "study.yaml: version '3.0' is not known; this reads version 2 or 2.0"),
        (
            "model: gpt2\nengine: transformers\n",
            "study.yaml: 'model' at the top level is of version 1; put it where version 2 has it, such as "
            "task.model",
        ),
        ("study_name: x\n", "study.yaml: no experiment in it; give it task.model, a sweep or experiments"),
        ("experiments: [1]\n", "study.yaml: experiments needs a list of experiments, each with keys"),
        (TASK + "sweep: [1]\n", "study.yaml: sweep is a list, needs keys with lists"),
        (
            TASK + "sweep: {a: [1, {}]}\n",
            "study.yaml: sweep.a mixes values and groups of keys; it needs one kind",
        ),
        (
            TASK + "sweep: {task.random_seed: {min: 1}}\n",
            "study.yaml: sweep.task.random_seed is {'min': 1}, needs a list, {min, max, num}, {log: {min, "
            "max, num}} or {pow2: {min, max}}, of numbers",
        ),
        (
            TASK + "sweep: {task.random_seed: {pow2: {min: 0, max: 4}}}\n",
            "study.yaml: sweep.task.random_seed is {'pow2': {'min': 0, 'max': 4}}, needs min up to max, both "
            "above 0, and a whole num from 2",
        ),
        (
            "base: nothing.yaml\n" + TASK,
            "study.yaml: nothing.yaml: cannot be read (No such file or directory)",
        ),
        ("serving_mode: offline\ntask: {}\n", "study.yaml: task.model is None, needs a name"),
        (
            "task: {model: a/b, dataset: {n_prompts: ten}}\n",
            "study.yaml: task.dataset.n_prompts is 'ten', needs a whole number, 1 or more",
        ),
        (
            "task: {model: a/b}\nengine: sglang\n",
            "study.yaml: engine is 'sglang', needs one of transformers, vllm, tensorrt",
        ),
        (
            "task: {model: a/b}\nserving_mode: server\n",
            "study.yaml: serving_mode is 'server'; only offline experiments are made into tests",
        ),
        (
            TASK + "sweep: {transformers.llem_execution.batch_size: [1, 0]}\n",
            "study.yaml: experiment 2 of 2: transformers.llem_execution.batch_size is 0, needs a whole "
            "number, 1 or more",
        ),
        (
            TASK + "transformers: {sampling_params: {do_sample: true, top_p: 3}}\n",
            "study.yaml: generate: top_p is 3.0, needs more than 0 and at most 1",
        ),
    ],
)
def test_what_is_no_experiment_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as error:
        converted(write(tmp_path, text))
    told = str(error.value)
    assert "\n" not in told
    assert told.startswith(message)
