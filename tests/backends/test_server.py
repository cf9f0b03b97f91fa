# SPDX-License-Identifier: Apache-2.0
"""The server backend against correct and faulty servers, each a real process on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.server import process as attached
from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.server.settings import (
    Address,
    ServerSettings,
    find_degrees,
    parse_local_url,
)
from pytest_llenergy.backends.tasks import Generation, GenerationParams, ServedLoad, ServeParams
from pytest_llenergy.errors import BackendError, ModelError

from .servers.start import loaded, running, scripted

pytest.importorskip("aiohttp")

Read = Callable[..., dict[str, Any]]


def generated(backend: ServerBackend, prompts: list[str], **params: Any) -> Generation:
    job = backend.prepare(prompts, GenerationParams.parse(params))
    job.before_round()
    return job.result(job.run())


def served(backend: ServerBackend, prompts: list[str], **params: Any) -> ServedLoad:
    job = backend.prepare_serve(prompts, ServeParams.parse(params))
    job.before_round()
    return job.result(job.run())


def refusal(kind: type[Exception] = BackendError, **options: Any) -> str:
    with pytest.raises(kind) as caught, loaded(**options):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_living(process: psutil.Process, pids: set[int]) -> bool:
    return process.pid in pids and process.info["status"] != psutil.STATUS_ZOMBIE


class TestAnswers:
    def test_the_model_of_the_run_is_asked_for_if_the_server_lists_it(self) -> None:
        for models, asked in (("tiny,owner/name", "owner/name"), ("tiny,owner/other", "tiny")):
            with loaded(command=scripted(models=models)) as (backend, info):
                assert info.options["api_model"] == asked
                assert generated(backend, ["abc"], max_new_tokens=1).texts == ["a"]

    def test_a_closed_loop_keeps_exactly_its_concurrency_in_flight(self) -> None:
        with loaded(command=scripted(step=0.02)) as (backend, _):
            made = served(backend, ["abc"], concurrency=2, num_requests=60, max_new_tokens=3)
        edges = [(each.start_ns or 0, 1) for each in made.requests]
        edges += [(each.last_token_ns or 0, -1) for each in made.requests]
        on_their_way, most = 0, 0
        for _, change in sorted(edges):
            on_their_way += change
            most = max(most, on_their_way)
        assert most == 2
        assert [span.name for span in made.spans] == ["ramp-up", "steady", "ramp-down"]
        assert sum(span.output_tokens or 0 for span in made.spans) == 180

    def test_a_server_that_closes_after_each_stream_loses_no_request(self) -> None:
        """Like llama.cpp's server, which claims to keep connections."""
        with loaded(command=scripted(fault="closes")) as (backend, _):
            made = served(backend, ["a"], concurrency=1, num_requests=20, max_new_tokens=2)
        assert made.output_tokens == 40


class TestFaults:
    def test_a_server_that_dies_is_reported_with_its_last_line(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        said = refusal(command=scripted(fault="dies"))
        assert said.endswith("ended with status 1 before GET /health gave 200: no memory for the model"), said
        assert "scripted server" in capfd.readouterr().out

    def test_a_wrong_model_name_lists_the_served_names(self) -> None:
        assert refusal(ModelError, command=scripted(), model="huge") == (
            "server: model 'huge': 404 from /v1/completions: The model `huge` does not exist.; name "
            'it with @pytest.mark.backend_options(model="NAME"); it serves: tiny'
        )

    def test_a_server_that_ignores_ignore_eos_is_detected(self) -> None:
        with loaded(command=scripted(short=1)) as (backend, _):
            assert generated(backend, ["a"], max_new_tokens=4).output_tokens == 4
            with pytest.raises(BackendError) as caught:
                generated(backend, ["a"], max_new_tokens=4, ignore_eos=True)
        assert str(caught.value) == (
            "server: request 1 of 1: 3 tokens instead of 4; the server ignores ignore_eos"
        )

    def test_contradictory_counts_give_no_token_timestamps(self) -> None:
        """Each chunk reports one token so far; at the end there are four."""
        with loaded(command=scripted(owner="vllm", fault="miscounts")) as (backend, _):
            (request,) = generated(backend, ["a"], max_new_tokens=4).requests
            made = served(backend, ["a"], concurrency=1, num_requests=2, max_new_tokens=4)
        assert not made.exact
        assert "doubtful" in [flag.name for flag in made.flags]
        assert (request.output_tokens, request.token_ns) == (4, ())
        assert request.first_token_ns is not None

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"do_sample": True, "top_k": 3}, "top_k; "),
            ({"stop_token_ids": [3]}, "stop_token_ids; "),
        ],
    )
    def test_what_a_server_does_not_support_is_refused(self, params: dict[str, Any], message: str) -> None:
        with (
            loaded(command=scripted()) as (backend, _),
            pytest.raises(BackendError, match=f"unknown servers do not support {message}"),
        ):
            generated(backend, ["a"], **params)

    def test_a_server_that_dies_during_a_request_is_reported(self) -> None:
        with loaded(command=scripted(step=30), timeout_s=60) as (backend, _):
            process = backend._process
            assert process is not None
            job = backend.prepare(["a"], GenerationParams.parse({"max_new_tokens": 2}))
            loop = job.server.client._loop
            loop.call_later(0.3, psutil.Process(process.pid).kill)
            outcome = job.run()
            with pytest.raises(BackendError, match=r"ended with signal SIGKILL: scripted server"):
                job.result(outcome)

    def test_the_listener_must_be_started_by_the_command(self) -> None:
        """Otherwise another server would answer and be measured."""
        with running(scripted()) as (url, process):
            port = url.rpartition(":")[2]
            said = refusal(command="sleep 60", url=url)
            assert said == f"server: port {port} is used by process {process.pid}; choose another"

    def test_children_of_a_server_are_killed(self) -> None:
        script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        words = scripted().split(" ", 1)
        with loaded(command=f"{words[0]} -c '{script}' {scripted()}", timeout_s=60) as (backend, _):
            process = backend._process
            assert process is not None
            pids = process.pids()
            assert len(pids) == 2
        deadline = time.monotonic() + 30
        # The child of a killed command is reaped by others.
        while living := [each.pid for each in psutil.process_iter(["status"]) if is_living(each, pids)]:
            assert time.monotonic() < deadline, living
            time.sleep(0.01)


class TestAttached:
    def test_a_running_server_is_found_by_its_port_and_not_stopped(self) -> None:
        with running(scripted()) as (url, process):
            with loaded(url=url) as (backend, info):
                (worker,) = backend.workers()
                assert (worker.pid, worker.attached) == (process.pid, True)
                assert info.options["attached"] is True
                assert info.options["command"] is None
                assert generated(backend, ["abc"], max_new_tokens=2).output_tokens == 2
            assert process.poll() is None

    def test_all_processes_of_a_server_are_found_from_its_listener(self) -> None:
        """A launcher in the same process group is part of it; the shell that started both is not."""
        script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        words = scripted().split(" ", 1)
        with running(f"{words[0]} -c '{script}' {scripted()}") as (url, process):
            family = attached.find_family(parse_local_url(url))
            assert family.root == process.pid
            assert len(family.pids()) == 2

    def test_an_unknown_server_process_is_flagged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attached, "find_listeners", lambda _address: set())
        with running(scripted()) as (url, _), loaded(url=url) as (backend, _):
            assert [worker.pid for worker in backend.workers()] == [0]
            (flag,) = generated(backend, ["abc"], max_new_tokens=2).flags
        assert flag.name == "gpu-processes"
        assert "is not visible, such as another user's process" in flag.detail

    def test_a_server_on_a_gpu_needs_a_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attached, "GPU_FILES", ("/dev/null",))
        with running(scripted()) as (url, process):
            assert refusal(url=url) == (
                f"server: process {process.pid} at {url} uses a GPU, but this test has leased none; "
                "mark it with @pytest.mark.gpus(n)"
            )


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "server: neither a command nor a url; give with_options(command=...) or url"),
            (
                {"command": "serve --port 80"},
                "server: the command has no placeholder for the port; add {port}, or give the url as well",
            ),
            ({"command": "serve 'x"}, "server: the command cannot be read: No closing quotation"),
            (
                {"url": "http://192.0.2.1:8000"},
                "server: url 'http://192.0.2.1:8000' is another host (192.0.2.1), whose energy cannot be "
                "measured here; run the tests there",
            ),
            (
                {"command": "serve {port}", "key_env": "NO_SUCH_VARIABLE"},
                "server: the environment has no variable of the name that key_env gives",
            ),
            (
                {"url": "127.0.0.1:8000"},
                "server: url '127.0.0.1:8000', needs a form such as http://127.0.0.1:8000",
            ),
            ({"url": "http://127.0.0.1:x"}, "server: url 'http://127.0.0.1:x': Port could not be cast"),
        ],
    )
    def test_invalid_settings_give_a_one_line_error(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(BackendError) as caught:
            ServerSettings.parse(options)
        assert str(caught.value).startswith(message)

    def test_own_addresses_are_this_host(self) -> None:
        assert parse_local_url("http://localhost:8000/v1") == Address(
            parse_local_url("http://localhost").host, 8000
        )
        assert parse_local_url("http://127.0.0.1").port == 80
        assert parse_local_url("https://127.0.0.1").url == "https://127.0.0.1:443"
        assert parse_local_url("http://0.0.0.0:8000").url == "http://127.0.0.1:8000"
        assert parse_local_url("http://[::]:8000").url == "http://[::1]:8000"
        assert parse_local_url("http://[::1]:8000").url == "http://[::1]:8000"

    def test_placeholders_are_replaced_and_other_braces_kept(self) -> None:
        settings = ServerSettings.parse({"command": "serve {model} --port {port} --json '{\"a\": 1}'"})
        assert settings.fill_in(model="/a b/m", port="80") == [
            *("serve", "/a b/m", "--port", "80", "--json", '{"a": 1}')
        ]

    @pytest.mark.parametrize(
        ("command", "degrees"),
        [
            ("vllm serve m --tensor-parallel-size 4 -pp=2", {"tensor": 4, "pipeline": 2}),
            ("python -m sglang.launch_server --tp-size 8 --dp 8 --enable-dp-attention", {"tensor": 8}),
            ("trtllm-serve m --tp_size 2 --pp_size 1", {"tensor": 2}),
            ("text-generation-launcher --num-shard 2 --port 4", {"tensor": 2}),
            ("llama-server -m m --port 4 -np 4", {}),
            ("bash -c 'vllm serve m -tp 2 & vllm serve m -tp 2'", {}),
        ],
    )
    def test_degrees_of_parallelism_are_read_from_the_command(
        self, command: str, degrees: dict[str, int]
    ) -> None:
        assert find_degrees(command.split()) == degrees
