# SPDX-License-Identifier: Apache-2.0
"""Tests on a server, from test file to record: options, processes, and what is left afterwards."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.ranks.usage import BackendProcesses, cpu_time_used_s

from ..ranks.survivors import await_none, marked, survivors
from .servers.start import orphan, scripted

pytest.importorskip("aiohttp")

Read = Callable[..., dict[str, Any]]

SERVES = """
def test_it(energy, backend):
    run = energy(backend.serve, ["abc", "hello"], request_rate=20.0, num_requests=12, max_new_tokens=4)
    assert run.result.output_tokens == 48
"""
QUICK = ["--energy-report", "--energy-backend=server"]


def test_an_overloaded_server_is_saturated_in_table_record_and_gate(
    quick: pytest.Pytester, read_report: Read
) -> None:
    """One request takes 60 ms, so that 17 requests/s are possible; 50 are asked for."""
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_gate(metric="steady_energy_per_output_token_j", budget="1 kJ")
        def test_it(energy, backend):
            energy(backend.serve, ["abc"], request_rate=50.0, num_requests=24, max_new_tokens=2)
        """
    )
    columns = "--energy-columns=energy_j,steady_energy_per_output_token_j,steady_output_tokens_per_s"
    command = scripted(slots=1, first=0.03, step=0.03)
    options = [*QUICK, columns, f"--energy-server={command}", "--energy-html=page.html"]
    result = quick.runpytest(*options)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"test_it server \(failed\) .* J +saturated +saturated$"])
    result.stdout.fnmatch_lines(["saturated: test_it server: * of * rounds: achieved * of 50 requests/s;*"])
    result.stdout.fnmatch_lines(
        ["*energy_gate: steady_energy_per_output_token_j has no value (* rounds: saturated: achieved *"]
    )
    (record,) = read_report()["records"]
    for round_ in record["rounds"]:
        assert round_["phases"] == []
        assert "saturated" in [flag["name"] for flag in round_["flags"]]
    for name in ("steady_energy_per_output_token_j", "steady_output_tokens_per_s"):
        assert record["metrics"][name]["value"] is None
        achieved = re.search(r"saturated: achieved ([\d.]+) of 50 ", record["metrics"][name]["reason"])
        assert achieved is not None
        # Less on a busy host.
        assert float(achieved[1]) < 20
    assert record["metrics"]["energy_per_output_token_j"]["value"] > 0
    assert "saturated: achieved " in (quick.path / "page.html").read_text()


def test_a_server_that_refuses_what_is_too_much_has_no_steady_figure(
    quick: pytest.Pytester, read_report: Read
) -> None:
    """40 requests/s are possible, and 160 are asked for: two are served at a time, and two wait."""
    quick.makepyfile(
        """
        def test_it(energy, backend):
            energy(
                backend.serve, ["abc"], request_rate=160.0, num_requests=80, max_new_tokens=2,
                max_failures=79)
        """
    )
    command = scripted(slots=2, first=0.025, step=0.025, queue=2)
    result = quick.runpytest(*QUICK, f"--energy-server={command}")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [r"saturated: test_it server: . of . rounds: \d\d of 80 requests failed, asked for.*"]
    )
    (record,) = read_report()["records"]
    for round_ in record["rounds"]:
        assert round_["phases"] == []
        (detail,) = (flag["detail"] for flag in round_["flags"] if flag["name"] == "saturated")
        failures = len(round_["served"]["failures"])
        assert detail.startswith(
            f"{failures} of 80 requests failed, asked for 160 requests/s; lower the rate"
        )
    assert record["metrics"]["steady_energy_per_output_token_j"]["value"] is None


def test_stalls_show_in_the_percentiles_of_gaps_and_not_of_requests(
    quick: pytest.Pytester, read_report: Read
) -> None:
    """Every fourth request pauses once for half a second: one gap in 76."""
    quick.makepyfile(
        """
        def test_it(energy, backend):
            energy(backend.serve, ["abc"], concurrency=8, num_requests=32, max_new_tokens=20)
        """
    )
    command = scripted(first=0.01, step=0.01, stall=0.49)
    quick.runpytest(*QUICK, f"--energy-server={command}").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    metrics = record["metrics"]
    number = len(record["rounds"])
    gaps = {each: metrics[f"inter_token_latency_{each}_s"] for each in ("p50", "p99")}
    # The server sleeps at least this long; on a busy host it sleeps longer.
    assert gaps["p50"]["value"] >= 0.0099
    assert gaps["p99"]["value"] >= 0.49
    assert (gaps["p99"]["n"], gaps["p99"]["rounds"]) == (32 * 19 * number, number)
    per_token = metrics["time_per_output_token_p99_s"]
    assert per_token["value"] < gaps["p99"]["value"] / 2
    assert (per_token["n"], per_token["rounds"]) == (32 * number, number)
    assert metrics["time_to_first_token_p99_s"]["n"] == 32 * number
    assert metrics["requests_per_s"]["n"] == number


def test_without_configuration_the_server_is_left_out_unless_named(quick: pytest.Pytester) -> None:
    quick.makepyfile("def test_it(energy, backend): pass\n")
    quick.runpytest("--energy-model=random:llama-tiny", "-rs").stdout.no_fnmatch_line("*energy-server-*")
    result = quick.runpytest("--energy-backend=server")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    actual = " ".join(result.stderr.str().split())
    assert "server is not available: give --energy-server='llama-server -m {model}" in actual
    assert "or --energy-server=http://127.0.0.1:8000 to use one that runs on this host" in actual


def test_a_remote_server_is_refused_at_once(quick: pytest.Pytester) -> None:
    quick.makepyfile(SERVES)
    result = quick.runpytest("--energy-server=http://192.0.2.1:8000")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --energy-server: url 'http://192.0.2.1:8000' is another host*"])


def test_other_backends_do_not_serve(quick: pytest.Pytester) -> None:
    quick.makepyfile(SERVES)
    result = quick.runpytest("--energy-model=random:llama-tiny", "--energy-backend=transformers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["BackendError: transformers does not serve; it does: generate, embed"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_server_is_left_when_pytest_is_killed(quick: pytest.Pytester, number: signal.Signals) -> None:
    """The server has its own session and a child; neither outlives the run."""
    quick.makepyfile(
        """
        import pathlib
        def test_it(energy, backend):
            backend.generate(["abc"], max_new_tokens=1)
            pathlib.Path("loaded").touch()
            backend.generate(["abc"], max_new_tokens=2)
        """
    )
    script = "import os, subprocess, sys; os.setsid(); subprocess.run(sys.argv[1:])"
    command = scripted(step=300).split(" ", 1)
    whole = f"{command[0]} -c '{script}' {' '.join(command)}"
    with marked() as mark:
        args = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--energy-backend=server"]
        with subprocess.Popen(
            [*args, f"--energy-server={whole}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as pytest_:
            while not Path("loaded").exists():
                assert pytest_.poll() is None
                time.sleep(0.05)
            assert sum("scripted.py" in line for line in survivors(mark).values()) >= 2
            pytest_.send_signal(number)
        assert await_none(mark) == {}


class TestCpuTime:
    BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass\n"

    def test_cpu_time_of_an_attached_server_counts(self) -> None:
        with orphan([sys.executable, "-c", self.BUSY]) as pid:
            worker = BackendWorker(pid=pid, rank=0, world_size=1, attached=True)
            use = BackendProcesses([worker])
            assert use.servers == (pid,)
            before, theirs_s = use.cpu_times_s(), psutil.Process(pid).cpu_times().user
            while psutil.Process(pid).cpu_times().user < theirs_s + 0.3:
                time.sleep(0.05)
            assert cpu_time_used_s(before, use.cpu_times_s()) >= 0.29

    def test_cpu_time_of_exited_children_counts(self) -> None:
        burn = "import time\nwhile time.process_time() < 0.3: pass\n"
        use = BackendProcesses([BackendWorker(pid=1, rank=0, world_size=1)])
        with subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
                "print('done', flush=True)\ntime.sleep(60)",
            ],
            stdout=subprocess.PIPE,
        ) as child:
            before = use.cpu_times_s()
            assert child.stdout is not None
            child.stdout.readline()
            assert cpu_time_used_s(before, use.cpu_times_s()) >= 0.25
            child.kill()

    def test_a_rank_without_workers_counts_its_own_cpu_time(self) -> None:
        assert BackendProcesses().pids() == frozenset()
        assert BackendProcesses().servers == ()


@pytest.mark.slow
def test_traffic_is_recorded_in_few_words(quick: pytest.Pytester, read_report: Read) -> None:
    """Lengths, waits, cache hits and failures of each request; of a long trace only a digest."""
    quick.makepyfile(
        """
        import json, pathlib
        from pytest_llenergy.backends.traffic import Request, dataset, synthetic

        def test_trace(energy, backend):
            rows = [{"timestamp": 20 * n, "input_length": 30 + n, "output_length": 2} for n in range(40)]
            path = pathlib.Path("trace.jsonl")
            path.write_text("".join(json.dumps(row) + "\\n" for row in rows))
            run = energy(backend.serve, dataset(path, time_scale=0.5), prefix_cache=True, concurrency=30,
                         arrivals="trace")
            assert run.result.output_tokens == 80

        def test_failures(energy, backend):
            requests = [Request(prompt="a"), Request(prompt="!500"), Request(prompt="bc")]
            energy(backend.serve, requests, concurrency=1, max_new_tokens=2, max_failures=1)

        def test_too_many(energy, backend):
            energy(backend.serve, ["a", "!500"], concurrency=1, num_requests=2, max_new_tokens=2)
        """
    )
    command = scripted(cached="prefix", first=0.01)
    result = quick.runpytest(*QUICK, f"--energy-server={command}")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["BackendError: server: request 2 of 2: 500 from /v1/completions: out of memory; 1 request *"]
    )
    trace, failing, _ = read_report()["records"]
    generation = trace["backend"]["generation"]
    assert generation["requests"] == "40 requests of trace.jsonl, times x 0.5"
    assert generation["max_new_tokens"] == "of each request"
    assert generation["trace"].startswith("40 values to 0.39, digest ")
    for round_ in trace["rounds"]:
        served = round_["served"]
        assert served["input_tokens"] == [30 + n for n in range(40)]
        assert len(served["waited_s"]) == len(served["cached_tokens"]) == 40
        assert served["failures"] == []
    for round_ in failing["rounds"]:
        assert round_["requests"] == 2
        assert (round_["tokens"]["input"], round_["tokens"]["output"]) == (3, 4)
        assert round_["served"]["input_tokens"] == [1, 2]
        assert round_["served"]["failures"] == [
            "server: request 2 of 3: 500 from /v1/completions: out of memory"
        ]
        (flag,) = (flag for flag in round_["flags"] if flag["name"] == "failed-request")
        assert flag["severity"] == "warning"
