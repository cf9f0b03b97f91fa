# SPDX-License-Identifier: Apache-2.0
"""The nodes of a Slurm allocation. Slurm only starts agents there; a gang is one step of the job."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.hosts.agent import agent_command
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.launchers import NONE_LOST, HostOffer, NeverError, Shape
from pytest_llenergy.hosts.remote_host import RemoteHost, accept_agents, close_all
from pytest_llenergy.ranks.failure import signal_name
from pytest_llenergy.record.text import one_line, shorten

#: A command that starts a job.
EXAMPLE = "salloc --nodes=2 --gres=gpu:8"

#: Time limit for the agents of a gang to connect (seconds). A shared file system starts interpreters slowly.
AGENTS_TIMEOUT_S = 60.0
#: Time limit for Slurm's controller to answer (seconds).
ANSWER_TIMEOUT_S = 30.0
#: Time limit for a step to end after its agents, and if one of them was lost, which may never end (seconds).
END_TIMEOUT_S, LOST_END_TIMEOUT_S = 5.0, 1.5
#: How much later than a message of ``srun`` the output of its tasks may arrive (seconds).
OUTPUT_DELAY_S = 0.3
#: How much of the output of ``srun`` is read (bytes), and how much of it a message quotes (characters).
TAIL_BYTES, QUOTED = 4000, 600

#: State of a job in its details.
STATE = re.compile(r" JobState=(\S+)")
#: Nodes in the details of a job, with the generic resources that it has on each of them.
NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
#: GPUs among these resources, such as the 2 and the 4 of ``gpu:a100:2(IDX:0-1),gpu:h100:4(IDX:2-5)``.
GPUS = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:([0-9]+)")

#: What ``srun`` reports when a task has failed, while others run.
TASK_ENDED = re.compile(r"^srun: error: \S+: tasks? [0-9,-]+: ", re.MULTILINE)

#: What ``srun`` prints where CPUs are never bound.
NO_BINDING = "srun: cluster configuration lacks support for cpu binding\n"


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that change what ``srun`` does.

    Most options of ``srun`` have one. In a step or job they describe it, and not the step to be started.
    """
    prefixes = ("SLURM_", "SBATCH_", "SRUN_")
    kept = {name: value for name, value in environment.items() if not name.startswith(prefixes)}
    return kept | {name: environment[name] for name in ("SLURM_CONF",) if name in environment}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same number of GPUs of the job: as Slurm lists them, and by name."""

    listing: str
    names: Sequence[str]
    gpus: int

    def __str__(self) -> str:
        return f"{Shape(len(self.names), self.gpus)} ({self.listing})"


class SlurmCluster:
    """The nodes of the allocation in which pytest runs. Implements ``Cluster``.

    For Slurm its GPUs are free while the job runs, so no gang waits. Leases on each host keep several runs in
    one allocation apart.

    Args:
        environment: Environment variables with which the run began.

    Raises:
        PlanError: pytest does not run inside an allocation, the allocation has ended, or Slurm's commands are
            not on the path.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._job = environment.get("SLURM_JOB_ID", "")
        if not self._job:
            raise PlanError(
                f"SLURM_JOB_ID is not set; run this inside a Slurm job, such as that of {EXAMPLE}"
            )
        for program in ("srun", "scontrol"):
            if shutil.which(program, path=environment.get("PATH")) is None:
                raise PlanError(
                    f"{program} is not on PATH in Slurm job {self._job}; load Slurm's module, or bind its "
                    "commands into the container"
                )
        self._environment = clean_environment(environment)
        self._partition = environment.get("SLURM_JOB_PARTITION", "")
        self._gangs: list[SlurmGang] = []
        try:
            #: The nodes of the job in Slurm's order, which do not change while it runs.
            self._nodes = self._list_nodes()
        except WorkerError as error:
            raise PlanError(f"{error}; run this inside a job that runs, such as that of {EXAMPLE}") from None

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [HostOffer(name, group.gpus) for group in self._nodes for name in group.names]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> SlurmGang:
        """See ``Cluster``."""
        offers = self.offers()
        fewest = min(offer.devices for offer in offers)
        fitting = [each for each in offers if each.devices >= shape.per_host and each.name not in avoid]
        chosen = fitting[: shape.hosts]
        # If the job has unlike numbers of GPUs, Slurm gives a step more than the fewest only in total.
        in_total = shape.hosts == 1 and any(offer.devices > fewest for offer in chosen)
        if len(chosen) < shape.hosts <= sum(offer.devices >= shape.per_host for offer in offers):
            left_out = "".join(f"; not used: {reason}" for reason in avoid.values())
            raise NeverError(
                f"Slurm job {self._job} cannot provide {shape}: too few hosts are left{left_out}"
            )
        if len(chosen) < shape.hosts or (shape.per_host > fewest and not in_total):
            raise NeverError(self._explain_never(shape))
        gpus = f"--gpus={chosen[0].devices}" if in_total else f"--gres=gpu:{fewest}" if fewest else ""
        gang = SlurmGang(self._job, [offer.name for offer in chosen], gpus, self._environment)
        self._gangs.append(gang)
        return gang

    def close(self) -> None:
        """See ``Cluster``."""
        for gang in self._gangs:
            gang.close()

    def _list_nodes(self) -> list[NodeGroup]:
        try:
            found = self._query("scontrol", "show", "job", "--details", "--oneliner", self._job)
        except WorkerError as error:
            raise WorkerError(f"SLURM_JOB_ID is {self._job}: {error}") from None
        # One task of an array, or component of a heterogeneous job, has the number of the whole job, all of
        # which scontrol then lists.
        jobs = found.splitlines()
        details = next((each for each in jobs if each.startswith(f"JobId={self._job} ")), "")
        groups = [
            NodeGroup(
                listing,
                self._query("scontrol", "show", "hostnames", listing).split(),
                sum(map(int, GPUS.findall(resources))),
            )
            for listing, resources in NODES.findall(details)
        ]
        state = "".join(STATE.findall(details))
        # Slurm remembers for minutes what an ended job had.
        if not groups or state != "RUNNING":
            raise WorkerError(f"SLURM_JOB_ID is {self._job}, a job that is {state or 'unknown'}")
        return groups

    def _explain_never(self, shape: Shape) -> str:
        """Describe what the job has, and the job that a test needs."""
        present = " and ".join(map(str, self._nodes))
        if not any(group.gpus for group in self._nodes):
            # GPUs of its nodes that were not requested are not part of the job.
            present += ", and was started without --gres=gpu:N or --gpus-per-node=N"
        partition = f"--partition={self._partition} " if self._partition else ""
        gpus = f" --gres=gpu:{shape.per_host}" if shape.per_host else ""
        return (
            f"Slurm job {self._job} cannot provide {shape}: it has {present}; another job may: salloc "
            f"{partition}--nodes={shape.hosts}{gpus}"
        )

    def _query(self, *command: str) -> str:
        """Return the output of one of Slurm's commands.

        Raises:
            WorkerError: It failed, or did not end in time.
        """
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ANSWER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer from Slurm within {ANSWER_TIMEOUT_S:g} s"
        else:
            if done.returncode == 0:
                return done.stdout
            reason = quote(done.stderr) or f"exit code {done.returncode}"
        raise WorkerError(f"{' '.join(command)}: {reason}")


class SlurmGang:
    """Nodes with an agent on each, which are the tasks of one step. Implements ``Gang``.

    Args:
        job: Number of the job.
        nodes: Names of its nodes, in Slurm's order.
        gpus: Option of ``srun`` that gives the agents GPUs of the job, or "".
        environment: Environment variables without those of the job.

    Raises:
        WorkerError: An agent does not start, or its host differs from the others.
    """

    def __init__(self, job: str, nodes: Sequence[str], gpus: str, environment: Mapping[str, str]) -> None:
        listener = Listener()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the gang
        self._deadline_s = time.monotonic() + AGENTS_TIMEOUT_S
        self._step = subprocess.Popen(
            [*step_command(job, nodes, gpus), *agent_command("SLURM_PROCID")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            # Ctrl-C at a terminal is pytest's business.
            start_new_session=True,
        )
        self.hosts: Sequence[RemoteHost] = ()
        try:
            assert self._step.stdin is not None
            with suppress(BrokenPipeError), self._step.stdin as invitation:
                invitation.write(f"{listener.invitation.encode()}\n".encode())
            self.hosts = accept_agents(listener, nodes, math.inf, self._explain_start)
            threading.Thread(target=self._watch, name="llenergy-srun", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def lost(self) -> Mapping[str, str]:
        """See ``Gang``."""
        found = {host.name: host.lost for host in self.hosts if host.lost is not None}
        reason = self._explain() if found and not self._log.closed else None
        return {
            name: f"{lost}; {reason}" if reason and reason not in lost else lost
            for name, lost in found.items()
        }

    def close(self) -> None:
        """See ``Gang``."""
        if not self.hosts:
            timeout_s = 0.0
        elif any(host.lost for host in self.hosts):
            timeout_s = LOST_END_TIMEOUT_S
        else:
            timeout_s = END_TIMEOUT_S
        close_all(self.hosts)
        try:
            self._step.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # Slurm kills the tasks of a step without srun.
            self._step.kill()
            self._step.wait()
        self._log.close()

    def _watch(self) -> None:
        """Give the hosts up when ``srun`` ends: the tasks of a step outlive one that was killed."""
        with suppress(ChildProcessError):
            # ``close`` reaps it.
            os.waitid(os.P_PID, self._step.pid, os.WEXITED | os.WNOWAIT)
        for host in self.hosts:
            if host.lost is None:
                host.give_up(self._explain() or "srun has ended")

    def _explain_start(self) -> str | None:
        """Return why agents cannot come any more, or do not come in time; None while they may."""
        if self._explain() is not None:
            # What the tasks have printed may come later.
            time.sleep(OUTPUT_DELAY_S)
            return self._explain()
        if time.monotonic() < self._deadline_s:
            return None
        printed = f"; srun printed: {quote(self._output)}" if self._output else ""
        return f"no connection within {AGENTS_TIMEOUT_S:g} s{printed}"

    def _explain(self) -> str | None:
        """Return what Slurm says about tasks that have ended; None while all run."""
        code = self._step.poll()
        if code is None and not TASK_ENDED.search(self._output):
            return None
        if code is not None and code < 0:
            return f"srun was killed by {signal_name(-code)}"
        return quote(self._output) or f"srun ended with exit code {code}"

    @property
    def _output(self) -> str:
        """The end of what ``srun`` and the agents have printed."""
        size = os.fstat(self._log.fileno()).st_size
        output = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        return output.decode(errors="replace").replace(NO_BINDING, "")


def step_command(job: str, nodes: Sequence[str], gpus: str) -> list[str]:
    """Return the command line that starts a program once on each node, beside other steps of the job.

    Args:
        job: Number of the job.
        nodes: Names of its nodes.
        gpus: Option with the GPUs that the program sees, or "".
    """
    return [
        *("srun", f"--jobid={job}", "--overlap", "--job-name=llenergy"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        f"--nodelist={','.join(nodes)}",
        # Without it, a task has as many as the job requests for each of its own tasks.
        *([gpus] if gpus else []),
        *("--export=ALL", "--cpu-bind=none", "--mpi=none"),
        # When one host is lost, pytest asks the others for what they have measured, and ends them itself.
        *("--kill-on-bad-exit=0", "--wait=0"),
    ]


def quote(output: str) -> str:
    """Return the output of a program on one line, without its end if it is long."""
    return shorten(one_line(output), QUOTED)
