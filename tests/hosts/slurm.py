# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes on this machine: Debian's daemons, made-up GPUs, and a second clock.

The first node is the machine itself. The second has its own host name, and its monotonic clock is
``agents.SHIFT_S`` ahead. Each node has its own lock directory, cache and NVML stand-in. All daemons and tasks
are in a PID namespace whose first process ends with pytest, so that nothing remains.

Needs root, and the packages ``slurmctld slurmd munge slurm-client``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from ..nvml_sim.boards import Board
from ..nvml_sim.world import World
from .agents import another_host, can_be_another_host

__all__ = ["GPUS", "NODES", "Slurm", "slurm_cluster"]

NODES = ("n1", "n2")
GPUS = 4
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "salloc", "scontrol", "unshare")
#: Long enough for a machine with many other tests.
START_TIMEOUT_S = 180

#: The first process of the namespace. It adopts and reaps orphans; when it ends, the kernel kills all others.
INIT = """
import json, os, signal, sys, time

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, reap)
for log, awaited, command in json.loads(sys.argv[1]):
    with open(log, "ab") as out:
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, out.fileno(), number) for number in (1, 2)]
        os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True)
    while not os.path.exists(awaited):
        time.sleep(0.01)
sys.stdin.read()
"""

CONFIGURATION = """\
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/log/ctld
SlurmdLogFile={root}/log/%n
TaskProlog={root}/prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=10
KillWait=2
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=gpu Nodes=n[1-2] Default=YES MaxTime=INFINITE
"""


def missing() -> str | None:
    """Return why there can be no Slurm here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if absent:
        return f"no {', '.join(absent)}; install slurmctld, slurmd, munge and slurm-client"
    return None if can_be_another_host() else "the second node needs a time namespace, which needs root"


def search_path() -> str:
    """Return a search path with the daemons, which are not on that of users."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Slurm:
    """The two nodes while they run.

    Attributes:
        root: Directory with configuration and logs.
        environment: Variables with which ``salloc``, ``srun`` and pytest find it.
        worlds: Boards of each node. Times are on the clock of the process that reads them.
        locks: Lock directory of each node.
    """

    def __init__(self, root: Path, nvml_library: Path) -> None:
        """Start the daemons and wait until both nodes are idle."""
        self.root = root
        self.environment = {**os.environ, "PATH": search_path(), "SLURM_CONF": str(root / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
            if name != "SLURM_CONF":
                del self.environment[name]
        self._stack, self._reserved = ExitStack(), ExitStack()
        for name in ("state", "spool", "log", "munge", "locks", "cache"):
            (root / name).mkdir()
        self.locks = {name: root / "locks" / name for name in NODES}
        self._library = nvml_library
        self.worlds: dict[str, World] = {}
        for name in NODES:
            self._make_node(name)
        self._write_files()
        self._init = self._start()
        try:
            self.wait_until_idle()
        except BaseException:
            self.close()
            raise
        self._reserved.close()

    def _reserve_ports(self, count: int) -> Sequence[int]:
        """Return ports that nobody else gets until the daemons, which share them, listen there."""
        bound = [self._reserved.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]

    def variables(self, node: str) -> dict[str, str]:
        """Return the variables of tasks that differ between the nodes."""
        return {
            "LLENERGY_LOCK_DIR": f"{self.root}/locks/{node}",
            "LLENERGY_CACHE_DIR": f"{self.root}/cache/{node}",
            "NVML_SIM_WORLD": f"{self.root}/{node}.world",
            "LD_LIBRARY_PATH": str(self._library.parent),
        }

    def _make_node(self, name: str) -> None:
        (self.root / "spool" / name).mkdir()
        (self.root / "cache" / name).mkdir()
        self.locks[name].mkdir()
        self.locks[name].chmod(0o1777)
        devices = self.root / "dev" / name
        devices.mkdir(parents=True)
        for number in range(GPUS):
            # Slurm hides GPUs that are not character devices from tasks, without a message.
            (devices / f"nvidia{number}").symlink_to(os.devnull)
        digit = name[-1]
        boards = [
            Board(
                uuid=f"GPU-{digit}{number:07d}-0000-4000-8000-{number:012d}",
                power_w=100.0 + 10 * number,
                # Counters of several boards do not tick together.
                latch_phase_ns=23_000_000 * number,
                latch_jitter_ns=2_000_000,
            )
            for number in range(GPUS)
        ]
        self.worlds[name] = self._stack.enter_context(World(self.root / f"{name}.world", boards))

    def _write_files(self) -> None:
        root = self.root
        key = root / "munge" / "key"
        (root / "munge").chmod(0o700)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        (root / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        prolog = root / "prolog"
        variables = self.variables("$SLURMD_NODENAME")
        lines = [f'echo "export {name}={value}"' for name, value in variables.items()]
        prolog.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        prolog.chmod(0o755)
        port, *ports = self._reserve_ports(1 + len(NODES))
        text = CONFIGURATION.format(root=root, host=host, port=port)
        for name, number in zip(NODES, ports, strict=True):
            text += (
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={number} CPUs=8 "
                f"RealMemory=1000 Gres=gpu:{GPUS}\n"
            )
        (root / "slurm.conf").write_text(text)
        (root / "gres.conf").write_text(
            "".join(
                f"NodeName={name} Name=gpu File={root}/dev/{name}/nvidia[0-{GPUS - 1}]\n" for name in NODES
            )
        )

    def _start(self) -> subprocess.Popen[bytes]:
        root, configuration = self.root, str(self.root / "slurm.conf")
        munge = ["munged", "--force", "--foreground", "--num-threads=1"]
        munge += [f"--{name}-file={root}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        # Slurm looks up the host name of the second node.
        second = f"mount --bind '{root}/hosts' /etc/hosts && exec slurmd -D -N n2 -f '{configuration}'"
        namespace = [*another_host("n2"), "unshare", "--mount", "sh", "-c"]
        # Each with a file to wait for before the next is started.
        commands = [
            (f"{root}/log/munged.out", f"{root}/munge/socket", [*munge, f"--socket={root}/munge/socket"]),
            (f"{root}/log/ctld.out", f"{root}", ["slurmctld", "-D", "-f", configuration]),
            (f"{root}/log/n1.out", f"{root}", ["slurmd", "-D", "-N", "n1", "-f", configuration]),
            (
                f"{root}/log/n2.out",
                f"{root}",
                [*namespace, second],
            ),
        ]
        with (root / "log" / "init").open("ab") as log:
            return subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, "-c", INIT, json.dumps(commands)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    def wait_until_idle(self) -> None:
        """Wait until no node has work, and Slurm reaches all."""
        deadline = time.monotonic() + START_TIMEOUT_S
        states = ""
        while states != f"idle {len(NODES)}":
            if time.monotonic() > deadline or self._init.poll() is not None:
                raise RuntimeError(f"Slurm did not start ({states or 'no answer'}):\n{self.logs()}")
            time.sleep(0.05)
            states = self.run("sinfo", "-h", "-o", "%t %D", check=False).stdout.strip()

    @contextmanager
    def frozen_daemon(self) -> Iterator[None]:
        """Stop the daemon of the second node for a while."""
        (daemon,) = [
            each
            for each in psutil.Process(self._init.pid).children(recursive=True)
            if each.cmdline()[:4] == ["slurmd", "-D", "-N", NODES[1]]
        ]
        daemon.suspend()
        try:
            yield
        finally:
            daemon.resume()
            self.wait_until_idle()

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 120, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, outside of any allocation unless it is ``salloc`` or ``srun``."""
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
            cwd=cwd,
        )

    def logs(self) -> str:
        """Return the end of each log."""
        files = sorted((self.root / "log").iterdir())
        return "\n".join(f"--- {each.name}\n{each.read_text(errors='replace')[-2000:]}" for each in files)

    def close(self) -> None:
        """Kill everything."""
        self._stack.close()
        self._reserved.close()
        init: IO[bytes] | None = self._init.stdin
        assert init is not None
        init.close()
        try:
            self._init.wait(10)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait()


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Slurm]:
    """Run a Slurm of two nodes. With LLENERGY_TEST_CLUSTER=required it must not be missing."""
    reason = missing()
    if reason is not None:
        if os.environ.get("LLENERGY_TEST_CLUSTER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    slurm = Slurm(tmp_path_factory.mktemp("slurm"), nvml_library)
    yield slurm
    slurm.close()
