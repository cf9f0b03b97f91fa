# SPDX-License-Identifier: Apache-2.0
"""Each installed backend on the packaged model: the outputs of the model, and tokens counted by hand."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from .conftest import open_project
from .project import Outcome, Project, flags

MODULES = {
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "onnxruntime": "onnxruntime_genai",
    "llama-cpp": "xllamacpp",
    "vllm": "vllm",
}
NAMES = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]

#: A busy machine may leave a power meter unread, but not the CPU time of processes.
ESTIMATE = "--energy-meter=estimate"

#: Backends that cannot end a text at a token.
NO_STOPS = {"llama-cpp"}

#: One load for each backend: batches of unlike lengths, an early end, and a measured call.
SUITE = """
import json, os, pathlib

PROMPTS = ["The capital of France is", "One, two, three, four, five, six, seven, eight,"]

def test_generates(energy, backend):
    lone = [backend.generate([prompt], max_new_tokens=6, ignore_eos=True) for prompt in PROMPTS]
    stop = {"stop_token_ids": (lone[0].token_ids[0][2],)} if "STOPS" in os.environ else {}
    early = backend.generate(PROMPTS[:1], max_new_tokens=6 if stop else 3, **stop)
    run = energy(backend.generate, PROMPTS, max_new_tokens=6, ignore_eos=True)
    refused = {}
    for name, prompt in (("long", "hello " * 9000), ("nul", "One, two,\\0 three, four, five, six, seven")):
        try:
            refused[name] = backend.generate([prompt], max_new_tokens=2).requests[0].input_tokens
        except Exception as error:
            refused[name] = str(error)
    found = {
        "refused": refused,
        "name": backend.name,
        "tasks": list(backend.tasks),
        "lone": [each.token_ids[0] for each in lone],
        "lone_input": [each.requests[0].input_tokens for each in lone],
        "batch": run.result.token_ids,
        "batch_input": [each.input_tokens for each in run.result.requests],
        "texts": run.result.texts,
        "output_tokens": run.result.output_tokens,
        "early": early.token_ids[0],
        "early_output": early.output_tokens,
        "energy_j": run.energy_j,
        "per_token_j": run.energy_per_output_token_j,
        "rounds": len(run.rounds),
    }
    pathlib.Path(backend.name + ".json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module", params=NAMES)
def generated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Outcome]]:
    """What a backend has generated, its record, and the output of the run."""
    with open_project(tmp_path_factory.mktemp("backends")) as project:
        project.write("test_g.py", SUITE)
        options = [f"--energy-backend={request.param}", ESTIMATE]
        if request.param not in NO_STOPS:
            project.env["STOPS"] = "yes"
        ended = project.pytest("--energy-report", *options, OMP_NUM_THREADS="1").check(passed=1)
        (record,) = project.records().values()
        yield json.loads(project.text(f"{request.param}.json")), record, ended


Generated = tuple[dict[str, Any], dict[str, Any], Outcome]


def check_cut_prompts(refused: dict[str, Any]) -> None:
    """Prompts that the library would cut are refused with both numbers of tokens.

    9,000 words are more than the model has room for; a tokenizer in C may end a text at a NUL.
    """
    assert re.search(r"\b[89]\d\d\d\b.*\b8192\b|\b8192\b.*\b[89]\d\d\d\b", str(refused["long"])), refused
    kept = re.search(r"keeps (\d+) of the (\d+) tokens", str(refused["nul"]))
    if kept is None:
        assert refused["nul"] >= 14
    else:
        assert int(kept[1]) < 6 < 12 < int(kept[2])
    assert all("\n" not in str(each) for each in refused.values())


def test_tokens_and_energy_of_a_generation(generated: Generated) -> None:
    """Tokens as produced, without padding: six each, and three where the third ends the text."""
    found, record, outcome = generated
    assert [len(ids) for ids in found["lone"]] == [6, 6]
    assert [len(ids) for ids in found["batch"]] == [6, 6]
    assert found["output_tokens"] == 12
    assert (found["early"], found["early_output"]) == (found["lone"][0][:3], 3)
    for each in record["rounds"]:
        calls = each["iterations"]
        assert each["tokens"]["output"] in (12, 12 * calls)
        assert each["requests"] in (2, 2 * calls)
    # A batch is padded to its longest prompt; that is no input.
    assert found["batch_input"] == found["lone_input"]
    short, long = found["lone_input"]
    assert 5 <= short <= 7
    assert long > short + 8
    for each in record["rounds"]:
        assert each["tokens"]["input"] in (short + long, (short + long) * each["iterations"])
    # The same first tokens at least, since kernels may add in another order.
    assert [ids[:2] for ids in found["batch"]] == [ids[:2] for ids in found["lone"]]
    assert "Paris" in found["texts"][0]
    assert found["per_token_j"] == pytest.approx(found["energy_j"] / 12, rel=0.1)
    check_cut_prompts(found["refused"])
    assert record["status"] == "measured"
    assert record["backend"]["name"] == found["name"]
    assert "smol" in record["backend"]["model"].lower()
    assert (record["devices"], len(record["ranks"])) == (["cpu"], 1)
    assert record["ranks"][0]["pid"] > 0
    assert re.search(r"test_generates", outcome.out)
    # Energies of phases this short may be unknown, with a reason.
    for each in record["rounds"]:
        for phase in each["phases"]:
            assert phase["duration_s"] > 0
            assert phase["energy_j"] is not None or phase["reason"]
    # The first token of each sequence is one of prefill; a phase has the energy of all calls.
    rounds = [
        each for each in record["rounds"] if all(phase["energy_j"] is not None for phase in each["phases"])
    ]
    by_hand = [
        phase["energy_j"] / (each["tokens"]["output"] - each["requests"])
        for each in rounds
        for phase in each["phases"]
        if phase["name"] == "decode"
    ]
    decode = record["metrics"]["decode_energy_per_output_token_j"]
    if len(by_hand) == len(record["rounds"]):
        assert decode["value"] == pytest.approx(median(by_hand), rel=0.01)
    else:
        assert decode["value"] is not None or decode["reason"]
    first = record["metrics"]["time_to_first_token_s"]
    assert first["value"] is None or 0 < first["value"] < record["metrics"]["duration_s"]["value"]


ONE_FOR_EACH = """
def test_it(energy, backend):
    raise SystemExit("ran")
"""


def test_a_test_runs_once_for_each_installed_backend(project: Project) -> None:
    project.write("test_each.py", ONE_FOR_EACH)
    listed = project.pytest("--collect-only", "-q")
    found = re.findall(r"test_it\[(.+?)\]", listed.out)
    assert set(NAMES) <= set(found)
    some = project.pytest("--collect-only", "-q", f"--energy-backend={NAMES[0]}")
    assert re.findall(r"test_it\[(.+?)\]", some.out) == [NAMES[0]]


def test_the_model_and_its_precision_are_those_of_the_record(project: Project) -> None:
    if "transformers" not in NAMES:
        pytest.skip("transformers is not installed")
    project.write(
        "test_m.py",
        "import pytest\n@pytest.fixture\ndef energy_model(): return 'random:llama-tiny'\n"
        "@pytest.mark.backend_options(dtype='bfloat16')\n"
        "def test_it(energy, backend):\n"
        "    energy(backend.generate, ['a b c'], max_new_tokens=4, ignore_eos=True)\n",
    )
    project.pytest("--energy-backend=transformers", "--energy-report", ESTIMATE).check(passed=1)
    (record,) = project.records().values()
    assert (record["backend"]["model"], record["backend"]["dtype"]) == ("random:llama-tiny", "bfloat16")
    assert record["rounds"][0]["tokens"]["output"] > 0


def test_a_model_that_is_not_there_is_one_line(project: Project) -> None:
    project.write("test_m.py", "def test_it(energy, backend): energy(backend.generate, ['a'])\n")
    options = [f"--energy-backend={NAMES[-1]}", "--energy-model=./no-such-model.gguf"]
    ended = project.pytest(*options, ESTIMATE)
    assert ended.ret != 0
    assert "no-such-model" in ended.text
    assert "Traceback" not in ended.out


CACHED = """
import pytest

PROMPT = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, " * 4

def test_it(energy, backend):
    cached = backend.with_options({option})
    energy(cached.generate, [PROMPT], max_new_tokens=2, ignore_eos=True)
"""


def test_prefix_caching_passed_through_never_falsifies_rounds_in_silence(project: Project) -> None:
    """Every round after the first would find its prompt computed: refused, or flagged."""
    for name, option in (
        ("openvino", "enable_prefix_caching=True"),
        ("openvino", "scheduler_config={'enable_prefix_caching': True}"),
        ("llama-cpp", "cache_prompt=True"),
        ("vllm", "enable_prefix_caching=True"),
    ):
        if name not in NAMES:
            continue
        project.write("test_c.py", CACHED.format(option=option))
        ended = project.pytest(f"--energy-backend={name}", "--energy-report", ESTIMATE)
        if ended.ret == 0 and "passed" in ended.counts:
            (record,) = project.records().values()
            assert "prefix-cache" in flags(record), ended.out
        else:
            assert re.search("prefix.?cach|cache_prompt|scheduler_config", ended.text), ended.out
            assert "Traceback" not in ended.out


SURROGATE = """
def test_it(energy, backend):
    energy(backend.generate, ["a lone \\ud800 surrogate"], max_new_tokens=2)
"""


@pytest.mark.skipif("transformers" not in NAMES, reason="transformers is not installed")
def test_a_prompt_that_is_no_text_is_one_line(project: Project) -> None:
    project.write("test_s.py", SURROGATE)
    ended = project.pytest("--energy-backend=transformers", "--energy-model=random:llama-tiny", ESTIMATE)
    assert ended.ret == 1
    assert "Traceback" not in ended.out
    assert "prompt" in ended.text


def test_scores_stand_beside_energy(project: Project) -> None:
    project.write(
        "test_s.py",
        "def test_it(energy, backend):\n"
        "    run = energy(backend.generate, ['The capital of France is', 'x'], max_new_tokens=2)\n"
        "    scores = [float(r in t) for r, t in zip(['Paris', 'y'], run.result.texts)]\n"
        "    energy.metric('accuracy', scores, better='more')\n",
    )
    options = [f"--energy-backend={NAMES[-1]}", "--energy-report", ESTIMATE]
    project.pytest(*options).check(passed=1)
    (record,) = project.records().values()
    assert 0 <= record["metrics"]["accuracy"]["value"] <= 1
