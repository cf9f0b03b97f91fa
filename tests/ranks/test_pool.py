# SPDX-License-Identifier: Apache-2.0
"""Which ranks the next test gets: warm ones as long as it can share them, otherwise new ones."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.isolation import Isolation
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.rank_log import LogFile
from pytest_llenergy.ranks.workload import call_workload

from .groups import plan
from .no_torch import without_torch

Read = Callable[..., dict[str, Any]]

#: Importable in the ranks, which have the search path of this process.
BACKEND_CODE = """
from pytest_llenergy.record.record import BackendInfo

class Loaded:
    alive = 0
    def __init__(self):
        Loaded.alive += 1
        self.me = self
    def __del__(self):
        Loaded.alive -= 1

class CountingBackend:
    def load(self, model, options, context):
        self.loaded = Loaded()
        return BackendInfo(name="counting", version="1", model=f"{model.label} of {Loaded.alive}")
    def synchronize(self): pass
    def close(self):
        self.loaded = None
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendSpec:
    (tmp_path / "counting_backend.py").write_text(BACKEND_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return BackendSpec("counting", "counting_backend:CountingBackend", (), "", Capabilities(data=True))


def model(name: str) -> ModelSource:
    return ModelSource(kind="directory", location=f"/{name}")


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    isolation: Isolation = getattr(request, "param", "backend")
    pool = RankPool(60.0, "spawn", isolation)
    yield pool
    pool.close()


def call(pool: RankPool, function: Callable[..., Any] | str, *args: Any, n: int = 1) -> list[Any]:
    """Call a function in the ranks of a test that then ends."""
    workload = call_workload(pool.get_ranks(plan(n)), function, args, {}, 60)
    workload.run_round()
    results = workload.results()
    pool.finish_test()
    return results


def pids(pool: RankPool, n: int = 1) -> list[Any]:
    return call(pool, os.getpid, n=n)


def variable(name: str) -> str | None:
    return os.environ.get(name)


class TestSharing:
    def test_equal_tests_share_ranks(self, pool: RankPool) -> None:
        assert pids(pool) == pids(pool)

    def test_another_number_of_ranks_needs_new_ranks(self, pool: RankPool) -> None:
        assert set(pids(pool)).isdisjoint(pids(pool, n=2))

    def test_another_environment_needs_new_ranks(
        self, pool: RankPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = pids(pool)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        second = pids(pool)
        assert first != second
        assert call(pool, variable, "HF_HUB_OFFLINE") == ["0"]
        monkeypatch.delenv("HF_HUB_OFFLINE")
        assert pids(pool) not in (first, second)

    def test_another_directory_or_search_path_needs_new_ranks(
        self, pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        first = pids(pool)
        monkeypatch.chdir(tmp_path)
        assert call(pool, Path.cwd) == [tmp_path]
        (tmp_path / "module_of_the_test.py").write_text("def here(): return 'here'")
        monkeypatch.syspath_prepend(tmp_path)
        assert call(pool, "module_of_the_test:here") == ["here"]
        monkeypatch.undo()
        assert pids(pool) != first

    def test_the_variable_of_the_running_test_needs_no_new_ranks(
        self, pool: RankPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = pids(pool)
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another (call)")
        assert pids(pool) == first
        assert call(pool, variable, "PYTEST_CURRENT_TEST") == [None]

    @pytest.mark.parametrize("pool", ["test"], indirect=True)
    def test_isolation_test_gives_each_test_new_ranks(self, pool: RankPool) -> None:
        assert pids(pool) != pids(pool)

    @pytest.mark.parametrize(("pool", "same"), [("backend", False), ("run", True)], indirect=["pool"])
    def test_isolation_decides_whether_another_model_needs_new_ranks(
        self, pool: RankPool, spec: BackendSpec, same: bool
    ) -> None:
        groups = []
        for name in ("one", "two"):
            group, info = pool.get_loaded(plan(1), Load.from_options(spec, model(name), {}))
            # The first is gone when the second is loaded.
            assert info.model == f"{name} of 1"
            groups.append(group.ranks[0].pid)
            pool.finish_test()
        assert (groups[0] == groups[1]) is same

    def test_start_and_load_times_count_for_the_first_test_only(
        self, pool: RankPool, spec: BackendSpec
    ) -> None:
        waits = []
        for _ in range(2):
            group, info = pool.get_loaded(plan(1), Load.from_options(spec, model("one"), {}))
            waits.append((group.start_s, info.load_s))
            pool.finish_test()
        assert waits[0][0] > 0
        assert waits[0][1] is not None
        assert waits[0][1] > 0
        assert waits[1] == (0.0, 0.0)


class TestCleanliness:
    def test_environment_and_directory_are_restored(self, pool: RankPool) -> None:
        def litter() -> int:
            import os

            os.environ["LEFT"] = "behind"
            os.environ.pop("PATH")
            os.chdir("/")
            return os.getpid()

        def look() -> tuple[int, str | None, str | None, Path]:
            import os

            return os.getpid(), os.environ.get("LEFT"), os.environ.get("PATH"), Path.cwd()

        (pid,) = call(pool, litter)
        assert call(pool, look) == [(pid, None, os.environ["PATH"], Path.cwd())]

    def test_ranks_that_keep_memory_are_replaced(self, pool: RankPool) -> None:
        def keep(size: int) -> int:
            import os
            import sys

            # As a cache in a module does.
            sys.modules["os"].kept = [b"x" * size]  # type: ignore[attr-defined]
            return os.getpid()

        (first,) = call(pool, keep, 1)
        assert call(pool, keep, 20 << 20) == [first]
        assert call(pool, keep, 600 << 20) == [first]
        assert call(pool, keep, 1) != [first]

    @pytest.mark.parametrize(
        "code",
        [
            "import sys; sys.path.insert(0, '/somewhere')",
            "import os; os.sched_setaffinity(0, {1 - min(os.sched_getaffinity(0))})",
            "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN)",
        ],
    )
    def test_ranks_with_changed_settings_are_replaced(self, pool: RankPool, code: str) -> None:
        first = pids(pool)
        call(pool, exec, code)
        assert pids(pool) != first

    def test_ranks_with_a_destroyed_process_group_are_replaced(self) -> None:
        def leave() -> int:
            import os

            import torch.distributed as dist

            dist.destroy_process_group()
            return os.getpid()

        pool = RankPool(60.0, "forkserver", "backend")
        torch = plan(1, Capabilities(framework="torch", process_group=True, data=True))
        try:
            found = []
            for function in (os.getpid, leave, os.getpid):
                workload = call_workload(pool.get_ranks(torch), function, (), {}, 60)
                workload.run_round()
                found += workload.results()
                pool.finish_test()
        finally:
            pool.close()
        assert found[0] == found[1] != found[2]

    def test_ranks_that_died_between_tests_are_replaced(self, pool: RankPool) -> None:
        group = pool.get_ranks(plan(1))
        os.kill(group.ranks[0].pid, 9)
        pool.finish_test()
        assert pids(pool) != [group.ranks[0].pid]

    def test_ranks_that_died_while_idle_are_replaced(self, pool: RankPool) -> None:
        first = pids(pool, n=2)
        os.kill(first[1], 9)
        # Its parent, which is another process, has to see it first.
        while psutil.pid_exists(first[1]):
            time.sleep(0.01)
        assert set(pids(pool, n=2)).isdisjoint(first)


#: A start method that is not the platform's default.
CHOSEN = "forkserver" if multiprocessing.get_all_start_methods()[0] == "fork" else "fork"

HAZARD = """
import multiprocessing
{hazard}
def test_it(workers):
    assert workers.run(max, 1, 2) == [2]
def test_again(workers):
    assert workers.run(max, 1, 2) == [2]
"""


def test_a_start_method_that_ranks_ignore_causes_one_warning(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HAZARD.format(hazard=f"multiprocessing.set_start_method({CHOSEN!r})"))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--energy-isolation=test")
    result.assert_outcomes(passed=2, warnings=1)
    message = f"multiprocessing's start method was set to '{CHOSEN}' in pytest's process; ranks do"
    # At the line that started the ranks.
    line = "    assert workers.run(max, 1, 2) == [[]2]"
    result.stdout.fnmatch_lines([f"*.py:4: LLEnergyWarning: {message} *", line], consecutive=True)


def test_cuda_initialised_in_pytests_process_causes_a_warning(pytester: pytest.Pytester) -> None:
    hazard = "import torch; torch.cuda.is_initialized = lambda: True"
    pytester.makepyfile(HAZARD.format(hazard=hazard))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--energy-isolation=test")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*LLEnergyWarning: CUDA is initialised in pytest's own process, by a *"])


def test_the_default_start_method_causes_no_warning(pytester: pytest.Pytester) -> None:
    hazard = "multiprocessing.Queue(); assert multiprocessing.get_start_method(allow_none=True)"
    pytester.makepyfile(HAZARD.format(hazard=hazard))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=2, warnings=0)


def test_output_of_ranks_is_kept_in_the_log_directory(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pytest
        @pytest.mark.gpus(2, fallback="cpu")
        def test_it(workers):
            workers.run(lambda: print("this is rank", os.environ["RANK"]))
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--energy-rank-logs=logs").assert_outcomes(
        passed=1
    )
    logs = sorted((pytester.path / "logs").glob("*/rank*.log"))
    assert [log.name for log in logs] == ["rank0.log", "rank1.log"]
    assert ["this is rank 0" in log.read_text() for log in logs] == [True, False]


def test_a_later_run_with_the_same_pid_keeps_the_logs_of_the_first(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        host = LocalHost("spawn", tmp_path / "logs")
        host.prepare("7-0", dict(os.environ), (), 60.0)
        started = [host.start("7-0", rank, dict(os.environ), {}) for rank in range(2)]
        for each in started:
            each.channel.close()
            assert isinstance(each.log, LogFile)
            each.log.path.write_text(str(number))
            found.append(each.log.path)
        host.kill("7-0")
        host.close()
    assert len({log.parent for log in found}) == 2
    assert [log.read_text()[:1] for log in found] == ["0", "0", "1", "1"]


def test_logs_of_warm_ranks_do_not_accumulate(pool: RankPool) -> None:
    def say() -> int:
        import os

        print("x" * 1_000_000)
        return os.fstat(1).st_size

    assert [1_000_000 < size < 1_100_000 for size in [*call(pool, say), *call(pool, say)]] == [True, True]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_is_in_the_record(quick: pytest.Pytester, read_report: Read, method: str) -> None:
    quick.makepyfile(
        "import pytest\n@pytest.mark.gpus(1, fallback='cpu')\ndef test_it(energy):\n    energy(sum, ())\n"
    )
    quick.runpytest("--energy-report", f"--energy-start-method={method}").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["start_method"] == method
    assert record["start_s"] > 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_rank_that_does_not_start_reports_the_failing_step(pytester: pytest.Pytester, method: str) -> None:
    pytester.makepyfile(
        torch="raise ImportError('libcudart.so.13: cannot open shared object file')",
        test_it="def test_it(workers):\n    workers.run(max, 1, 2)\n",
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--energy-start-method={method}")
    result.assert_outcomes(failed=1)
    first = "rank 0 of 1 (cpu, pid *): " if method == "spawn" else "importing torch before * failed: "
    result.stdout.fnmatch_lines(
        [
            f"WorkerError: {first}ImportError: libcudart.so.13: cannot open shared object file",
            "stepwise check: the step 'import torch' failed on the CPU: ImportError: libcudart.so.13: *",
        ]
    )


def test_tests_of_one_backend_follow_one_another(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        def test_one(backend): pass
        def test_two(backend): pass
        """
    )
    result = quick.runpytest("--collect-only", "-q", "--energy-backend=transformers,openvino")
    names = [line.partition("::")[2] for line in result.outlines if "::" in line]
    assert names == [
        "test_one[transformers]",
        "test_two[transformers]",
        "test_one[openvino]",
        "test_two[openvino]",
    ]


def test_ranks_on_two_hosts_need_only_a_second_host_object() -> None:
    """Two supervisors stand for two hosts: nothing in ranks, plan or group assumes a single host."""
    script = """
import sys
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import HostDevices, plan_on_hosts
from pytest_llenergy.ranks.workload import call_workload
def look():
    import os
    import torch
    import torch.distributed as dist
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    met = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")]
    return os.getppid(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], float(value), *met
holds = [HostDevices(name, Lease(("cpu",)), [0, 1]) for name in "ab"]
plan = plan_on_hosts(Capabilities(data=True, framework="torch"), None, holds, 1)
hosts = {name: LocalHost("spawn") for name in "ab"}
group = RankGroup(plan, hosts)
work = call_workload(group, look, (), {}, 60)
work.run_round()
(first, *seen), (second, *others) = work.results()
assert plan.hosts == ("a", "b") and first != second, (first, second)
assert seen == others and seen[:3] == ["0", "1", 3.0] and all(seen[3:]), (seen, others)
assert [rank.host for rank in group.ranks] == ["a", "b"]
group.close()
for host in hosts.values():
    host.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


#: Fails to load, by an exception or a death, while a file exists, and notes each attempt in another.
FAILING_CODE = """
import os, signal
from pathlib import Path
from pytest_llenergy.record.record import BackendInfo

class FailingBackend:
    def load(self, model, options, context):
        here = Path(__file__).parent
        with (here / "attempts").open("a") as file:
            file.write("x")
        how = (here / "how").read_text()
        if how == "error":
            raise ValueError("no such layer")
        if how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        return BackendInfo(name="failing", version="1", model=model.label)
    def synchronize(self): pass
    def close(self): pass
"""


class FailingSpec:
    """A backend that fails to load as ``fail`` says."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "failing_backend.py").write_text(FAILING_CODE)
        self.spec = BackendSpec("failing", "failing_backend:FailingBackend", (), "", Capabilities(data=True))

    def fail(self, how: str) -> None:
        (self._directory / "how").write_text(how)

    @property
    def attempts(self) -> int:
        return len((self._directory / "attempts").read_text())


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingSpec:
    monkeypatch.syspath_prepend(tmp_path)
    return FailingSpec(tmp_path)


class TestFailedLoads:
    def test_a_long_load_that_failed_is_not_repeated_unless_something_changes(
        self, pool: RankPool, failing: FailingSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(timeouts, "SLOW_LOAD_S", 0.0)
        failing.fail("error")
        load = Load(failing.spec, model("a"))
        with pytest.raises(WorkerError, match=r"^loading a with failing: rank 0 of 1 .*: no such layer"):
            pool.get_loaded(plan(1), load)
        with pytest.raises(
            WorkerError, match=r"^not loaded again: loading a with failing: rank 0 of 1 .*: no such layer$"
        ):
            pool.get_loaded(plan(1), load)
        assert failing.attempts == 1
        for other in (Load(failing.spec, model("b")), Load(failing.spec, model("a"), (("x", 1),))):
            with pytest.raises(WorkerError, match=r"^loading"):
                pool.get_loaded(plan(1), other)
        monkeypatch.setenv("HF_HOME", "/elsewhere")
        failing.fail("")
        pool.get_loaded(plan(1), load)

    def test_a_short_load_that_failed_is_repeated(
        self, pool: RankPool, failing: FailingSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # On a busy machine a short load takes long.
        monkeypatch.setattr(timeouts, "SLOW_LOAD_S", 60.0)
        failing.fail("error")
        with pytest.raises(WorkerError, match=r"^loading"):
            pool.get_loaded(plan(1), Load(failing.spec, model("a")))
        failing.fail("")
        pool.get_loaded(plan(1), Load(failing.spec, model("a")))

    def test_two_deaths_in_succession_are_not_followed_by_a_third(
        self, pool: RankPool, failing: FailingSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(timeouts, "SLOW_LOAD_S", 0.0)
        load = Load(failing.spec, model("a"))
        for how in ("death", "", "death", "death"):
            failing.fail(how)
            if how:
                with pytest.raises(WorkerError, match=r"^loading .* was killed by SIGKILL"):
                    pool.get_loaded(plan(1), load)
            else:
                pool.get_loaded(plan(1), load)
                pool.close()
        with pytest.raises(WorkerError, match=r"^not loaded again: loading .* was killed by SIGKILL"):
            pool.get_loaded(plan(1), load)
        assert failing.attempts == 4
