# SPDX-License-Identifier: Apache-2.0
"""The program that does on another host what pytest asks. ``agent_command`` returns how to start it.

The main thread serves the connection and reads the clock; calls have threads of their own. The agent ends
itself and what it has started when pytest has gone, when pytest is silent for three beats, on SIGTERM, and
when its launcher ends. A guard around it (``ranks.guard``) kills it with all its descendants if it hangs, or
is stopped, when the launcher ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

import msgspec

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.connection import HELLO, Invitation, Link, Message, connect
from pytest_llenergy.hosts.peer import RESULT, Service
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.ranks import guard

#: Variable in which Slurm tells a task the address of the host that started it.
LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"

#: What answers calls, by the first part of their names. They are imported by the first call.
OBJECTS: dict[str, str] = {
    "ranks": "pytest_llenergy.hosts.agent_ranks:AgentRanks",
    "rounds": "pytest_llenergy.hosts.agent_meters:RoundMeters",
    "windows": "pytest_llenergy.hosts.agent_meters:WindowMeters",
}


def agent_command(slot: int | str) -> list[str]:
    """Return the command line of an agent, which reads its invitation from the standard input.

    ``slot`` is the position of its host in the gang, or an environment variable that contains it there.
    """
    return module_command("pytest_llenergy.hosts.agent", str(slot))


def main(slot: str) -> NoReturn:
    """Run an agent; see ``agent_command`` for the argument."""
    # Not at the top: launchers import this module for its command.
    from pytest_llenergy.hosts.host_facts import describe

    with suppress(OSError):
        # Ctrl-C at a terminal is pytest's business.
        os.setsid()
    guard.fork_under_guard(os.getppid(), "", os.dup(0))
    for number in guard.ENDING_SIGNALS:
        signal.signal(number, _exit)
    service = Service(OBJECTS)
    try:
        invitation = Invitation(*json.loads(sys.stdin.readline()))
        if not invitation.address:
            invitation = invitation._replace(address=os.environ[LAUNCH_ADDRESS])
        # Ray starts its actors at nice 15, which root can undo.
        if os.getpriority(os.PRIO_PROCESS, 0) > invitation.nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, invitation.nice)
        # Primitives only, since the versions may differ, and before: pytest reads one hello after another.
        facts = msgspec.to_builtins(describe())
        connection = connect(invitation)
        link = Link(connection, lambda *received: _receive(link, service, *received), echoes=True)
        link.send((HELLO, int(slot if slot.isdigit() else os.environ[slot]), facts))
        reason = f"pytest {link.run()}"
    except (WorkerError, OSError, ValueError) as error:
        reason = str(error)
    except SystemExit:
        reason = "was asked to end"
    for number in guard.ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)
    closer = threading.Thread(target=service.close, daemon=True)
    closer.start()
    closer.join(timeouts.AGENT_CLOSE_TIMEOUT_S)
    with suppress(OSError):
        os.write(2, f"pytest-llenergy agent of slot {slot} ended: {reason}\n".encode(errors="replace"))
    # Threads may hang.
    os._exit(0)


def _receive(link: Link, service: Service, message: Message, arrived_ns: int) -> None:
    if message[2] == "clock":
        link.send((RESULT, message[1], (arrived_ns, time.monotonic_ns())))
    else:
        service.answer(link, message)


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1])
