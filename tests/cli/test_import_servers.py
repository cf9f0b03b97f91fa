# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: studies with a server become loads of ``backend.serve``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.backends.servers.start import queueing

from .studies import convert

pytest.importorskip("yaml")

#: As the documentation of version 0.7.0 (August 2026) describes a study with a server.
STUDY = """\
study_name: rates
serving_mode: server
engine: vllm
task:
  model: random:llama-tiny
  random_seed: 42
  dataset: {n_prompts: 20}
  max_output_tokens: 8
sampling_preset: deterministic
server:
  traffic: {rate: 2, arrival: poisson}
sweep:
  server.traffic.rate: [20, 40]
"""

#: What to do about other kinds of parallelism.
DEGREES = (
    "a server's load is converted with tensor parallelism only; remove the key, then write every degree as a "
    "number into --energy-server-command, and their product into pytest.mark.gpus(n)"
)


def loads_of(text: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[Any], str]:
    """Return the converted file, the values of its loads, and what was printed about them."""
    (directory / "s.yaml").write_text(text)
    assert convert(directory / "s.yaml", directory) == 0
    source = (directory / "test_s.py").read_text()
    module: dict[str, Any] = {}
    exec(compile(source, "test_s.py", "exec"), module)
    return source, [each.values for each in module["LOADS"]], capsys.readouterr().err


def test_a_sweep_of_rates_is_one_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, loads, printed = loads_of(STUDY, tmp_path, capsys)
    common = {"max_new_tokens": 8, "seed": 42}
    # Windows of 240 s, as in LLenergyMeasure where a study does not give them.
    assert loads == [
        ("random:llama-tiny", 20, {**common, "request_rate": 20.0, "num_requests": 4800}),
        ("random:llama-tiny", 20, {**common, "request_rate": 40.0, "num_requests": 9600}),
    ]
    assert printed == ""
    assert "# Not carried over: nothing" in source
    assert "def test_study" not in source
    assert "--energy-server-command='vllm serve {model} --host {host} --port {port}'" in source


def test_every_key_of_the_traffic_has_its_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pytest_llenergy import slo

    traffic = (
        "  traffic: {rate: 2, arrival: gamma, burstiness: 2.0, window_seconds: 60, concurrency_cap: 64, "
        "seed: 7,\n    slo: {ttft_ms: 500, tpot_ms: 50, percentile: 0.95}, ramp_exclusion_seconds: 9}\n"
        "  warmup: {mode: fixed}\n  cooldown_seconds: 5\n"
    )
    text = STUDY.replace("  traffic: {rate: 2, arrival: poisson}\n", traffic)
    _, ((*_, params), _), printed = loads_of(text, tmp_path, capsys)
    assert params["num_requests"] == 20 * 60
    assert params["concurrency"] == 64
    assert params["seed"] == 7
    assert params["slo"] == slo(ttft=0.5, tpot=0.05, attainment=0.95)
    # A coefficient of variation of 2 is that of gamma gaps with the shape 1/4.
    assert params["burstiness"] == 0.25
    for note in (
        'server.warmup.mode = "fixed": warm-up ends when',
        "server.cooldown_seconds = 5: idle power is measured in the quiet gaps",
        "server.traffic.ramp_exclusion_seconds = 9: steady metrics begin with the first request",
    ):
        assert note in printed
    assert len(printed.splitlines()) == 3
    assert "no counterpart" not in printed


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("arrival: poisson", "burstiness: 2", "burstiness = 2: only arrival: gamma has one"),
        ("arrival: poisson", "slo: {ttft_ms: 9, percentile: 99}", "percentile = 99: needs a share such as"),
        ("preset: deterministic", "preset: standard", None),
        (
            "preset: deterministic\nserver:\n  traffic: {rate: 2,",
            "preset: standard\nserver:\n  traffic: {rate: 2, seed: 1,",
            "random_seed = 42: one seed is for arrivals and sampling, that of server.traffic.seed",
        ),
        (
            "engine: vllm\n",
            "engine: vllm\nvllm: {engine_params: {dtype: bfloat16, max_num_seqs: 9}}\n",
            "vllm.engine_params.max_num_seqs = 9: an option of the server; give it in "
            "--energy-server-command",
        ),
        (
            "engine: vllm\n",
            "engine: vllm\nvllm: {sampling_params: {ignore_eos: true}}\n",
            None,
        ),
    ],
)
def test_what_has_no_counterpart_is_named(
    old: str, new: str, note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in STUDY
    _, loads, printed = loads_of(STUDY.replace(old, new), tmp_path, capsys)
    assert len(loads) == 2
    assert (note in printed) if note else (printed == "")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("engine: vllm", "engine: transformers", 'engine = "transformers": its server mode has vllm and'),
        (
            "arrival: poisson",
            "arrival: even",
            'server.traffic.arrival = "even": needs poisson or gamma',
        ),
        ("[20, 40]", "[fast]", 'server.traffic.rate = "fast": needs a number above 0'),
        ("arrival: poisson", "concurrency_cap: 1.5", "concurrency is 1.5, needs int"),
        ("arrival: poisson", "slo: {ttft_ms: -1}", "server.traffic.slo.ttft_ms = -1: needs a number above 0"),
        *(
            ("engine: vllm\n", f"{section}\n", f"{key} = 2: {DEGREES}")
            for section, key in (
                (
                    "engine: vllm\nvllm: {engine: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}",
                    "vllm.engine.pipeline_parallel_size",
                ),
                (
                    "engine: vllm\nvllm: {engine: {tensor_parallel_size: 2, data_parallel_size: 2}}",
                    "vllm.engine.data_parallel_size",
                ),
                ("engine: tensorrt\ntensorrt: {pp_size: 2}", "tensorrt.pp_size"),
                ("engine: vllm\nnum_processes: 2", "num_processes"),
                ("engine: vllm\nparallelism: {strategy: data_parallel, degree: 2}", "parallelism.degree"),
            )
        ),
    ],
)
def test_a_load_that_cannot_be_sent_is_refused(
    old: str, new: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text(STUDY.replace(old, new))
    assert convert(tmp_path / "s.yaml", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_traffic_of_a_batch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(STUDY.replace("serving_mode: server", "serving_mode: offline"))
    assert convert(tmp_path / "s.yaml", tmp_path) == 0
    printed = capsys.readouterr().err
    assert 'server.traffic.rate = 20 | 40, server.traffic.arrival = "poisson": no counterpart' in printed


def test_engines_are_servers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = STUDY.replace("engine: vllm\n", "").replace("sweep:\n", "sweep:\n  engine: [vllm, tensorrt]\n")
    source, loads, printed = loads_of(text, tmp_path, capsys)
    assert len(loads) == 2
    assert "--energy-backend=vllm-server,tensorrt-llm-server " in source
    assert "--energy-server-command='tensorrt-llm-server=trtllm-serve {model} " in source
    assert 'engine = ["tensorrt-llm", "vllm"]: the server of each gets every load' in printed


def test_a_server_on_several_gpus_divides_its_work_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "s.yaml"
    text = STUDY.replace("engine: vllm\n", "").replace("server.traffic.rate: [20, 40]", "tp_size: [1, 2]")
    study.write_text(text + "  engine: [vllm, tensorrt]\n")
    assert convert(study, tmp_path) == 0
    assert "parallel" not in capsys.readouterr().err
    source = (tmp_path / "test_s.py").read_text()
    module: dict[str, Any] = {}
    exec(compile(source, "test_s.py", "exec"), module)
    one, two = module["LOADS"]
    assert (one.marks, two.id) == ((), "tensor=2")
    (mark,) = two.marks
    assert (mark.name, mark.args, mark.kwargs) == ("gpus", (2,), {})
    assert "--port {port} --tensor-parallel-size {gpus}'" in source
    assert "--port {port} --tp_size {gpus}'" in source


def test_shards_are_left_out_of_a_file_that_may_run_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, ``{gpus}`` is 0, which no server takes as a degree."""
    study = tmp_path / "s.yaml"
    study.write_text(STUDY.replace("server.traffic.rate: [20, 40]", "tp_size: [1, 2]"))
    reason = "tp_size = 2: a server with tensor parallelism needs GPUs; convert it without --fallback"
    assert convert(study, tmp_path, "--fallback=cpu") == 0
    assert reason in capsys.readouterr().err
    source = (tmp_path / "test_s.py").read_text()
    assert "{gpus}" not in source
    assert source.count("pytest.param(") == 1
    study.write_text(STUDY.replace("engine: vllm", "engine: vllm\ntp_size: 2"))
    assert convert(study, tmp_path, "--fallback=cpu") == 2
    assert capsys.readouterr().err.endswith(f"can be converted: {reason}\n")


def test_degrees_of_a_batch_do_not_divide_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("serving_mode: server\n", "").partition("sweep:")[0]
    (tmp_path / "s.yaml").write_text(
        f"{text}experiments:\n- {{serving_mode: server}}\n- {{vllm.engine.tensor_parallel_size: 2}}\n"
    )
    assert convert(tmp_path / "s.yaml", tmp_path) == 0
    source = (tmp_path / "test_s.py").read_text()
    assert "pytest.mark.parallel(tensor=2)" in source
    assert "--port {port}'" in source


#: Every value is one, by key of the section of the engine.
SECRETS = """
    hf_token: private
    HF_TOKEN: private
    auth_token: private
    api-key: private
    api_key: [private, private]
    password: 1234567890
    session_token: {section: {a: private}}
    model_loader_extra_config: {access_token: private, token: private}
    extra: [{token: private}]
    env: {HF_TOKEN: private, WANDB_API_KEY: private}
    arguments: [--api-key, private, --port, 8000]
    base_url: "https://host/x?token=private&n=1"
    max_num_seqs: "HF_TOKEN=private"
    url: "https://user:private@host/x"
    model_args: "pretrained=g,token=private,dtype=x"
    headers: {Authorization: "Bearer private"}
"""


@pytest.mark.parametrize(
    ("mode", "engine"), [("server", "vllm"), ("offline", "vllm"), ("offline", "transformers")]
)
def test_secrets_are_kept_out_of_files_and_notes(
    mode: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("mode: server", f"mode: {mode}").replace("engine: vllm", f"engine: {engine}")
    text = text.replace("study_name: rates", "study_name: rates --token private")
    outside = 'runners: {vllm: "docker run -e HF_TOKEN=private img"}\nenv: {HF_TOKEN: private}\n'
    (tmp_path / "s.yaml").write_text(f"{text}{outside}{engine}:\n  engine:{SECRETS}")
    assert convert(tmp_path / "s.yaml", tmp_path) == 0
    source, printed = (tmp_path / "test_s.py").read_text(), capsys.readouterr().err
    assert "private" not in source + printed
    assert "1234567890" not in source + printed
    for notes in (source, printed):
        for key in ("hf_token", "api-key", "session_token.section.a"):
            assert re.search(
                rf"{engine}.engine.{key} = \*\*\*.*: it is a secret, and options are recorded", notes
            )
        holds = "it holds a secret, and options are recorded"
        assert re.search(rf'{engine}.engine.url = "https://\*\*\*@host/x".*: {holds}', notes)
        assert 'runners.vllm = "docker run -e HF_TOKEN=*** img": tests run where pytest runs' in notes
    assert '[{"token": "***"}]' in printed


def test_a_converted_load_runs(quick: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a real server, whose requests the record counts."""
    pytest.importorskip("aiohttp")
    study = quick.path / "small.yaml"
    text = STUDY.replace("arrival: poisson", "window_seconds: 0.4, slo: {ttft_ms: 5000}")
    study.write_text(text + "  vllm.sampling_params.ignore_eos: [true]\n")
    assert convert(study, quick.path, "--fallback=cpu") == 0
    capsys.readouterr()
    command = queueing(slots=8, service=0.02)
    options = (f"--energy-server-command={command}", "--energy-backend=server", "--energy-report")
    quick.runpytest("test_small.py", *options).assert_outcomes(passed=2)
    records = json.loads((quick.path / "energy.json").read_text())["records"]
    made = [record["backend"]["generation"] for record in records]
    assert [(each["request_rate"], each["num_requests"]) for each in made] == [(20.0, 8), (40.0, 16)]
    assert {each["slo"] for each in made} == {"TTFT <= 5 s for 99 %"}
    assert [record["rounds"][0]["requests"] for record in records] == [8, 16]
