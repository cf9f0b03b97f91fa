# SPDX-License-Identifier: Apache-2.0
"""Error reports of failed ranks: the first cause, with its traceback, output and stacks."""

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

from pytest_llenergy.errors import BackendError, WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.failure import Failure, OutcomeInRank
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST
from pytest_llenergy.ranks.timeouts import TimeLimit
from pytest_llenergy.ranks.workload import call_workload

from .groups import (
    TORCH,
    plan,
    run,
    run_until_it_hangs,
)
from .survivors import alive


@pytest.fixture(scope="module")
def forking() -> Iterator[dict[str, Host]]:
    """A host that imports torch once for all ranks."""
    host = LocalHost("forkserver")
    yield {LOCALHOST: host}
    host.close()


class TestFailures:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a busy machine ranks may report late, and write their stacks late."""
        monkeypatch.setattr(timeouts, "OTHER_RANKS_TIMEOUT_S", 30.0)
        monkeypatch.setattr(timeouts, "STACKS_TIMEOUT_S", 30.0)

    def test_first_cause_is_reported_with_traceback_and_output(self, pair: RankGroup, tmp_path: Path) -> None:
        formatted = tmp_path / "formatted"

        def work() -> None:
            import time

            class CauseError(ValueError):
                def __str__(self) -> str:
                    # Asked for after the time of the failure is.
                    formatted.touch()
                    return "the real cause"

            if os.environ["RANK"] == "1":
                print("about to fail")
                raise CauseError
            while not formatted.exists():
                time.sleep(0.01)
            raise RuntimeError("what came of it\nand more")

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        text = str(caught.value)
        assert text.startswith(f"rank 1 of 2 (cpu, pid {pair.ranks[1].pid}): CauseError: the real cause\n")
        assert "raise CauseError" in text
        assert caught.value.sections == (("output of rank 1", "about to fail"),)
        assert text.endswith("\n\nrank 0 later: RuntimeError: what came of it")
        assert not pair.alive

    def test_a_tests_own_connection_error_is_not_a_lost_peer(self, pair: RankGroup, tmp_path: Path) -> None:
        formatted = tmp_path / "formatted"

        def work() -> None:
            import time

            class ResetError(ConnectionResetError):
                def __str__(self) -> str:
                    formatted.touch()
                    return "Connection reset by peer: hub.example"

            if os.environ["RANK"] == "0":
                raise ResetError
            while not formatted.exists():
                time.sleep(0.01)
            raise RuntimeError("Connection closed by peer: the second")

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        text = str(caught.value)
        assert "ResetError: Connection reset by peer: hub.example" in text.splitlines()[0]
        assert text.endswith("\n\nrank 1 later: RuntimeError: Connection closed by peer: the second")

    @pytest.mark.parametrize("wait", ["of itself", "of the test", "of autograd"])
    def test_torchs_error_about_a_lost_peer_is_recognised(
        self, forking: dict[str, Host], tmp_path: Path, wait: str
    ) -> None:
        def work() -> None:

            import torch
            import torch.distributed as dist

            from pytest_llenergy.ranks.server import _describe

            if wait == "of autograd":
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
                loss = model(torch.ones(1, 1)).sum()
            dist.barrier()
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
                (tmp_path / "report").write_text(json.dumps(_describe(error)))

        two = plan(2, TORCH)
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            run(RankGroup(two, forking), work)
        report = json.loads((tmp_path / "report").read_text())
        assert Failure(two.ranks[0], 1, report).is_echo, report
        assert not Failure(two.ranks[0], 1, {**report, "collective": False}).is_echo

    @pytest.mark.parametrize("broken", ["text", "message", "source", "kind of text"])
    def test_an_error_without_a_usable_text_is_still_the_first_cause(
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
        first_lines = {
            "text": "BrokenError: (its message cannot be formatted: SystemExit)",
            "kind of text": r"OfTextError: kind of text \ud800",
        }
        assert first.endswith(first_lines.get(broken, "ValueError: fine"))
        assert "in work" in caught.value.details

    def test_shown_output_is_short_and_of_the_failed_call(self, pair: RankGroup) -> None:
        run(pair, exec, "print('old ' * 1_000_000)")
        with pytest.raises(WorkerError) as caught:
            run(pair, exec, "print('new ' * 1_000_000); raise ValueError")
        shown = "".join(text for _, text in caught.value.sections)
        assert "old" not in shown
        assert "new" in shown
        assert len(shown) < 40_000

    @pytest.mark.parametrize("reader", [int, sys.exit])
    def test_a_result_that_cannot_be_unpickled_names_its_rank(
        self, pair: RankGroup, reader: Callable[[str], object]
    ) -> None:
        class Picky:
            def __reduce__(self) -> tuple[object, ...]:
                return reader, ("not a number",)

        with pytest.raises(WorkerError, match="rank 0: its result cannot be read in this process"):
            run(pair, Picky)

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("os._exit(0)", "ended with exit code 0 and no result"),
            ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ],
    )
    def test_a_rank_that_ends_without_a_result_is_a_failure(
        self, pair: RankGroup, code: str, message: str
    ) -> None:
        with pytest.raises(WorkerError, match=message):
            run(pair, exec, f"import os\nif os.environ['RANK'] == '0': {code}")
        assert not any(alive(rank.pid) for rank in pair.ranks)

    def test_hanging_ranks_are_killed_at_the_time_limit(self, pair: RankGroup) -> None:
        workload = call_workload(pair, time.sleep, (300,), {}, 60.0)
        workload.prepare_round()
        # Of the work alone, which neither of them answers.
        workload._limit = TimeLimit(0.5)
        with pytest.raises(
            WorkerError, match=r"rank 0 of 2 \(cpu\), rank 1 of 2 \(cpu\) did not answer within 0.5 s"
        ):
            workload.work()
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
            ("os.close(2)", "it was asked for its stacks but wrote none; state S"),
        ],
    )
    def test_missing_stacks_of_a_hanging_rank_are_explained(
        self, pair: RankGroup, monkeypatch: pytest.MonkeyPatch, code: str, why: str
    ) -> None:
        if "close" in code:
            # Nothing else shows that this rank writes none.
            monkeypatch.setattr(timeouts, "STACKS_TIMEOUT_S", 5.0)
        hang = "import os, signal, time\n"
        hang += f"if os.environ['RANK'] == '0': {code}\nprint('begun')\ntime.sleep(300)"

        def hangs() -> bool:
            return all(
                "begun" in rank.log.tail() or psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED
                for rank in pair._ranks
            )

        with pytest.raises(WorkerError) as caught:
            run_until_it_hangs(pair, exec, hang, hangs=hangs)
        outputs = dict(caught.value.sections)
        assert why in outputs["output of rank 0"]
        assert "(most recent call first):" in outputs["output of rank 1"]
        assert "(no stacks" not in outputs["output of rank 1"]

    def test_late_stacks_are_waited_for(self, pair: RankGroup) -> None:
        """As on a busy machine."""

        def work() -> None:
            import faulthandler
            import signal
            import time

            read, write = os.pipe()
            if os.fork() == 0:
                stacks = os.read(read, 1 << 16)
                time.sleep(1)
                os.write(2, stacks)
                time.sleep(300)
            faulthandler.register(signal.SIGUSR2, file=write)
            print("begun")
            time.sleep(300)

        with pytest.raises(WorkerError) as caught:
            run_until_it_hangs(pair, work)
        for _, text in caught.value.sections:
            assert "in work" in text
            assert "wrote none" not in text

    def test_stacks_are_complete_however_slowly_they_are_written(self, pair: RankGroup) -> None:
        def work() -> None:
            import faulthandler
            import fcntl
            import signal
            import time

            def dig(depth: int) -> None:
                if depth:
                    dig(depth - 1)
                print("begun")
                time.sleep(300)

            read, write = os.pipe()
            # F_SETPIPE_SZ: less than a third of the stacks.
            fcntl.fcntl(write, 1031, 4096)
            if os.fork() == 0:
                os.write(2, os.read(read, 4096))
                time.sleep(1)
                while True:
                    os.write(2, os.read(read, 4096))
            faulthandler.register(signal.SIGUSR2, file=write, all_threads=True)
            dig.__code__ = dig.__code__.replace(co_name="dig" * 80)
            dig(40)

        with pytest.raises(WorkerError) as caught:
            run_until_it_hangs(pair, work)
        for _, text in caught.value.sections:
            # The oldest frame is the last.
            assert "rank.py" in text.splitlines()[-1]

    def test_outcomes_of_pytest_keep_their_meaning(self, pair: RankGroup) -> None:
        with pytest.raises(OutcomeInRank) as caught:
            run(pair, pytest.skip, "not on this rank")
        assert (caught.value.outcome, caught.value.reason) == ("Skipped", "not on this rank")

    def test_a_skip_names_ranks_that_have_not_answered(
        self, pair: RankGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def work() -> None:
            import time

            if os.environ["RANK"] == "0":
                pytest.skip("no such kernel")
            time.sleep(300)

        monkeypatch.setattr(timeouts, "OTHER_RANKS_TIMEOUT_S", 1.0)
        with pytest.raises(OutcomeInRank, match=r"^no such kernel \(rank 1 still at work, and ended\)$"):
            run(pair, work)

    def test_errors_of_this_package_keep_their_class_and_name_the_rank(self, pair: RankGroup) -> None:
        def work() -> None:

            if os.environ["RANK"] == "1":
                raise BackendError("no such dtype")

        with pytest.raises(BackendError, match=r"^rank 1 of 2 \(cpu, pid \d+\): no such dtype$"):
            run(pair, work)

    def test_an_error_of_a_modules_own_kind_is_that_of_this_package(self, pair: RankGroup) -> None:
        def work() -> None:
            class DtypeError(BackendError):
                pass

            if os.environ["RANK"] == "1":
                raise DtypeError("no such dtype")

        with pytest.raises(BackendError, match=r"^rank 1 of 2 \(cpu, pid \d+\): no such dtype$"):
            run(pair, work)

    def test_ranks_end_with_a_killed_parent(self) -> None:
        import subprocess
        import sys

        script = (
            "from tests.ranks.groups import plan, run\n"
            "from pytest_llenergy.ranks.group import RankGroup\n"
            "from pytest_llenergy.ranks.local import LocalHost\n"
            "import time\n"
            "ranks = RankGroup(plan(2), {'localhost': LocalHost('spawn')})\n"
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
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
