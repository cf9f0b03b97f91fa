# SPDX-License-Identifier: Apache-2.0
"""Order in which pytest-xdist's workers receive tests that lease several boards.

A worker receives a test while it runs the one before, and runs nothing else while it waits for a lease. With
``--dist=load`` it would often wait while a narrower test could use the boards that are free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class LeaseScheduling(LoadScheduling):  # type: ignore[misc]  # xdist is untyped
    """``--dist=load`` that gives a worker the next test whose boards will be free.

    Tests change places within their class, or within their file outside of classes, so that fixtures of files
    are set up as often as before.

    Args:
        loads: The scheduler that it replaces, which has not been used.
        count_boards: Returns the number of boards that tests may lease; called if a test leases several.
        boards_of: Boards that each test leases, by node id, complete when tests are distributed.
    """

    def __init__(
        self, loads: LoadScheduling, count_boards: Callable[[], int], boards_of: Mapping[str, int]
    ) -> None:
        super().__init__(loads.config)
        self.log = loads.log
        self._count_boards = count_boards
        self._boards_of = boards_of

    @cached_property
    def _capacity(self) -> int:
        return self._count_boards()

    def _send_tests(self, node: WorkerController, num: int) -> None:
        chosen = [self._take_next(node) for _ in range(min(num, len(self.pending)))]
        if chosen:
            node.send_runtest_some(chosen)

    def _take_next(self, node: Any) -> int:
        """Move a test from the pending ones to a worker, and return its index.

        It is the first whose boards remain if each other worker keeps as many as its current or next test
        needs. If none fits, the one with the fewest boards waits least.
        """
        index: int = self.pending[0]
        # Empty if no test leases several boards.
        if self._boards_of:
            group = self._group(index)
            candidates = list(takewhile(lambda other: self._group(other) == group, self.pending))
            widths = [self._width(other) for other in candidates]
            kept = (map(self._width, held) for other, held in self.node2pending.items() if other is not node)
            room = self._capacity - sum(max(held, default=0) for held in kept)
            fitting = (other for other, width in zip(candidates, widths, strict=True) if width <= room)
            index = next(fitting, candidates[widths.index(min(widths))])
        self.pending.remove(index)
        self.node2pending[node].append(index)
        return index

    def _width(self, index: int) -> int:
        return self._boards_of.get(self.collection[index], 0)

    def _group(self, index: int) -> str:
        return str(self.collection[index]).partition("[")[0].rpartition("::")[0]
