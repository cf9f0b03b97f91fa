# SPDX-License-Identifier: Apache-2.0
"""Real spawned ranks: they are what was planned, see what they may see, and say what happened."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError, PlanError, WorkerError, WorkerPlacementError
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.workers.failure import Failure, OutcomeInRank
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.host import Host
from pytest_llenergy.workers.local import LocalHost
from pytest_llenergy.workers.placement import check_placement
from pytest_llenergy.workers.plan import LOCALHOST, plan_processes
from pytest_llenergy.workers.workload import call_workload, split

from .groups import TORCH, plan, run


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    host = LocalHost()
    yield {LOCALHOST: host}
    host.close()


@pytest.fixture
def pair(hosts: dict[str, Host]) -> Iterator[RankGroup]:
    ranks = RankGroup(plan(2), hosts)
    yield ranks
    ranks.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestPlan:
    def test_degrees_must_multiply_to_the_devices(self) -> None:
        lease = Lease(devices=("cpu", "cpu"))
        with pytest.raises(
            PlanError, match=r"needs 4 devices and the lease has 2; make gpus\(n\) their product"
        ):
            plan_processes(TORCH, Parallel(data=2, tensor=2), lease, [0, 1])

    def test_cores_are_shared_out_and_threads_follow(self) -> None:
        lease = Lease(devices=("cpu", "cpu"))
        ranks = plan_processes(TORCH, None, lease, [0, 1, 2, 3]).ranks
        assert [(rank.cpus, rank.threads) for rank in ranks] == [((0, 1), 2), ((2, 3), 2)]

    def test_more_ranks_than_cores_take_turns(self) -> None:
        lease = Lease(devices=("cpu",) * 3)
        ranks = plan_processes(TORCH, None, lease, [0, 1]).ranks
        assert [(rank.cpus, rank.threads) for rank in ranks] == [((0,), 1), ((1,), 1), ((0,), 1)]

    def test_a_gpu_rank_sees_its_board_by_uuid_and_nothing_else(self) -> None:
        lease = Lease(devices=("GPU-b", "GPU-a"))
        ranks = plan_processes(TORCH, None, lease, [0, 1]).ranks
        seen = [rank.environment()["CUDA_VISIBLE_DEVICES"] for rank in ranks]
        assert seen == ["GPU-b", "GPU-a"]
        assert {rank.environment()["CUDA_DEVICE_ORDER"] for rank in ranks} == {"PCI_BUS_ID"}
        assert [rank.local_rank for rank in ranks] == [0, 1]

    def test_a_cpu_rank_sees_no_board_whatever_the_outside_says(self) -> None:
        assert plan(1).ranks[0].environment()["CUDA_VISIBLE_DEVICES"] == ""

    def test_prompts_are_shared_out_like_accelerate_does(self) -> None:
        assert split(list("abcdefg"), 2) == [list("abcd"), list("efg")]
        assert split(list("abc"), 3) == [["a"], ["b"], ["c"]]


class TestEntry:
    def test_the_environment_comes_from_the_plan_not_from_outside(
        self, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        monkeypatch.setenv("OMP_NUM_THREADS", "64")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "stale")
        monkeypatch.setenv("SLURM_PROCID", "7")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:3")
        # Nothing of a launcher's, for all their names.
        monkeypatch.setenv("ROLE_ARN", "arn:aws:iam::1:role/tests")
        monkeypatch.setenv("GROUP_ID", "1000")
        ranks = RankGroup(plan(2), hosts)

        def look() -> dict[str, str | None]:
            import os

            names: tuple[str, ...] = (
                "CUDA_VISIBLE_DEVICES",
                "RANK",
                "LOCAL_RANK",
                "WORLD_SIZE",
                "OMP_NUM_THREADS",
            )
            names += ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "ROLE_ARN", "GROUP_ID")
            names += ("ACCELERATE_USE_FSDP", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU")
            return {name: os.environ.get(name) for name in names}

        try:
            first, second = run(ranks, look)
        finally:
            ranks.close()
        assert first == {
            "CUDA_VISIBLE_DEVICES": "",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": None,
            "SLURM_PROCID": None,
            "ROLE_ARN": "arn:aws:iam::1:role/tests",
            "GROUP_ID": "1000",
            "ACCELERATE_USE_FSDP": None,
            "ACCELERATE_TORCH_DEVICE": None,
            "ACCELERATE_USE_CPU": "true",
        }
        assert isinstance(second, dict)
        assert second["RANK"] == "1"

    def test_ranks_are_distinct_pinned_processes(self, pair: RankGroup) -> None:
        assert len({rank.pid for rank in pair.ranks} | {os.getpid()}) == 3
        if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
            assert [rank.cpus for rank in pair.ranks] == [[0], [1]]

    def test_torch_imported_too_early_is_refused(
        self, hosts: dict[str, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(WorkerError, match="torch was imported before the rank could set its devices"):
            RankGroup(plan(1), hosts)

    def test_a_gpu_that_torch_does_not_see_is_an_error_not_a_cpu_run(self, hosts: dict[str, Host]) -> None:
        """V1: the plan says GPU, torch has none; nothing may run on the CPU instead."""
        gpu = plan_processes(TORCH, None, Lease(devices=("GPU-0123",)), [0], 1)
        with pytest.raises(WorkerError, match="the plan gives this rank GPU-0123, torch sees 0 GPUs"):
            RankGroup(gpu, hosts)

    def test_a_group_that_is_not_the_planned_one_is_refused(self) -> None:
        two = plan(2, TORCH)
        facts = [{"pid": pid, "devices": ["cpu"], "world_size": 1} for pid in (1, 2)]
        with pytest.raises(WorkerPlacementError, match="rank 0: planned in a world of 2, found in one of 1"):
            check_placement(two, facts)
        with pytest.raises(WorkerPlacementError, match="planned 2 processes, found 1"):
            check_placement(two, [facts[0], facts[0]])

    def test_two_ranks_form_a_gloo_group(self, hosts: dict[str, Host]) -> None:
        ranks = RankGroup(plan(2, TORCH), hosts)

        def reduce() -> tuple[int, int, str, float, bool]:
            import torch
            import torch.distributed as dist

            value = torch.ones(4) * (dist.get_rank() + 1)
            dist.all_reduce(value)
            backend = dist.get_backend()
            return (
                dist.get_rank(),
                dist.get_world_size(),
                backend,
                float(value[0]),
                torch.cuda.is_initialized(),
            )

        try:
            assert run(ranks, reduce) == [(0, 2, "gloo", 3.0, False), (1, 2, "gloo", 3.0, False)]
        finally:
            ranks.close()
        assert not any(alive(rank.pid) for rank in ranks.ranks)

    def test_accelerate_finds_itself_at_home(self, hosts: dict[str, Host]) -> None:
        ranks = RankGroup(plan(2, TORCH), hosts)

        def look() -> tuple[int, int, str, list[str]]:
            from accelerate import Accelerator

            # Told by the environment that it is on CPUs: no argument, no launcher.
            state = Accelerator()
            with state.split_between_processes(list("abcdefg")) as mine:
                return state.num_processes, state.process_index, state.device.type, list(mine)

        try:
            assert run(ranks, look) == [
                (2, 0, "cpu", ["a", "b", "c", "d"]),
                (2, 1, "cpu", ["e", "f", "g"]),
            ]
        finally:
            ranks.close()


class TestFailures:
    def test_the_first_cause_comes_back_with_its_traceback_and_output(self, pair: RankGroup) -> None:
        def work() -> None:
            import os
            import time

            if os.environ["RANK"] == "1":
                print("about to fail")
                raise ValueError("the real cause")
            time.sleep(0.2)
            raise RuntimeError("what came of it\nand more")

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        text = str(caught.value)
        assert text.startswith(f"rank 1 of 2 (cpu, pid {pair.ranks[1].pid}): ValueError: the real cause\n")
        assert 'raise ValueError("the real cause")' in text
        assert caught.value.sections == (("output of rank 1", "about to fail"),)
        assert text.endswith("\n\nrank 0 later: RuntimeError: what came of it")
        assert not pair.alive

    def test_a_peer_is_lost_in_torchs_words_not_in_those_of_a_test(self, pair: RankGroup) -> None:
        def work() -> None:
            import os
            import time

            if os.environ["RANK"] == "0":
                raise ConnectionResetError("Connection reset by peer: hub.example")
            time.sleep(0.5)
            raise RuntimeError("Connection closed by peer: the second")

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        text = str(caught.value)
        assert "ConnectionResetError: Connection reset by peer: hub.example" in text.splitlines()[0]
        assert text.endswith("\n\nrank 1 later: RuntimeError: Connection closed by peer: the second")

    @pytest.mark.parametrize("wait", ["of itself", "of the test", "of autograd"])
    def test_torchs_words_for_a_lost_peer_are_known(
        self, hosts: dict[str, Host], tmp_path: Path, wait: str
    ) -> None:
        def work() -> None:
            import os

            import torch
            import torch.distributed as dist

            from pytest_llenergy.workers.serve import _describe

            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
            loss = model(torch.ones(1, 1)).sum()
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), 9)
            try:
                if wait == "of itself":
                    dist.all_reduce(torch.ones(1))
                elif wait == "of the test":
                    dist.all_reduce(torch.ones(1), async_op=True).wait()
                else:
                    loss.backward()
            except RuntimeError as error:
                (tmp_path / "said").write_text(json.dumps(_describe(error)))

        two = plan(2, TORCH)
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            run(RankGroup(two, hosts), work)
        said = json.loads((tmp_path / "said").read_text())
        assert Failure(two.ranks[0], 1, said, []).is_echo, said
        assert not Failure(two.ranks[0], 1, {**said, "collective": False}, []).is_echo

    @pytest.mark.parametrize("broken", ["text", "message", "source", "kind of text"])
    def test_an_error_whose_text_is_broken_is_still_the_first_cause(
        self, pair: RankGroup, broken: str
    ) -> None:
        def work() -> None:
            class BrokenError(Exception):
                def __str__(self) -> str:
                    raise SystemExit(3)

            class Text(str):
                def __reduce__(self) -> Any:
                    raise RuntimeError("no text")

            class OfTextError(Exception):
                def __str__(self) -> str:
                    return Text("kind of text \ud800")

            class Loader:
                def get_source(self, name: str) -> str:
                    raise ValueError("no source")

            error = {"text": BrokenError(), "kind of text": OfTextError()}.get(broken, ValueError("fine"))
            if broken == "message":
                error.msg = BrokenError()  # type: ignore[attr-defined]
            if broken == "source":
                module = {"__name__": "virtual", "__loader__": Loader(), "error": error}
                exec(compile("raise error", "virtual.py", "exec"), module)
            raise error

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        first, *_ = str(caught.value).splitlines()
        told = {
            "text": "BrokenError: (its text cannot be had: SystemExit)",
            "kind of text": r"OfTextError: kind of text \ud800",
        }
        assert first.endswith(told.get(broken, "ValueError: fine"))
        assert "in work" in caught.value.details

    def test_the_output_that_is_shown_is_short_and_of_this_call(self, pair: RankGroup) -> None:
        run(pair, exec, "print('old ' * 1_000_000)")
        with pytest.raises(WorkerError) as caught:
            run(pair, exec, "print('new ' * 1_000_000); raise ValueError")
        shown = "".join(text for _, text in caught.value.sections)
        assert "old" not in shown
        assert "new" in shown
        assert len(shown) < 40_000

    @pytest.mark.parametrize("reader", [int, sys.exit])
    def test_a_result_that_cannot_be_read_here_names_its_rank(
        self, pair: RankGroup, reader: Callable[[str], object]
    ) -> None:
        class Picky:
            def __reduce__(self) -> tuple[object, ...]:
                return reader, ("not a number",)

        with pytest.raises(WorkerError, match="rank 0: its result cannot be read in this process"):
            run(pair, Picky)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("os._exit(0)", "ended with exit code 0 and no result"),
            ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ],
    )
    def test_death_is_a_failure(self, pair: RankGroup, code: str, said: str) -> None:
        with pytest.raises(WorkerError, match=said):
            run(pair, exec, f"import os\nif os.environ['RANK'] == '0': {code}")
        assert not any(alive(rank.pid) for rank in pair.ranks)

    def test_a_hang_ends_at_the_time_limit(self, pair: RankGroup) -> None:
        workload = call_workload(pair, time.sleep, (60,), {}, 0.5)
        with pytest.raises(
            WorkerError, match=r"rank 0 of 2 \(cpu\), rank 1 of 2 \(cpu\) did not answer within 0.5 s"
        ):
            workload.run_round()
        assert not any(alive(rank.pid) for rank in pair.ranks)

    @pytest.mark.parametrize(
        ("code", "why"),
        [
            (
                "os.kill(os.getpid(), signal.SIGSTOP)",
                "the process is stopped, by SIGSTOP or the like; state T",
            ),
            ("signal.signal(signal.SIGUSR2, signal.SIG_IGN)", "the process ignores SIGUSR2"),
            ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})", "the process blocks SIGUSR2"),
            ("os.close(2)", "it was asked for its stacks and wrote none; state S"),
        ],
    )
    def test_a_rank_that_hangs_and_cannot_say_where_says_why(
        self, pair: RankGroup, code: str, why: str
    ) -> None:
        hang = f"import os, signal, time\nif os.environ['RANK'] == '0': {code}\ntime.sleep(60)"
        with pytest.raises(WorkerError) as caught:
            run(pair, exec, hang, timeout_s=0.5)
        told = dict(caught.value.sections)
        assert why in told["output of rank 0"]
        assert "(most recent call first):" in told["output of rank 1"]
        assert "(no stacks" not in told["output of rank 1"]

    def test_outcomes_of_pytest_keep_their_meaning(self, pair: RankGroup) -> None:
        with pytest.raises(OutcomeInRank) as caught:
            run(pair, pytest.skip, "not on this rank")
        assert (caught.value.outcome, caught.value.reason) == ("Skipped", "not on this rank")

    def test_a_skip_tells_of_ranks_that_have_not_answered(self, pair: RankGroup) -> None:
        def work() -> None:
            import os
            import time

            if os.environ["RANK"] == "0":
                pytest.skip("no such kernel")
            time.sleep(60)

        with pytest.raises(OutcomeInRank, match=r"^no such kernel \(rank 1 still at work, and ended\)$"):
            run(pair, work)

    def test_errors_of_ours_keep_their_type_and_name_the_rank(self, pair: RankGroup) -> None:
        def work() -> None:
            import os

            if os.environ["RANK"] == "1":
                raise BackendError("no such dtype")

        with pytest.raises(BackendError, match=r"^rank 1 of 2 \(cpu, pid \d+\): no such dtype$"):
            run(pair, work)

    def test_a_killed_parent_takes_its_ranks_along(self) -> None:
        import subprocess
        import sys

        script = (
            "from tests.workers.groups import plan, run\n"
            "from pytest_llenergy.workers.group import RankGroup\n"
            "from pytest_llenergy.workers.local import LocalHost\n"
            "import time\n"
            "ranks = RankGroup(plan(2), {'localhost': LocalHost()})\n"
            "print(*[rank.pid for rank in ranks.ranks], flush=True)\n"
            "run(ranks, time.sleep, 60)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_parent_sleeps_while_the_ranks_work(pair: RankGroup) -> None:
    workload = call_workload(pair, time.sleep, (1.0,), {}, 60)
    before = time.process_time()
    workload.run_round()
    assert time.process_time() - before < 0.05


def test_the_ranks_are_quiet_in_the_gaps_around_the_work(pair: RankGroup) -> None:
    """What they did there would be taken for idle power."""

    def cpu_s() -> float:
        return sum(sum(psutil.Process(rank.pid).cpu_times()[:2]) for rank in pair.ranks)

    garbage = "import gc; made = [[[] for _ in range(1000)] for _ in range(3000)]; made.append(made)"
    workload = call_workload(pair, exec, (garbage,), {}, 60)
    workload.ready()
    before = cpu_s()
    time.sleep(0.3)
    gap_before = cpu_s() - before
    workload.work()
    after = cpu_s()
    time.sleep(0.3)
    gap_after = cpu_s() - after
    # Collecting that garbage would take a good part of what making it takes.
    assert gap_before + gap_after < 0.2 * (after - before - gap_before)
    workload.timeline()


def test_the_window_runs_from_the_first_start_to_the_last_end(pair: RankGroup) -> None:
    def work() -> tuple[int, int]:
        import os
        import time

        began_ns = time.monotonic_ns()
        time.sleep(0.3 if os.environ["RANK"] == "1" else 0.1)
        return began_ns, time.monotonic_ns()

    workload = call_workload(pair, work, (), {}, 60)
    before_ns = time.monotonic_ns()
    timeline = workload.run_round()
    after_ns = time.monotonic_ns()
    told = workload.results()
    marks = [rank.iterations[-1] for rank in timeline.ranks]
    for mark, (began_ns, ended_ns) in zip(marks, told, strict=True):
        assert before_ns < mark.start_ns <= began_ns < ended_ns <= mark.end_ns < after_ns
    assert timeline.start_ns == min(mark.start_ns for mark in marks)
    assert timeline.end_ns == max(mark.end_ns for mark in marks)
    # Nothing but the call is in a rank's own window, and the shorter one does not wait in it for the longer.
    assert marks[0].end_ns - told[0][1] < told[1][1] - told[1][0]
    assert workload.peak_memory_bytes is not None
    assert workload.peak_memory_bytes > 10_000_000
