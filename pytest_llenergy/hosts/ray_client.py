# SPDX-License-Identifier: Apache-2.0
"""The process that speaks to Ray for pytest, which calls ``RayClient``, one method at a time.

``ray.init`` starts tens of threads and replaces signal handlers, so pytest's own process never calls it. When
this process ends, in whatever way, Ray ends the actors that it has started and frees their GPUs. It ends when
its connection to pytest does, or with the thread that started it. Only this module imports ray.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.record.text import one_line, shorten

#: Time limit for a connection to the cluster's port (seconds).
REACH_TIMEOUT_S = 5.0
#: How long one call waits for GPUs that others hold, and the interval of its checks (seconds). Those that
#: were just released are free then.
WAIT_S, WAIT_POLL_S = 2.0, 0.02
#: Interval of a holder's checks whether its agent and its raylet still run (seconds).
HOLDER_POLL_S = 0.2
#: How much of an error of Ray a message quotes (characters).
QUOTED = 600


class Holder:
    """An actor that holds the GPUs of one host, and is the parent of the agent that uses them.

    Ray pickles it by value, because this module is run as ``__main__``. So a host without pytest-llenergy can
    report that.
    """

    def run(self, command: Sequence[str], invitation: str, gpus: int) -> str:
        """Run the agent until it ends, or until the raylet does, which Ray's actors outlive.

        Args:
            command: Command line of the agent; its interpreter is replaced by that of the actor.
            invitation: Written to the agent's standard input.
            gpus: How many GPUs the actor holds.

        Returns:
            How the agent ended, and the last line of its output.
        """
        raylet = os.getppid()
        # With no GPU, Ray leaves the list of the raylet, which names all of its GPUs.
        hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        with tempfile.TemporaryFile() as output:
            agent = subprocess.Popen(
                [sys.executable, *command[1:]],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **hidden},
                start_new_session=True,
                text=True,
            )
            with suppress(BrokenPipeError):
                agent.stdin.write(f"{invitation}\n")  # type: ignore[union-attr]
                agent.stdin.close()  # type: ignore[union-attr]
            while agent.poll() is None and os.getppid() == raylet:
                time.sleep(HOLDER_POLL_S)
            if agent.poll() is None:
                # This process ends, and so does the agent, whose guard watches it.
                os._exit(1)
            output.seek(0)
            last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"{sys.executable} exited with {agent.returncode}: {last or 'no output'}"


class RayClient:
    """Answers pytest; ``connect`` comes first."""

    def __init__(self) -> None:
        self._ray: Any = None
        #: Placement group and actors of each gang.
        self._groups: dict[int, tuple[Any, list[Any]]] = {}
        #: Why an agent of each gang has ended.
        self._ended: dict[int, str] = {}

    def connect(self, address: str) -> tuple[str, str]:
        """Connect to a cluster: ``HOST:PORT``, or ``auto``. Returns its address, and that of this host in it.

        Raises:
            WorkerError: There is no such cluster.
            RuntimeError: It runs another version of Ray or Python.
        """
        # With uv, Ray would send the working directory to every host and install its environment there.
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        import ray

        if address != "auto":
            _reach(address)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError) as error:
            none = "none runs on this host; set RAY_ADDRESS, or give its address as ray:HOST:PORT"
            raise WorkerError(none if address == "auto" else str(error)) from None
        self._ray = ray
        return ray.get_runtime_context().gcs_address, self._list_nodes()[0]["NodeManagerAddress"]

    def offers(self) -> list[tuple[str, int]]:
        """Return the name of each host with the number of its GPUs."""
        nodes = self._list_nodes()
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        return list(zip(self._names().values(), gpus, strict=True))

    def place(self, gang: int, hosts: int, per_host: int, avoid: Sequence[str]) -> bool:
        """Ask for the GPUs of some hosts, or of none. Returns whether there are enough hosts.

        Args:
            gang: Its number.
            hosts: Number of hosts.
            per_host: GPUs of each host; 0 for hosts without GPUs.
            avoid: Names of hosts that are not used.
        """
        from ray.util import placement_group

        names = self._names()
        left_out = [node for node, host in names.items() if host in avoid]
        needed, kind = (per_host, "GPU") if per_host else (1, "CPU")
        # If some hosts are excluded, Ray does not report that the others are too few.
        allowed = [node for node in self._list_nodes() if node["NodeID"] not in left_out]
        if sum(node["Resources"].get(kind, 0) >= needed for node in allowed) < hosts:
            return False
        labels = {"ray.io/node-id": f"!in({','.join(left_out)})"} if left_out else {}
        group = placement_group(
            [{kind: needed}] * hosts,
            strategy="STRICT_SPREAD",
            name=f"pytest-llenergy {gang} of process {os.getpid()}",
            bundle_label_selector=[labels] * hosts if labels else None,
        )
        self._groups[gang] = group, []
        return True

    def await_group(self, gang: int) -> bool | None:
        """Wait for the GPUs of a gang. Returns whether it can have them; None if others have held them."""
        from ray.util import placement_group_table

        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            row = placement_group_table(self._groups[gang][0])
            if row["state"] == "CREATED" or row["stats"]["scheduling_state"] == "INFEASIBLE":
                return bool(row["state"] == "CREATED")
            time.sleep(WAIT_POLL_S)
        return None

    def start(self, gang: int, per_host: int, invitation: str) -> list[str]:
        """Start the agents of a gang that has its GPUs.

        Returns:
            The names of the hosts by slot: this host first, then by name.
        """
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from pytest_llenergy.hosts.agent import agent_command

        # Ray ends an actor when its last handle goes.
        group, actors = self._groups[gang]
        table = placement_group_table(group)["bundles_to_node_id"]
        bundles = {node: int(index) for index, node in table.items()}
        hosts = [(node, name) for node, name in self._names().items() if node in bundles]
        if len(hosts) < len(bundles):
            raise WorkerError("a host has gone while its agent was about to start")
        remote = self._ray.remote(num_cpus=0, max_restarts=0)(Holder)
        for slot, (node, name) in enumerate(hosts):
            strategy = PlacementGroupSchedulingStrategy(group, bundles[node])
            actor = remote.options(num_gpus=per_host, scheduling_strategy=strategy).remote()
            # Not an argument of the actor: those are stored in the control store of the cluster.
            ended = actor.run.remote(agent_command(slot), invitation, per_host).future()
            ended.add_done_callback(partial(self._note_end, gang, name))
            actors.append(actor)
        return [name for _, name in hosts]

    def release(self, gang: int) -> None:
        """Free the GPUs of a gang. Ray ends its actors, if they have not ended."""
        from ray.util import remove_placement_group

        if gang in self._groups:
            remove_placement_group(self._groups.pop(gang)[0])

    def ended(self, gang: int) -> str | None:
        """Return why an agent has ended, if Ray has found out."""
        return self._ended.get(gang)

    def _note_end(self, gang: int, host: str, ended: Any) -> None:
        error = ended.exception()
        reason = ended.result() if error is None else f"its Ray actor ended: {_first_line(error)}"
        self._ended[gang] = f"{host}: {reason}"

    def _list_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive: this one first, then by name."""
        here = self._ray.get_runtime_context().get_node_id()
        names = ("NodeManagerHostname", "NodeManagerAddress")
        return sorted(
            (node for node in self._ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeID"] != here, *(node[name] for name in names)),
        )

    def _names(self) -> dict[str, str]:
        """Return the name of each node: that of its host, or its address if it shares a host."""
        nodes = self._list_nodes()
        names = [node["NodeManagerHostname"] for node in nodes]
        return {
            node["NodeID"]: name if names.count(name) == 1 else node["NodeManagerAddress"]
            for name, node in zip(names, nodes, strict=True)
        }


def _first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or the name of its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _reach(address: str) -> None:
    """Connect to the port of a cluster's head; raises ``WorkerError`` if it cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise WorkerError(f"its head cannot be reached: {error}") from None


def main(parent_pid: str, descriptor: str) -> None:
    """Serve the process ``parent_pid``, which started this one, over a socket."""
    die_with_parent(int(parent_pid))
    client, connection = RayClient(), Connection(int(descriptor))
    with suppress(EOFError, OSError):
        while True:
            method, args = connection.recv()
            problem = value = None
            try:
                value = getattr(client, method)(*args)
            except Exception as error:  # whatever Ray raises
                problem = shorten(one_line(str(error)), QUOTED) or type(error).__name__
            connection.send((problem, value))
    # An orderly end takes longer, and Ray ends the actors of a driver in the same way.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
