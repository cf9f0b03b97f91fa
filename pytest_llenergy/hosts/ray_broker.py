# SPDX-License-Identifier: Apache-2.0
"""The process that speaks to Ray for pytest. ``hosts.ray`` starts it and sends it JSON lines.

``ray.init`` starts tens of threads and replaces signal handlers, so pytest's own process never calls it. When
this process ends, in whatever way, Ray ends the actors that it has started and frees their GPUs. It ends when
its standard input does, or with the thread that started it. Only this module imports ray.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from pytest_llenergy.hosts.agent import agent_command
from pytest_llenergy.lifetime import die_with_parent

#: Time limit for a connection to the cluster's port (seconds).
REACH_TIMEOUT_S = 5.0
#: Interval of the checks whether a placement group has got its GPUs (seconds).
WAIT_POLL_S = 0.05
#: Time limit for Ray's first decision on a placement group (seconds).
SCHEDULING_TIMEOUT_S = 5.0
#: How long GPUs that were released may look taken (seconds).
RELEASE_S = 1.0
#: Interval of a holder's checks whether its agent and its raylet still run (seconds).
HOLDER_POLL_S = 0.2
#: Replaces the characters that separate the parts of a domain's name.
DASHES = str.maketrans("/:", "--")
#: The longest command that names a job in a message.
COMMAND_LENGTH = 200


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


class RequestError(Exception):
    """A request failed, for the reason in the message: one line."""


class Requests:
    """Lines of JSON from pytest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether there is a request, or the end."""
        return b"\n" in self._buffer or bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def next(self) -> dict[str, Any]:
        """Return the next request. Raises ``EOFError`` when pytest is gone."""
        while b"\n" not in self._buffer:
            part = os.read(self._descriptor, 1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request


class Broker:
    """Serves pytest's requests.

    Args:
        ray: The module, which is connected to a cluster.
        requests: Requests of pytest.
        answers: Descriptor for answers and events.
    """

    def __init__(self, ray: Any, requests: Requests, answers: int) -> None:
        self._ray = ray
        #: Of the control store of the cluster.
        self.address: str = ray.get_runtime_context().gcs_address
        self._requests = requests
        self._answers = answers
        self._lock = Lock()
        #: Placement group and actors of each gang.
        self._groups: dict[int, tuple[Any, list[Any]]] = {}

    def serve(self) -> None:
        """Answer requests until pytest is gone."""
        verbs: dict[str, Callable[..., Any]] = {
            "offers": self._offers,
            "gang": self._gang,
            "release": self._release,
        }
        with suppress(EOFError):
            while True:
                request = self._requests.next()
                number, verb = request.pop("id"), request.pop("verb")
                try:
                    # Whatever asks a head that has ended blocks for a minute.
                    reach(self.address)
                    self.send(id=number, ok=verbs[verb](**request))
                except Exception as error:
                    # Whatever a verb raises, pytest waits for its answer.
                    self.send(id=number, error=_describe_error(error))

    def send(self, **message: Any) -> None:
        """Send an answer or event; threads of Ray do too."""
        with self._lock, suppress(OSError):
            line = json.dumps(message).encode() + b"\n"
            while line:
                line = line[os.write(self._answers, line) :]

    def _offers(self) -> list[dict[str, Any]]:
        """Return each host with the number of its GPUs, and who holds some."""
        from ray._private.state import available_resources_per_node
        from ray.util import placement_group_table

        free = available_resources_per_node()
        groups = [row for row in placement_group_table().values() if row["state"] == "CREATED"]
        offers = []
        nodes = self._list_nodes()
        for node, name in zip(nodes, _distinct_names(nodes), strict=True):
            gpus = int(node["Resources"].get("GPU", 0))
            held = {_name_group(row): _count_gpus(row, node["NodeID"]) for row in groups}
            holders = [holder for holder, count in held.items() if count]
            if gpus - free.get(node["NodeID"], {}).get("GPU", 0) > sum(held.values()):
                holders += self._list_jobs()
            offers.append({"name": name, "gpus": gpus, "holders": holders})
        return offers

    def _list_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive: this one first, then by name."""
        here = self._ray.get_runtime_context().get_node_id()
        return sorted(
            (node for node in self._ray.nodes() if node["Alive"]),
            key=lambda node: (
                node["NodeID"] != here,
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
            ),
        )

    def _list_jobs(self) -> list[str]:
        """Return the drivers whose actors or tasks may hold GPUs; Ray does not report which do."""
        from ray._private.state import state

        return [
            f"perhaps {job['Entrypoint'][:COMMAND_LENGTH]} "
            f"(process {job['DriverPid']} on {job['DriverIPAddress']})"
            for job in state.job_table()
            if not job["IsDead"] and "ray_broker" not in job["Entrypoint"]
        ]

    def _gang(
        self,
        gang: int,
        name: str,
        hosts: int,
        per_host: int,
        wait_s: float,
        avoid: list[str],
        invitation: str,
    ) -> dict[str, Any]:
        """Start an agent on each of some hosts, or on none.

        Args:
            gang: Number for ``release``.
            name: Name of the placement group, which others see while they wait.
            hosts: Number of hosts.
            per_host: GPUs of each host; 0 for hosts without GPUs.
            wait_s: How long to wait for GPUs that others hold (seconds).
            avoid: Names of hosts that are not used.
            invitation: Written to each agent's standard input.

        Returns:
            The ``names`` of the hosts by slot: this host first, then by name. Or ``never`` if the cluster has
            no such hosts, or the holders as ``busy``.
        """
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        everywhere = self._list_nodes()
        names = dict(zip((node["NodeID"] for node in everywhere), _distinct_names(everywhere), strict=True))
        left_out = [node for node, host in names.items() if host in avoid]
        needed, kind = (per_host, "GPU") if per_host else (1, "CPU")
        # If some hosts are excluded, Ray does not report that the others are too few.
        allowed = [node for node in everywhere if node["NodeID"] not in left_out]
        if sum(node["Resources"].get(kind, 0) >= needed for node in allowed) < hosts:
            return {"never": True}
        labels = {"ray.io/node-id": f"!in({','.join(left_out)})"} if left_out else {}
        group = placement_group(
            [{kind: needed}] * hosts,
            strategy="STRICT_SPREAD",
            name=name,
            bundle_label_selector=[labels] * hosts if labels else None,
        )
        self._groups[gang] = group, []
        outcome = self._wait_for_group(group, wait_s)
        if "bundles_to_node_id" not in outcome:
            self._release(gang)
            return outcome
        bundles = {node: index for index, node in outcome["bundles_to_node_id"].items()}
        nodes = [node for node in everywhere if node["NodeID"] in bundles]
        if len(nodes) < hosts:
            raise RequestError("a host has gone while its agent was about to start")
        remote = self._ray.remote(num_cpus=0, max_restarts=0)(Holder)
        # Ray ends an actor when its last handle goes.
        _, actors = self._groups[gang]
        for slot, node in enumerate(nodes):
            strategy = PlacementGroupSchedulingStrategy(group, int(bundles[node["NodeID"]]))
            actor = remote.options(num_gpus=per_host, scheduling_strategy=strategy).remote()
            # Not an argument of the actor: those are stored in the control store of the cluster.
            ended = actor.run.remote(agent_command(slot), invitation, per_host).future()
            ended.add_done_callback(functools.partial(self._report_end, gang, slot))
            actors.append(actor)
        return {"names": [names[node["NodeID"]] for node in nodes]}

    def _wait_for_group(self, group: Any, wait_s: float) -> dict[str, Any]:
        from ray.util import placement_group_table

        begin_s, reported = time.monotonic(), None
        while True:
            row: dict[str, Any] = placement_group_table(group)
            if row["state"] == "CREATED":
                return row
            outcome = row["stats"]["scheduling_state"]
            late_s = time.monotonic() - begin_s - wait_s
            if outcome == "INFEASIBLE":
                return {"never": True}
            if outcome == "NO_RESOURCES" or late_s > SCHEDULING_TIMEOUT_S:
                holders = sorted({name for offer in self._offers() for name in offer["holders"]})
                if late_s >= 0:
                    return {"busy": holders}
                # GPUs that were just released are free within a second.
                if holders != reported and time.monotonic() - begin_s > RELEASE_S:
                    self.send(event="waiting", holders=holders)
                    reported = holders
            if self._requests.wait(WAIT_POLL_S):
                raise RequestError("another request ended the wait for GPUs")

    def _report_end(self, gang: int, slot: int, ended: Any) -> None:
        error = ended.exception()
        reason = ended.result() if error is None else f"its Ray actor ended: {_first_line(error)}"
        self.send(event="ended", gang=gang, slot=slot, reason=reason)

    def _release(self, gang: int) -> None:
        from ray.util import remove_placement_group

        if gang in self._groups:
            remove_placement_group(self._groups.pop(gang)[0])


def _name_group(row: Mapping[str, Any]) -> str:
    return row["name"] or f"placement group {row['placement_group_id']}"


def _count_gpus(row: Mapping[str, Any], node: str) -> float:
    """Return how many GPUs of a node a placement group has."""
    places = row["bundles_to_node_id"]
    return sum(
        float(bundle.get("GPU", 0)) for index, bundle in row["bundles"].items() if places[index] == node
    )


def _distinct_names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the host names, with the address where several nodes are on one host.

    The names of domains begin with them, so an IPv6 address has "-" in place of ":".
    """
    names = [str(node["NodeManagerHostname"]) for node in nodes]
    return [
        (name if names.count(name) == 1 else f"{name} ({node['NodeManagerAddress']})").translate(DASHES)
        for name, node in zip(names, nodes, strict=True)
    ]


def _first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or the name of its class."""
    text = ""
    with suppress(Exception):
        text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def _describe_error(error: Exception) -> str:
    """Return one line: what Ray and this module raise on purpose explains itself."""
    name, line = type(error).__name__, _first_line(error)
    if isinstance(error, RequestError) or type(error).__module__.startswith("ray.") or line == name:
        return line
    return f"{name}: {line}"


def reach(address: str) -> None:
    """Connect to the port of a cluster's head. If it has ended, Ray would try for a minute.

    Raises:
        RequestError: It cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise RequestError(f"its head cannot be reached: {error}") from None


def connect(address: str) -> Any:
    """Connect to a cluster. Returns the module ray.

    Args:
        address: ``HOST:PORT``, or ``auto``.

    Raises:
        RequestError: There is no such cluster, or it runs another version of Ray or Python.
    """
    # With uv, Ray would send the working directory to every host and install its environment there.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray

    if address != "auto":
        reach(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except RuntimeError as error:
        found = re.findall(r"(Ray|Python): (\S+)", str(error))
        if "Version mismatch" not in str(error) or len(found) != 4:
            raise RequestError(_first_line(error)) from None
        cluster, own = (" and ".join(map(" ".join, part)) for part in (found[:2], found[2:]))
        raise RequestError(f"the cluster runs {cluster}, pytest {own}; install the same ones") from None
    except (ConnectionError, ValueError) as error:
        none = "none runs on this host; set RAY_ADDRESS, or give its address as ray:HOST:PORT"
        raise RequestError(none if address == "auto" else _first_line(error)) from None
    return ray


def main(parent_pid: str, address: str) -> None:
    """Serve the process that started this one.

    Args:
        parent_pid: Its pid.
        address: See ``connect``.
    """
    die_with_parent(int(parent_pid))
    answers = os.dup(1)
    # Whatever prints goes to the log.
    os.dup2(2, 1)
    requests = Requests(0)
    try:
        ray = connect(address)
    except RequestError as error:
        os.write(answers, json.dumps({"error": str(error)}).encode() + b"\n")
        return
    broker = Broker(ray, requests, answers)
    broker.send(ok=broker.address)
    broker.serve()
    # An orderly end takes longer, and Ray ends the actors of a driver in the same way.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
