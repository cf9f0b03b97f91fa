# SPDX-License-Identifier: Apache-2.0
"""Which ranks the next test gets: warm ones as long as it can share them, otherwise new ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.ranks.pool import Isolation, Load, RankPool
from pytest_llenergy.ranks.workload import call_workload

from .groups import plan

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
    isolation: Isolation = getattr(request, "param", "module")
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

    @pytest.mark.parametrize(("pool", "same"), [("module", False), ("run", True)], indirect=["pool"])
    def test_isolation_decides_whether_another_model_needs_new_ranks(
        self, pool: RankPool, spec: BackendSpec, same: bool
    ) -> None:
        groups = []
        for name in ("one", "two"):
            group, info = pool.get_loaded(plan(1), Load(spec, model(name), {}))
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
            group, info = pool.get_loaded(plan(1), Load(spec, model("one"), {}))
            waits.append((group.start_s, info.load_s))
            pool.finish_test()
        assert waits[0][0] > 0
        assert waits[0][1] is not None
        assert waits[0][1] > 0
        assert waits[1] == (0.0, 0.0)


class TestDeaths:
    def test_ranks_that_died_while_idle_are_replaced(self, pool: RankPool) -> None:
        first = pids(pool, n=2)
        os.kill(first[1], 9)
        # Its parent, which is another process, has to see it first.
        while psutil.pid_exists(first[1]):
            time.sleep(0.01)
        assert set(pids(pool, n=2)).isdisjoint(first)
