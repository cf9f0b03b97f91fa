# SPDX-License-Identifier: Apache-2.0
"""Power limits and clocks of boards on other hosts, which their agents change and put back.

An agent whose pytest has gone restores its boards before it ends. If it is killed too, the next test that
leases a board there does so, as on one host (see ``devices.board_settings``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from pytest_llenergy.devices.board_settings import GpuSettings, SettingsRefusedError
from pytest_llenergy.devices.timeouts import QUERY_TIMEOUT_S
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.hosts.client import AgentClient
from pytest_llenergy.hosts.rank_service import SettingsAnswer
from pytest_llenergy.record.record import BoardSettings

#: Time limit for an agent, which waits for its guard's first answer, its last one and its end.
ANSWER_TIMEOUT_S = 4 * QUERY_TIMEOUT_S


@contextmanager
def apply_on_hosts(settings: GpuSettings, clients: Sequence[AgentClient]) -> Iterator[list[BoardSettings]]:
    """Apply settings to the boards that are leased on these hosts until the block ends.

    Raises:
        SettingsRefusedError: The boards, the driver or the rights of the user do not allow it on a host.
        DeviceError: A value is outside of the range of a board, or the boards could not be restored.
        WorkerError: A host is lost.
    """
    boards: list[BoardSettings] = []
    try:
        wanted = msgspec.to_builtins(settings)
        pending = [client.begin("ranks.change_boards", settings=wanted) for client in clients]
        answers = [msgspec.convert(each.result(ANSWER_TIMEOUT_S), SettingsAnswer) for each in pending]
        for client, answer in zip(clients, answers, strict=True):
            if answer.refusal is not None:
                raise SettingsRefusedError(f"{client.name}: {answer.refusal}")
            boards += answer.boards
        yield boards
    finally:
        _restore(clients)


def _restore(clients: Sequence[AgentClient]) -> None:
    """Restore the boards of all hosts; a lost host does so itself.

    Raises:
        DeviceError: A board cannot be restored.
    """
    fault: DeviceError | None = None
    for each in [client.begin("ranks.restore_boards") for client in clients]:
        try:
            with suppress(WorkerError):
                each.result(ANSWER_TIMEOUT_S)
        except DeviceError as error:
            fault = fault or error
    if fault is not None:
        raise fault
