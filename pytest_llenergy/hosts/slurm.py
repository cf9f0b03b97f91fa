# SPDX-License-Identifier: Apache-2.0
"""The nodes of a Slurm allocation. Slurm only starts agents there; a gang is one step of the job."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pytest_llenergy.errors import PlanError
from pytest_llenergy.hosts.agent import agent_command
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.launchers import (
    NONE_LOST,
    Gang,
    HostOffer,
    NeverError,
    Shape,
    explain_never,
    read_end,
)
from pytest_llenergy.hosts.remote_host import accept_agents
from pytest_llenergy.record.text import one_line

#: Time limit for the agents of a gang to connect (seconds). A shared file system starts interpreters slowly.
AGENTS_TIMEOUT_S = 60.0
#: Time limit for Slurm's controller to answer (seconds).
ANSWER_TIMEOUT_S = 30.0
#: Time limit for a step to end after its agents (seconds). After it Slurm is told to kill the tasks.
END_TIMEOUT_S = 2.0
#: How much later than a message of ``srun`` the output of its tasks may arrive (seconds).
OUTPUT_DELAY_S = 0.3

#: Nodes in the details of a job, with the generic resources that it has on each of them.
NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
#: GPUs among these resources, such as the 2 and the 4 of ``gpu:a100:2(IDX:0-1),gpu:h100:4(IDX:2-5)``.
GPUS = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:([0-9]+)")

#: What ``srun`` reports when a task has failed, while others run.
TASK_ENDED = re.compile(r"srun: error: \S+: tasks? [0-9,-]+: ")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that change what ``srun`` does.

    Most options of ``srun`` have one. In a step or job they describe it, and not the step to be started.
    """
    prefixes = ("SLURM_", "SBATCH_", "SRUN_")
    kept = {name: value for name, value in environment.items() if not name.startswith(prefixes)}
    return kept | {name: environment[name] for name in ("SLURM_CONF",) if name in environment}


class SlurmCluster:
    """The nodes of the allocation in which pytest runs. Implements ``Cluster``.

    For Slurm its GPUs are free while the job runs, so no gang waits. Leases on each host keep several runs in
    one allocation apart. Of nodes with unlike numbers of GPUs, as many are used on each as the least has.

    Args:
        environment: Environment variables with which the run began.

    Raises:
        PlanError: pytest does not run inside an allocation, or Slurm's commands are not on the path.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._job = environment.get("SLURM_JOB_ID", "")
        if not self._job:
            raise PlanError(
                "SLURM_JOB_ID is not set; run this inside a Slurm job, such as that of salloc --nodes=2 "
                "--gres=gpu:8"
            )
        if shutil.which("srun", path=environment.get("PATH")) is None:
            raise PlanError(f"srun is not on PATH in Slurm job {self._job}; load Slurm's module")
        self._environment = clean_environment(environment)
        found = self._query("scontrol", "show", "job", "--details", "--oneliner", self._job)
        # One task of an array has the number of the whole job, all of which scontrol then lists.
        details = next((each for each in found.splitlines() if each.startswith(f"JobId={self._job} ")), "")
        self._gpus: dict[str, int] = {}
        for listing, resources in NODES.findall(details):
            count = sum(map(int, GPUS.findall(resources)))
            names = self._query("scontrol", "show", "hostnames", listing).split()
            self._gpus |= dict.fromkeys(names, count)
        if not self._gpus:
            raise PlanError(f"SLURM_JOB_ID is {self._job}, a job without nodes; run this inside a job")

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [HostOffer(name, min(self._gpus.values())) for name in self._gpus]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> Gang:
        """See ``Cluster``."""
        offers = self.offers()
        names = [each.name for each in offers if each.devices >= shape.per_host and each.name not in avoid]
        if len(names) < shape.hosts:
            hint = "" if offers[0].devices else "; start the job with --gres=gpu:N"
            raise NeverError(explain_never(f"Slurm job {self._job}", shape, offers, avoid) + hint)
        return self._start(names[: shape.hosts], offers[0].devices)

    def close(self) -> None:
        """See ``Cluster``. The agents have ended with their gang."""

    def _start(self, nodes: Sequence[str], gpus: int) -> Gang:
        # Slurm tells each agent the address of this host.
        listener, deadline_s = Listener(""), time.monotonic() + AGENTS_TIMEOUT_S
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the gang
        step = subprocess.Popen(
            [
                *("srun", f"--jobid={self._job}", "--overlap", "--job-name=llenergy"),
                *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
                f"--nodelist={','.join(nodes)}",
                # Without it, a task has as many as the job requests for each of its own tasks.
                *([f"--gres=gpu:{gpus}"] if gpus else []),
                *("--export=ALL", "--cpu-bind=none", "--mpi=none"),
                # When one host is lost, pytest asks the others for what they have measured.
                *("--kill-on-bad-exit=0", "--wait=0"),
                *agent_command("SLURM_PROCID"),
            ],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ctrl-C at a terminal is pytest's business.
            start_new_session=True,
        )

        def explain() -> str | None:
            if step.poll() is None and not TASK_ENDED.search(read_end(log)):
                if time.monotonic() < deadline_s:
                    return None
                return f"no connection within {AGENTS_TIMEOUT_S:g} s; srun printed: {read_end(log)}"
            # What the tasks have printed may come later.
            time.sleep(OUTPUT_DELAY_S)
            return f"srun printed: {read_end(log)}"

        def end() -> None:
            try:
                step.wait(END_TIMEOUT_S if gang is not None else 0.0)
            except subprocess.TimeoutExpired:
                # Slurm kills the tasks of a step without srun.
                step.kill()
                step.wait()
            log.close()

        gang: Gang | None = None
        try:
            assert step.stdin is not None
            with suppress(BrokenPipeError), step.stdin as invitation:
                invitation.write(f"{listener.invitation}\n".encode())
            gang = Gang(accept_agents(listener, nodes, 2 * AGENTS_TIMEOUT_S, explain), end)
        except BaseException:
            end()
            raise
        return gang

    def _query(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PlanError(f"Slurm job {self._job}: {error}") from None
        if done.returncode:
            raise PlanError(f"SLURM_JOB_ID is {self._job}: {' '.join(command)}: {one_line(done.stderr)}")
        return done.stdout
