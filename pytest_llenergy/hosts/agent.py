# SPDX-License-Identifier: Apache-2.0
"""The program that does on another host what pytest asks. ``agent_command`` returns how to start it.

The main thread serves the connection and reads the clock; calls have threads of their own. The agent ends
itself and what it has started when pytest has gone, when pytest is silent for three beats, on SIGTERM, and
when its launcher ends. A guard around it (``ranks.guard``) kills it with all its descendants if it hangs, or
is stopped, when the launcher ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import msgspec

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.clock import read_suspended_ns
from pytest_llenergy.hosts.connection import HELLO, Invitation, Link, Message, connect
from pytest_llenergy.hosts.peer import RESULT, Service
from pytest_llenergy.ranks import guard

#: Not run with ``-m``, which would put another directory first on the search path. The package is that of
#: pytest, if this host has the same files; everything else is found as usual.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pytest_llenergy
sys.path[:] = [*filter(None, sys.path[1:]), sys.argv[1]]
from pytest_llenergy.hosts.agent import main
main(*sys.argv[2:])
"""

#: Variable in which Slurm tells a task the address of the host that started it.
LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"

#: What answers calls, by the first part of their names: module and function, imported by the first call. They
#: are closed in this order.
OBJECTS: dict[str, str] = {
    "ranks": "pytest_llenergy.hosts.agent_ranks:AgentRanks",
    "rounds": "pytest_llenergy.hosts.agent_meters:open_rounds",
    "windows": "pytest_llenergy.hosts.agent_meters:open_windows",
    "host": "pytest_llenergy.hosts.host_facts:open_host",
}


def agent_command(slot: int | str, python: str = sys.executable) -> list[str]:
    """Return the command line of an agent, which reads its invitation from the standard input.

    Args:
        slot: Position of its host in the gang, or an environment variable of the agent that contains it.
        python: Interpreter on its host.
    """
    return [python, "-c", PROGRAM, guard.PACKAGE_PARENT, str(slot)]


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
    position = int(slot if slot.isdigit() else os.environ[slot])
    service = Service({name: _importer(where, lambda: link) for name, where in OBJECTS.items()})
    try:
        invitation = Invitation.decode(sys.stdin.readline())
        # Ray starts its actors at nice 15, which root can undo.
        if os.getpriority(os.PRIO_PROCESS, 0) > invitation.nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, invitation.nice)
        # Primitives only, since the versions may differ, and before: pytest reads one hello after another.
        facts = msgspec.to_builtins(describe())
        connection = connect(invitation, os.environ.get(LAUNCH_ADDRESS))
        _close_input()
        link = Link(connection, lambda message, _: _receive(link, service, message), echoes=True)
        link.send((HELLO, position, facts))
        reason = f"pytest {link.run(timeouts.FIRST_BEAT_S)}"
    except (WorkerError, OSError, ValueError) as error:
        reason = str(error)
    except SystemExit:
        reason = "was asked to end"
    for number in guard.ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)
    closer = threading.Thread(target=_close, args=(service,), daemon=True)
    closer.start()
    closer.join(timeouts.AGENT_CLOSE_TIMEOUT_S)
    with suppress(OSError):
        os.write(2, f"pytest-llenergy agent of slot {slot} ended: {reason}\n".encode(errors="replace"))
    # Threads may hang.
    os._exit(0)


def _receive(link: Link, service: Service, message: Message) -> None:
    if message[2] == "clock":
        link.send((RESULT, message[1], (time.monotonic_ns(), read_suspended_ns())))
    else:
        service.answer(link, message)


def _importer(where: str, link: Callable[[], Link]) -> Callable[[], Any]:
    module, _, name = where.partition(":")
    return lambda: getattr(import_module(module), name)(link())


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _close(service: Service) -> None:
    for name in OBJECTS:
        if name in service.objects:
            with suppress(Exception):
                service.objects[name].close()


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)
