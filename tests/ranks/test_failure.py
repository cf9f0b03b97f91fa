# SPDX-License-Identifier: Apache-2.0
"""Error reports of failed ranks: the first cause, with its traceback, output and stacks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pytest_llenergy.errors import BackendError, WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.failure import Failure
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.local import LocalHost

from .groups import TORCH, plan, run, run_until_it_hangs, start


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine ranks may report late, and write their stacks late."""
    monkeypatch.setattr(timeouts, "OTHER_RANKS_TIMEOUT_S", 30.0)
    monkeypatch.setattr(timeouts, "STACKS_TIMEOUT_S", 30.0)


def test_first_cause_is_reported_with_traceback_and_output(pair: RankGroup, tmp_path: Path) -> None:
    formatted = tmp_path / "formatted"

    def work() -> None:
        class ResetError(ConnectionResetError):
            def __str__(self) -> str:
                # Asked for after the time of the failure is. It is the test's own, and no lost peer.
                formatted.touch()
                return "Connection reset by peer: the real cause"

        if os.environ["RANK"] == "1":
            print("about to fail")
            raise ResetError
        while not formatted.exists():
            time.sleep(0.01)
        raise RuntimeError("what came of it\nand more")

    with pytest.raises(WorkerError) as caught:
        run(pair, work)
    text = str(caught.value)
    message = "ResetError: Connection reset by peer: the real cause\n"
    assert text.startswith(f"rank 1 of 2 (cpu, pid {pair.ranks[1].pid}): {message}")
    assert "raise ResetError" in text
    assert caught.value.sections == (("output of rank 1", "about to fail"),)
    assert text.endswith("\n\nrank 0: RuntimeError: what came of it")
    assert not pair.alive


@pytest.mark.slow
def test_torchs_error_about_a_lost_peer_is_recognised(host: LocalHost, tmp_path: Path) -> None:
    def work() -> None:
        import torch
        import torch.distributed as dist

        from pytest_llenergy.ranks.server import _describe

        dist.barrier()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            (tmp_path / "report").write_text(json.dumps(_describe(error)))
            raise

    with pytest.raises(WorkerError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        run(start(host, 2, TORCH), work)
    report = json.loads((tmp_path / "report").read_text())
    assert Failure(plan(2).ranks[0], 1, report).is_echo, report


def test_shown_output_is_short_and_of_the_failed_call(pair: RankGroup) -> None:
    run(pair, exec, "print('old ' * 1_000_000)")
    with pytest.raises(WorkerError) as caught:
        run(pair, exec, "print('new ' * 1_000_000); raise ValueError")
    shown = "".join(text for _, text in caught.value.sections)
    assert "old" not in shown
    assert "new" in shown
    assert len(shown) < 40_000


def test_a_result_that_cannot_be_unpickled_names_its_rank(pair: RankGroup) -> None:
    class Picky:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    with pytest.raises(WorkerError, match="rank 0: its result cannot be read in this process"):
        run(pair, Picky)


def test_ranks_that_hang_show_where(pair: RankGroup) -> None:
    """Also while one thread holds the interpreter's lock."""
    with pytest.raises(WorkerError, match=r"^rank 0 .*, rank 1 of 2 \(cpu\) did not answer") as caught:
        run_until_it_hangs(pair, "tests.ranks.groups:hold_the_lock_of_the_interpreter")
    for _, output in caught.value.sections:
        assert "in hold_the_lock_of_the_interpreter" in output


def test_errors_of_this_package_keep_their_class_and_name_the_rank(pair: RankGroup) -> None:
    def work() -> None:
        class DtypeError(BackendError):
            pass

        if os.environ["RANK"] == "1":
            raise DtypeError("no such dtype")

    with pytest.raises(BackendError, match=r"^rank 1 of 2 \(cpu, pid \d+\): no such dtype$"):
        run(pair, work)
