# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: options and their counterparts, files that cannot be read, and names of tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_llenergy.cli import main

from .studies import REPOSITORY, STUDIES, cases_of, convert, convert_text

pytest.importorskip("yaml")


@pytest.mark.parametrize(
    ("engine", "options", "note"),
    [
        ("transformers", "kv_cache_dtype: int8", "keeps up to 128 recent tokens unquantised"),
        ("transformers", "prefix_cache: true", "computes each prompt anew"),
        ("transformers", "enable_chunked_prefill: true", "chunked_prefill is the tokens of a step"),
        ("transformers", "presence_penalty: 0.5", "transformers takes num_beams, repetition_penalty, min_p"),
        ("transformers", "attn_implementation: paged", "the load option attention is one of sdpa, eager"),
        ("transformers", "torch_compile_mode: default", "needs torch_compile: true"),
        ("transformers", "torch_compile_backend: onnxrt", "models are compiled with inductor"),
        ("transformers", "load_in_4bit: true", "the backend has nf4"),
        ("transformers", "bnb_4bit_use_double_quant: true", "bitsandbytes is used with its defaults"),
        ("transformers", "batching_strategy: dynamic", "use the load option batching"),
        ("transformers", "use_cache: false", "generate always uses a key-value cache"),
        ("transformers", "device_map: balanced", "use the marks gpus and parallel"),
        ("transformers", "trust_remote_code: true", "code that a model brings along is not run"),
        ("vllm", "cache_implementation: static", "the cache of vllm is dynamic"),
        ("transformers", "no_such: 1", "has no option no_such"),
        ("transformers", "batch_size: 2, prompt_lookup_num_tokens: 3", "takes one prompt at a time"),
        (
            "transformers",
            "batch_size: 2, repetition_penalty: 1.2",
            "prompts of a batch; use batch_size: 1",
        ),
        ("vllm", "beam_search: {beam_width: 4}", "beams are not a part of vLLM's engine"),
        ("vllm", "no_such: {part: 4}", ("not checked, since vllm is not installed", "has no option no_such")),
        ("vllm", "engine: {swap_space: 8}", "vLLM has no swap space any more"),
        ("vllm", "sampling: {min_tokens: 8}", "generate has no such argument"),
        ("vllm", "engine: {tokenizer: a}", "use --energy-model or energy_model"),
        ("tensorrt", "sampling: {return_perf_metrics: true}", "it is on, for timestamps"),
        ("tensorrt", "kv_cache_config: {max_tokens: 9}", "prefix_cache and free_gpu_memory_fraction"),
        ("tensorrt", "fast_build: true", "builds no engine"),
        ("tensorrt", "quantization: fp8", "the checkpoint decides it"),
    ],
)
def test_options_that_a_backend_refuses_become_notes(
    engine: str, options: str, note: str | tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((*_, carried, params),), notes = convert_text(
        f"model: m\nengine: {engine}\n{engine}: {{{options}}}\n", tmp_path, capsys
    )
    assert carried == {}
    assert set(params) == {"max_new_tokens", "seed", "temperature", "top_k", "top_p", "do_sample"}
    either = (note,) if isinstance(note, str) else note
    assert any(each in line for line in notes for each in either), notes


def test_the_penalty_of_repetition_needs_prompts_without_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank pads its prompts; here it gets one, or its engine pads none."""
    cases, _ = convert_text(
        "model: m\nsweep:\n"
        "  g:\n"
        "  - {engine: transformers, transformers.repetition_penalty: 1.2, num_processes: [1, 2]}\n"
        "  - {engine: vllm, vllm.sampling.repetition_penalty: 1.2}\n",
        tmp_path,
        capsys,
    )
    assert [(case[0], case[2], case[4]["repetition_penalty"]) for case in cases] == [
        ("transformers", 1, 1.2),
        ("transformers", 2, 1.2),
        ("vllm", 100, 1.2),
    ]


def test_false_is_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases, notes = convert_text(
        "model: m\nbackend: vllm\nsweep:\n  vllm.enforce_eager: [true, false]\n"
        "  vllm.enable_chunked_prefill: [true, false]\n",
        tmp_path,
        capsys,
    )
    assert [case[3] for case in cases] == [
        {"enforce_eager": eager, "chunked_prefill": chunked}
        for eager in (True, False)
        for chunked in (True, False)
    ]
    assert "id='enforce_eager=False-chunked_prefill=False'" in (tmp_path / "test_s.py").read_text()
    assert notes == []


def test_a_case_of_defaults_has_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_text("model: m\nbackend: vllm\nsweep:\n  vllm.max_model_len: [9, null]\n", tmp_path, capsys)
    assert "id='defaults'" in (tmp_path / "test_s.py").read_text()


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("deterministic", {}),
        ("standard", {"temperature": 1.0, "top_p": 0.95, "top_k": 50}),
        ("creative", {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}),
        ("factual", {"temperature": 0.3, "top_p": 1.0, "top_k": 50}),
    ],
)
def test_presets_have_the_values_of_llenergymeasure(
    preset: str, expected: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each place that a layout has for them; what is given beside a preset replaces its value."""
    (case, same, other), notes = convert_text(
        "model: m\nengine: vllm\nexperiments:\n"
        f"- {{sampling_preset: {preset}}}\n- {{decoder: {{preset: {preset}}}, n: 50}}\n"
        f"- {{decoder: {{preset: {preset}, repetition_penalty: 1.0, temperature: 0.5}}}}\n"
        "transformers: {sampling_params: {repetition_penalty: 1.3, temperature: 0.2}}\n",
        tmp_path,
        capsys,
    )
    drawn = {"do_sample": True} if expected else {}
    assert case[4] == same[4] == {"max_new_tokens": 256, "seed": 42, **drawn, **expected}
    assert other[4]["temperature"] == 0.5
    assert "repetition_penalty" not in other[4]
    assert notes == []


def test_counterparts_of_the_first_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases, notes = convert_text(
        "model_name: m\nbackend: pytorch\nbatching: {batch_size: 4, strategy: static}\n"
        "num_cycles: 3\nstreaming: true\ntraffic_simulation: {enabled: true, target_qps: 10.0}\n"
        "experiments:\n- {parallelism: {strategy: none}}\n"
        "- {parallelism: {strategy: data_parallel, degree: 2}}\n"
        "- {sharding: {strategy: tensor_parallel, num_shards: 2}, batching: {strategy: sorted_static}}\n"
        "- {parallelism: {strategy: fsdp, degree: 2}, n: 50}\n",
        tmp_path,
        capsys,
    )
    assert [case[2] for case in cases] == [4, 8, 4]
    source = (tmp_path / "test_s.py").read_text()
    assert "pytest.mark.parallel(data=2)" in source
    assert "pytest.mark.parallel(tensor=2)" in source
    for note in (
        "num_cycles = 3: use --energy-rounds=N, or llenergy ab for a process per round",
        "streaming = true: the times of tokens are recorded in any case",
        "traffic_simulation.enabled = true, traffic_simulation.target_qps = 10.0: a batch has no arrivals; "
        "use backend.serve of a server, with request_rate",
        'batching.strategy = "sorted_static": use the load option batching',
        'strategy = "fsdp": is none of data_parallel, tensor_parallel, pipeline_parallel',
    ):
        assert note in notes
    assert not [note for note in notes if "no counterpart" in note and "distinct" not in note]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_eight_bits_multiply_in_float16(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,), notes = convert_text(
        f"model: m\nbackend: pytorch\npytorch: {{dtype: {dtype}, load_in_8bit: true}}\n", tmp_path, capsys
    )
    assert case[3] == {"dtype": "float16", "quantization": "8bit"}
    told = 'dtype = "bfloat16": with load_in_8bit, arithmetic is in float16' in notes
    assert told == (dtype == "bfloat16")


def test_the_documented_counterparts_are_those_of_the_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key of the table that becomes an option of pytest has a note that names the option."""
    page = (REPOSITORY / "docs" / "coming-from.md").read_text().partition("|LLenergyMeasure key|")[2]
    rows = re.findall(r"^\|(.*?)\|(.*)\|$", page.partition("|LLenergyMeasure figure|")[0], re.MULTILINE)
    options = {
        key.replace("*", "n_warmup"): re.findall(r"--energy-[a-z]+", counterpart)
        for keys, counterpart in rows
        for key in re.findall(r"`([\w.]+\*?)`", keys)
    }
    options = {key: given for key, given in options.items() if given and key not in ("engine", "task.model")}
    assert len(options) >= 7
    lines = [f"{key}: {json.dumps('x')}\n" for key in options]
    _, notes = convert_text(f"model: m\n{''.join(lines)}", tmp_path, capsys)
    for key, given in options.items():
        name = "dataset" if key == "task.dataset.source" else key
        (note,) = [line for line in notes if f"{name} = " in line]
        assert all(option in note for option in given), (key, note)


def test_a_converted_file_runs(quick: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """With a random model on the CPU: loaded, generated and measured as the study says."""
    pytest.importorskip("transformers")
    study = quick.path / "small.yaml"
    study.write_text(
        "name: small\nmodel: random:llama-tiny\nbackend: pytorch\nprecision: fp32\n"
        "n: 20\nmax_output_tokens: 5\n"
        "decoder: {preset: deterministic}\n"
        "pytorch: {attn_implementation: eager, num_beams: 2, early_stopping: true, no_repeat_ngram_size: 3}\n"
        "sweep:\n  pytorch.batch_size: [1, 3]\n"
    )
    assert convert(study, quick.path, "--fallback=cpu") == 0
    capsys.readouterr()
    result = quick.runpytest("test_small.py", "--energy-backend=transformers", "--energy-report")
    result.assert_outcomes(passed=2)
    records = json.loads((quick.path / "energy.json").read_text())["records"]
    assert {record["backend"]["dtype"] for record in records} == {"float32"}
    assert {record["backend"]["options"]["attention"] for record in records} == {"eager"}
    assert [record["params"]["batch_size"] for record in records] == [1, 3]
    each = [record["rounds"][0] for record in records]
    assert [round_["requests"] / round_["iterations"] for round_ in each] == [1, 3]
    assert {record["backend"]["generation"]["max_new_tokens"] for record in records} == {5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n", "is no study of LLenergyMeasure: needs keys such as model and engine"),
        ("a: [", "is no YAML: expected the node content, but found '<stream end>', line 1"),
        ("a: b\nhf_token: hunter2 : x\n", "is no YAML: mapping values are not allowed here, line 2\n"),
        ("a: b\nhf_token: *hunter2\n", "is no YAML: found undefined alias, line 2\n"),
        ("a: !x'hunter2 b\n", "is no YAML: could not determine a constructor for the tag, line 1\n"),
        ("a: &hunter2 b\nc: &hunter2 d\n", "is no YAML: second occurrence, line 2\n"),
        ("a: @hunter2\n", "is no YAML: found character '@' that cannot start any token, line 1\n"),
        ("model: m\nbackend: ollama\n", 'converted: engine = "ollama": no backend here'),
        ("name: x\n", "converted: model = null: an experiment needs one"),
        ('model: ""\n', 'converted: model = "": an experiment needs one'),
        ("model: m\nn: -1\n", "converted: n = -1: needs a whole number of 1 or more"),
        (
            "model: m\nmax_output_tokens: 0\n",
            "max_output_tokens = 0: needs a whole number of 1 or more",
        ),
        ("model: m\nrandom_seed: -1\n", "random_seed = -1: needs a whole number of 0 or more"),
        ("model: m\nserving_mode: both\n", 'serving_mode = "both": needs offline or server'),
        ("model: m\npytorch: {batch_size: many}\n", 'pytorch.batch_size = "many": needs a whole number'),
        ("model: m\nsweep: [1]\n", "sweep is [1], needs lists by key"),
        ("model: m\nsweep: {1: [2]}\n", 'sweep is {"1": [2]}, needs lists by key'),
        ("model: m\nsweep: 3\n", "sweep is 3, needs lists by key"),
        ("model: m\nsweep: {a: [{b: 1}, 3]}\n", "a has 3, needs mappings alone"),
        ("model: m\nsweep: {precision: []}\n", "the axis precision of its sweep is empty"),
        ("model: m\nexperiments: 3\n", "experiments is 3, needs a list of mappings"),
        ("model: m\nexperiments: [{n: 1}, 3]\n", "experiments has 3, needs mappings alone"),
        (
            "campaign_name: c\nconfigs: [a.yaml, b.yaml]\n",
            'is a campaign of LLenergyMeasure; convert its configs: ["a.yaml", "b.yaml"]',
        ),
        ("model: m\nsampling: {temperature: 0.5, top_k: many}\n", "top_k is 'many', needs int"),
        ("model: m\nsampling: {do_sample: maybe}\n", "do_sample is 'maybe', needs bool"),
        ("model: m\nsampling: {temperature: hot}\n", "temperature is 'hot', needs float"),
        ("model: m\nsampling: {top_p: 2}\n", "top_p is 2.0, needs more than 0 and at most 1"),
        ("model: m\nsampling: {temperature: .inf}\n", "temperature is inf, needs a plain number"),
        (
            "model: m\nsampling: {preset: [a]}\nbackend: vllm\nvllm: {max_model_len: 2020-01-01}\n",
            "max_model_len is",
        ),
        ("model: m\nprecision: int3\n", "dtype is 'int3', needs one of auto, float32"),
        ("model: m\npytorch: {pipeline_parallel_size: 2}\n", "layers on several GPUs are parallel"),
        ("model: m\na: &a {b: *a}\n", "more than 20 sections within each other; remove"),
        ("model: m\na: &a [*a]\n", "more than 20 sections within each other; remove"),
        (
            "model: m\nl0: &l0 [1, 2, 3, 4, 5, 6]\n"
            + "".join(
                f"l{i}: &l{i} {{{', '.join(f'{k}: *l{i - 1}' for k in 'abcdef')}}}\n" for i in range(1, 7)
            ),
            "has more than 10,000 values with its aliases in full; remove some aliases",
        ),
        (
            "model: m\nsweep:\n  g:\n  - {"
            + ", ".join(f"k{i}: [1, 2, 3, 4, 5, 6, 7, 8]" for i in range(9))
            + "}\n",
            "its sweep has more than 100,000 experiments; remove some axes",
        ),
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


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2024-13-45", "date"),
        ("9" * 5000, "whole number"),
        ("0x" + "f" * 5000, "whole number"),
        ("!!int many", "whole number"),
        ("!!float many", "number"),
        ("!!bool many", "boolean"),
        ("!!timestamp many", "date"),
    ],
    ids=["date", "digits", "hexadecimal", "int", "float", "bool", "timestamp"],
)
def test_a_value_that_cannot_be_read_leaves_the_other_files(
    value: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.yaml", tmp_path / "good.yaml"
    bad.write_text(f"model: m\nnested:\n  list: [1, {value}]\n")
    good.write_text("model: m\nbackend: vllm\n")
    missing = tmp_path / "missing.yaml"
    assert main(["import", str(bad), str(missing), str(good), "-o", str(tmp_path)]) == 2
    error, absent, *notes = capsys.readouterr().err.splitlines()
    assert error == (
        f"llenergy import: {bad}, line 3: the value cannot be read as a {kind}; correct it, or quote it if "
        "it is a text"
    )
    assert absent == f"llenergy import: {missing}: No such file or directory"
    assert notes == []
    assert cases_of((tmp_path / "test_good.py").read_text())[0][:2] == ("vllm", "m")
    assert not (tmp_path / "test_bad.py").exists()


def test_notes_of_a_long_file_are_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "".join(f"k{number}: {'x' * 500}\n" for number in range(2000))
    _, notes = convert_text(f"model: m\nbackend: vllm\n{keys}", tmp_path, capsys)
    assert len("".join(notes)) < 4000
    assert notes[-1].endswith("1975 more: no counterpart")


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
        "experiment_timeout_seconds = 600: use --energy-timeout=SECONDS",
        "max_consecutive_failures = 3: use --maxfail=N of pytest",
        "cycle_gap_seconds = 9: idle power is measured in the quiet gaps around each round; use "
        "--energy-gap=SECONDS",
        'experiment_order = "shuffle": tests run in file order',
        "skip_preflight = true: no counterpart",
    ):
        assert f"study_execution.{line}\n" in errors
