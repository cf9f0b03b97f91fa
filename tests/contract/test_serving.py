# SPDX-License-Identifier: Apache-2.0
"""Served loads on a server of known times and answers."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .project import QUICK, Ended, Outcome, Project, flags

pytest.importorskip("aiohttp")

SERVER = Path(__file__).with_name("server.py")

#: Six requests of 5 + 3 input tokens in turn, 8 output tokens each.
LOAD = """
def test_load(energy, backend):
    prompts = ["one two three four five", "one two three"]
    if "long" in backend.name:
        prompts = ["word " * 1000]
    energy(backend.serve, prompts, {load}, num_requests=6, max_new_tokens=8{more})
"""


def command(**options: Any) -> str:
    """Return the option that starts the server."""
    changes = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return f"--energy-server={shlex.join([sys.executable, str(SERVER), '{port}', *changes])}"


def serve(
    project: Project,
    load: str = "concurrency=2",
    more: str = "",
    more_options: Sequence[str] = (),
    **options: Any,
) -> Outcome:
    """Run a load on a server, with a report."""
    project.write("test_load.py", LOAD.format(load=load, more=more))
    base = ["--energy-report", "--energy-backend=server", project.meter()]
    return project.pytest(*base, *more_options, command(**options))


@pytest.fixture(scope="module")
def loaded(module_project: Project) -> dict[str, Any]:
    """The record of an open load: 20 requests per second, 40 ms to the first token, 10 ms a token."""
    each = ["--energy-requests"]
    serve(module_project, "request_rate=20.0", more_options=each, usage="so far").check(passed=1)
    (record,) = module_project.records().values()
    return record


def test_the_load_and_its_tokens_requests_and_energy_are_in_the_record(
    loaded: dict[str, Any], module_project: Project
) -> None:
    for each in loaded["rounds"]:
        assert each["requests"] == 6
        assert (each["tokens"]["input"], each["tokens"]["output"]) == (24, 48)
    metrics = {name: each["value"] for name, each in loaded["metrics"].items()}
    assert metrics["energy_per_output_token_j"] == pytest.approx(metrics["energy_j"] / 48, rel=0.02)
    assert metrics["energy_j"] == pytest.approx(10 * metrics["duration_s"], rel=0.2)
    asked = loaded["backend"]["generation"]
    assert (asked["request_rate"], asked["num_requests"], asked["max_new_tokens"]) == (20.0, 6, 8)
    assert loaded["backend"]["name"] == "server"
    assert module_project.survivors() == {}


def test_the_energy_of_a_round_is_shared_among_its_requests(loaded: dict[str, Any]) -> None:
    assert loaded["metrics"]["energy_per_request_p50_j"]["value"] > 0
    for each in loaded["rounds"]:
        found = each["request_energies"]
        assert (len(found["energy_j"]), len(found["energy_u_j"])) == (6, 6)
        assert sum(found["energy_j"]) == pytest.approx(each["energy_j"], rel=1e-9)
        assert found["p50_j"] <= found["p90_j"] <= found["p99_j"] <= max(found["energy_j"])


def test_latencies_are_those_of_the_server(loaded: dict[str, Any]) -> None:
    """None is shorter; a busy machine makes some longer."""
    metrics = {name: each["value"] for name, each in loaded["metrics"].items()}
    assert metrics["time_to_first_token_p50_s"] >= 0.04
    assert metrics["end_to_end_latency_p50_s"] >= 0.04 + 7 * 0.01
    assert metrics["time_to_first_token_p99_s"] >= metrics["time_to_first_token_p50_s"]
    for each in loaded["rounds"]:
        assert min(each["served"]["time_to_first_token_s"]) >= 0.0395
        assert min(each["served"]["end_to_end_latency_s"]) >= 0.1095
        sent = each["served"]["sent_s"]
        assert sent == sorted(sent)
        assert sent[-1] >= 5 / 20 - 1e-3


def test_a_cached_prompt_makes_rounds_invalid(project: Project) -> None:
    serve(project, cached=2)
    (record,) = project.records().values()
    assert record["status"] != "measured"
    assert "prefix-cache" in flags(record)
    assert record["metrics"].get("energy_per_output_token_j", {"value": None})["value"] is None


def test_a_failed_request_fails_the_test_unless_allowed(project: Project) -> None:
    ended = serve(project, refuse_after=4)
    assert ended.ret == 1
    assert "503" in ended.out
    assert "max_failures" in ended.text
    assert len([line for line in ended.lines if "Error" in line]) <= 3


def test_an_overload_has_no_steady_figure(project: Project) -> None:
    """Two at a time take 0.11 s each, and 200 requests a second are asked for: the first tokens are late."""
    load = "request_rate=200.0, concurrency=2"
    source = LOAD.format(load=load, more="").replace("num_requests=6", "num_requests=30")
    project.write("test_load.py", source)
    ended = project.pytest("--energy-report", "--energy-backend=server", project.meter(), command())
    (record,) = project.records().values()
    steady = record["metrics"].get("steady_energy_per_output_token_j")
    assert steady is None or steady["value"] is None, ended.out
    assert {"saturated", "short-load"} & flags(record)


CURVE = """
from pytest_llenergy import slo

def test_curve(energy, backend):
    run = energy.load_curve(
        backend.serve, ["one two three"], request_rates=[4, 12], slo=slo(ttft=5.0, attainment=0.5),
        num_requests=8, max_new_tokens=3)
    assert [point.request_rate for point in run.curve.points] == [4, 12]
"""


def test_a_curve_over_load_has_a_point_for_each_rate(project: Project) -> None:
    project.write("test_curve.py", CURVE)
    project.pytest("--energy-report", "--energy-backend=server", project.meter(), command()).check(passed=1)
    (record,) = project.records().values()
    points = record["load_curve"]["points"]
    assert [point["request_rate"] for point in points] == [4, 12]
    for point in points:
        assert point["energy_per_output_token_j"] is None or point["energy_per_output_token_j"] > 0
        assert point["end_to_end_latency_p50_s"] >= 0.04 + 2 * 0.01


def test_a_server_that_cannot_start_shows_its_output(project: Project) -> None:
    project.write("test_load.py", LOAD.format(load="concurrency=1", more=""))
    words = shlex.join([sys.executable, "-c", "print('no such model'); raise SystemExit(3)", "{port}"])
    ended = project.pytest("--energy-backend=server", f"--energy-server={words}", project.meter())
    assert ended.ret == 1
    assert "no such model" in ended.out
    assert project.survivors() == {}


def test_a_running_server_is_used_and_stays(project: Project) -> None:
    with running(project) as port:
        project.write("test_load.py", LOAD.format(load="concurrency=2", more=""))
        url = f"--energy-server=http://0.0.0.0:{port}/v1"
        project.pytest("--energy-report", "--energy-backend=server", url, project.meter()).check(passed=1)


@contextmanager
def running(project: Project) -> Iterator[int]:
    """Start the server; it must still run at the end."""
    port = free_port()
    process = project.start(sys.executable, str(SERVER), str(port))
    await_port(port)
    try:
        yield port
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def await_port(port: int) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("no server")


@dataclass(frozen=True)
class Served:
    """What became of one load on several servers: by the name of the server."""

    ended: dict[str, Ended]
    records: dict[str, dict[str, Any]]
    said: str

    def why(self, name: str) -> str:
        assert self.ended[name].outcome == "failure", self.ended[name]
        return self.ended[name].why


def serve_all(project: Project, servers: dict[str, dict[str, Any]], more: str = "") -> Served:
    """Run a load on each of several servers."""
    project.write("test_load.py", LOAD.format(load="concurrency=2", more=more))
    named = [
        command(first=0.001, step=0.001, **options).replace("=", f"={name}=", 1)
        for name, options in servers.items()
    ]
    chosen = f"--energy-backend={','.join(servers)}"
    ended = project.suite(chosen, *named, project.meter())
    by_name = {name.partition("[")[2].rstrip("]"): each for name, each in ended.items()}
    records = {name.partition("[")[2].rstrip("]"): each for name, each in project.records().items()}
    return Served(by_name, records, project.said)


STREAMS: dict[str, dict[str, Any]] = {
    "null-error": {"members": {"error": None}},
    "cr": {"newline": "\r", "members": {"logprob": float("nan")}},
    "bom": {"begin": "efbbbf", "newline": "\r\n", "done": "data: [DONE]", "linger": 600},
    "comments": {"begin": b": ping\n\nevent: open\ndata:\n\n".hex(), "done": ""},
    "lines": {"begin": b'data: {"choices":\ndata: []}\n\nid\n\n'.hex(), "token": "\ud83d"},
    "long-whole": {},
    "no-health": {"gets": {"/v1/models": 200}},
}


def test_streams_of_the_standard_and_lenient_json(project: Project) -> None:
    served = serve_all(project, STREAMS)
    for name in STREAMS:
        assert served.ended[name].outcome == "passed", (name, served.ended[name])
        assert served.records[name]["rounds"][0]["tokens"]["output"] == 48
        assert "failed-request" not in flags(served.records[name])
        # On a busy machine another doubt is that a counter was read late.
        assert "contradict" not in json.dumps(served.records[name]["rounds"])


ODD = {
    "cut": '{"choices": [{"index": 0, "te',
    "null": '{"choices": [null]}',
    "error": '{"error": {"message": "lost"}}',
}


def test_an_odd_chunk_is_a_failed_request(project: Project) -> None:
    """One of each six, after the one that finds out what the server can do."""
    options = {name: {"odd": 6, "event": event} for name, event in ODD.items()}
    served = serve_all(project, options, ", max_failures=3")
    for name in ODD:
        assert served.ended[name].outcome == "passed", (name, served.ended[name])
        record = served.records[name]
        assert "failed-request" in flags(record)
        for each in record["rounds"]:
            assert each["tokens"]["output"] == 8 * (6 - len(each["served"]["failures"]))


def test_several_tokens_in_a_chunk(project: Project) -> None:
    """As with speculative decoding: tokens are those of usage; their times are known if each chunk counts."""
    cases: dict[str, dict[str, Any]] = {"counted": {"usage": "so far", "burst": 3}, "uncounted": {"burst": 3}}
    records = serve_all(project, cases).records
    for name, is_known in (("counted", True), ("uncounted", False)):
        for each in records[name]["rounds"]:
            assert each["tokens"]["output"] == 48
            assert (each["served"]["token_gaps"] is not None) is is_known


def test_answers_that_come_whole_are_flagged(project: Project) -> None:
    serve(project, burst=8, usage="so far").check(passed=1)
    (record,) = project.records().values()
    assert all("came whole" in str(round_["flags"]) for round_ in record["rounds"])


def test_chat_is_another_endpoint(project: Project) -> None:
    """Which may be the only one."""
    both, alone = serve_all(
        project, {"both": {}, "alone": {"endpoints": ["chat/completions"]}}, ", endpoint='chat'"
    ).records.values()
    for record in (both, alone):
        assert record["rounds"][0]["tokens"]["output"] == 48


def test_an_api_key_of_the_environment_is_sent_and_never_shown(project: Project) -> None:
    """Nor where the server echoes it."""
    project.env |= {"OPENAI_API_KEY": "hunter1", "MY_KEY": "hunter2"}
    served = serve_all(project, {"right": {"key": "hunter1"}, "wrong": {"key": "hunter2"}})
    assert served.ended["right"].outcome == "passed"
    assert "401" in served.why("wrong")
    assert "--energy-server-key-env" in served.why("wrong")
    assert "Bearer ***" in served.why("wrong")
    assert "hunter" not in served.said + project.text("energy.json") + project.text("junit.xml")
    project.write("pytest.ini", f"{QUICK}energy_server_key_env = MY_KEY\n")
    serve(project, key="hunter2").check(passed=1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-key": ({"key": "hunter2"}, "401 from /v1/models: no such key: None; the server needs an API key"),
    "page": ({"page": True}, "an HTML page"),
    "no-stream": ({"streams": False}, "must support stream=true"),
    "no-endpoint": ({"endpoints": []}, "404 from /v1/completions: not found"),
    "chats": ({"endpoints": ["chat/completions"]}, "endpoint='chat'"),
    "full": ({"context": 10}, "finish_reason is 'length': the context is full"),
    "moved": ({"redirect": 1}, "307 from /v1/completions to http://127.0.0.1:1/v1/completions"),
    "long": ({"cuts": 600}, "600 tokens in a prompt of 5000 characters, and 500 and 500 in its halves"),
    "per-chunk": ({"usage": "of the chunk"}, "usage counts 1 tokens, but 8 chunks have text"),
}


def test_what_cannot_be_measured_is_one_line_with_its_cause(project: Project) -> None:
    served = serve_all(project, {name: options for name, (options, _) in REFUSED.items()})
    for name, (_, reason) in REFUSED.items():
        assert reason in served.why(name)
    assert "Traceback" not in served.said
    assert project.survivors() == {}


def test_a_redirection_is_not_followed(project: Project) -> None:
    with running(project) as port:
        ended = serve(project, redirect=port)
    ended.check(failed=1)
    assert "307" in ended.out
