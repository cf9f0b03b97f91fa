# SPDX-License-Identifier: Apache-2.0
"""Error reports of failed ranks: the first cause, with its traceback, output and stacks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.errors import BackendError, WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.failure import Failure, OutcomeInRank
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST

from .groups import (
    TORCH,
    plan,
    run,
    run_until_it_hangs,
)


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

    @pytest.mark.parametrize("wait", ["of itself", "of autograd"])
    @pytest.mark.slow
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

    @pytest.mark.parametrize("broken", ["text", "source"])
    def test_an_error_without_a_usable_text_is_still_the_first_cause(
        self, pair: RankGroup, broken: str
    ) -> None:
        def work() -> None:
            class BrokenError(Exception):
                def __str__(self) -> str:
                    raise SystemExit(3)

            class Loader:
                def get_source(self, name: str) -> str:
                    raise ValueError("no source")

            error = BrokenError() if broken == "text" else ValueError("fine")
            if broken == "source":
                module = {"__name__": "virtual", "__loader__": Loader(), "error": error}
                exec(compile("raise error", "virtual.py", "exec"), module)
            raise error

        with pytest.raises(WorkerError) as caught:
            run(pair, work)
        first, *_ = str(caught.value).splitlines()
        text = "BrokenError: (its message cannot be formatted: SystemExit)"
        assert first.endswith(text if broken == "text" else "ValueError: fine")
        assert ("in work" if broken == "text" else "cannot be formatted") in caught.value.details

    def test_shown_output_is_short_and_of_the_failed_call(self, pair: RankGroup) -> None:
        run(pair, exec, "print('old ' * 1_000_000)")
        with pytest.raises(WorkerError) as caught:
            run(pair, exec, "print('new ' * 1_000_000); raise ValueError")
        shown = "".join(text for _, text in caught.value.sections)
        assert "old" not in shown
        assert "new" in shown
        assert len(shown) < 40_000

    def test_a_result_that_cannot_be_unpickled_names_its_rank(self, pair: RankGroup) -> None:
        class Picky:
            def __reduce__(self) -> tuple[object, ...]:
                return sys.exit, ("not a number",)

        with pytest.raises(WorkerError, match="rank 0: its result cannot be read in this process"):
            run(pair, Picky)

    def test_missing_stacks_of_a_hanging_rank_are_explained(self, pair: RankGroup) -> None:
        hang = "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n"
        hang += "print('begun')\ntime.sleep(300)"

        def hangs() -> bool:
            return all(
                "begun" in rank.log.tail() or psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED
                for rank in pair._ranks
            )

        with pytest.raises(WorkerError) as caught:
            run_until_it_hangs(pair, exec, hang, hangs=hangs)
        outputs = dict(caught.value.sections)
        assert "no stacks: the process is in state T (stopped)" in outputs["output of rank 0"]
        assert "(most recent call first):" in outputs["output of rank 1"]
        assert "(no stacks" not in outputs["output of rank 1"]

    def test_a_skip_names_ranks_that_have_not_answered(
        self, pair: RankGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def work() -> None:

            if os.environ["RANK"] == "0":
                pytest.skip("no such kernel")
            time.sleep(300)

        monkeypatch.setattr(timeouts, "OTHER_RANKS_TIMEOUT_S", 1.0)
        with pytest.raises(OutcomeInRank, match=r"^no such kernel \(rank 1 still at work, and ended\)$"):
            run(pair, work)

    def test_errors_of_this_package_keep_their_class_and_name_the_rank(self, pair: RankGroup) -> None:
        def work() -> None:
            class DtypeError(BackendError):
                pass

            if os.environ["RANK"] == "1":
                raise DtypeError("no such dtype")

        with pytest.raises(BackendError, match=r"^rank 1 of 2 \(cpu, pid \d+\): no such dtype$"):
            run(pair, work)
