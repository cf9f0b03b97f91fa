# SPDX-License-Identifier: Apache-2.0
"""Run the steps on each device until one fails: the first failed step identifies the fault."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from pytest_llenergy.cli.doctor import steps
from pytest_llenergy.cli.doctor.checkup import BackendFacts, Checkup, Finding
from pytest_llenergy.cli.doctor.step_process import StepProcess, collect_steps
from pytest_llenergy.cli.doctor.steps import STEP_TIMEOUT_S, Step, Trial, list_steps
from pytest_llenergy.cli.doctor.text import INDENT, render_backend, render_finding, render_step, render_trial
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import ADVICE, acquire
from pytest_llenergy.devices.mig import MIG_PREFIX
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.ranks.local import end_leftovers
from pytest_llenergy.ranks.plan import LOCALHOST, RankPlan
from pytest_llenergy.scratch import ScratchDirectory

NO_GPU = "no GPU"
NO_NCCL = "NCCL does not run on MIG instances"

#: Time to wait for a device: other runs release their idle ranks within it.
LEASE_TIMEOUT_S = 1.0

NO_VISIBLE_GPU = "no GPU is allowed"
HOLDER = "llenergy doctor"

Show = Callable[[str], None]


def run_trial(
    device: str | None,
    timeout_s: float = STEP_TIMEOUT_S,
    *,
    total_s: float = math.inf,
    peer: str | None = None,
    ranks: bool = True,
    reason: str = NO_GPU,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Trial:
    """Run all steps in fresh processes until one fails. The caller must hold the devices.

    Args:
        device: Full UUID, or None for the CPU.
        timeout_s: Limit for each step in seconds.
        total_s: Limit for all steps in seconds.
        peer: Second GPU for NCCL, whose group otherwise has one rank.
        ranks: Whether to run the steps of several processes.
        reason: Why the steps of GPUs are skipped on the CPU.
        on_step: Called with each step as soon as it is finished.

    Raises:
        WorkerError: There is no place for temporary files.
    """
    names = list_steps(device, ranks)
    skips = dict.fromkeys(steps.GPU_STEPS, reason) if device is None else {}
    if device is not None and device.startswith(MIG_PREFIX):
        skips[steps.NCCL] = NO_NCCL
    done: list[Step] = []
    output: list[str] = []
    stop = ""
    deadline_s = time.monotonic() + total_s

    def limit_s() -> float:
        return min(timeout_s, max(0.0, deadline_s - time.monotonic()))

    with ExitStack() as end:
        try:
            directory = end.enter_context(ScratchDirectory(on_stale=end_leftovers)).path
        except OSError as error:
            raise WorkerError(
                f"doctor: cannot create a directory for its files ({error}); set TMPDIR"
            ) from None
        single = [name for name in names if name not in skips and name not in steps.RANK_STEPS]
        alone = end.enter_context(closing(_run_single_process(device, single, limit_s, directory, output)))
        for name in names:
            try:
                if name in skips or stop:
                    step = Step(name, "skipped", skips.get(name, stop))
                elif name in steps.RANK_STEPS:
                    # A board may be configured to accept one process at a time.
                    alone.close()
                    devices = _devices_of_ranks(name, device, peer)
                    step = _run_ranks(name, devices, limit_s(), directory, output)
                else:
                    step = next(alone)
            except OSError as error:
                step = Step(name, "failed", f"cannot start a process: {error}")
            done.append(step)
            on_step(step)
            if step.state == "failed":
                stop = f"after the failure of {step.name}"
            elif step.name == steps.TORCH and step.state == "skipped":
                stop = step.detail
            elif not stop and not limit_s():
                stop = f"the steps before it took {total_s:g} s"
    return Trial(device, tuple(done), tuple(output))


def skipped_trial(device: str | None, reason: str) -> Trial:
    """Return a trial in which every step is skipped."""
    return Trial(device, tuple(Step(name, "skipped", reason) for name in list_steps(device, ranks=True)))


def _devices_of_ranks(name: str, device: str | None, peer: str | None) -> tuple[str | None, ...]:
    if name == steps.GLOO:
        return device, device
    # NCCL refuses two ranks on one GPU.
    return (device,) if peer is None else (device, peer)


def _run_single_process(
    device: str | None, names: Sequence[str], limit_s: Callable[[], float], directory: Path, output: list[str]
) -> Generator[Step, None, None]:
    with closing(StepProcess(_plan(device), names, directory)) as process:
        for name in names:
            (step,) = collect_steps([process], name, limit_s()).values()
            if step.state == "failed":
                output += process.output()
            yield step


def _run_ranks(
    name: str, devices: Sequence[str | None], timeout_s: float, directory: Path, output: list[str]
) -> Step:
    """Run one step in several ranks. Of those that fail, one that died is reported before the others."""
    rendezvous = str(directory / f"{name}-rendezvous")
    with ExitStack() as end:
        processes = [
            end.enter_context(
                closing(StepProcess(_plan(device, rank, len(devices)), [name], directory, rendezvous))
            )
            for rank, device in enumerate(devices)
        ]
        results = collect_steps(processes, name, timeout_s)
        duration_s = max(step.duration_s or 0.0 for step in results.values())
        versions = {key: value for step in results.values() for key, value in step.versions.items()}
        failed = sorted(
            (process for process in results if results[process].state == "failed"),
            key=lambda each: not each.died,
        )
        if not failed:
            first = results[processes[0]]
            return Step(name, first.state, first.detail, duration_s, versions)
        process = failed[0]
        output += process.output()
        detail = f"rank {process.plan.rank} of {len(devices)}: {results[process].detail}"
        return Step(name, "failed", detail, duration_s, versions)


def _plan(device: str | None, rank: int = 0, n: int = 1) -> RankPlan:
    return RankPlan(
        host=LOCALHOST,
        rank=rank,
        local_rank=rank,
        world_size=n,
        local_world_size=n,
        devices=(device or CPU,),
        threads=1,
        cpus=(),
    )


def run_trials(checkup: Checkup, show: Show, timeout_s: float = STEP_TIMEOUT_S) -> Checkup:
    """Run the steps on each visible device that no other process has leased.

    All steps run on the first free device; on the others, those of a single process.

    Args:
        checkup: The checkup so far.
        show: Called with each line of output.
        timeout_s: Limit for each step in seconds.

    Returns:
        The checkup with its trials, and a finding for each failure.
    """
    trials = tuple(_run_each(checkup, show, timeout_s))
    findings = []
    for trial in trials:
        if trial.first_failure is not None:
            findings.append(Finding(trial.summary))
            show(render_finding(findings[-1]))
            for line in trial.output:
                show(f"{INDENT}{line}")
    backends = tuple(_update_backend(backend, trials) for backend in checkup.backends)
    for backend in backends:
        if backend not in checkup.backends:
            show(render_backend(backend))
    return replace(checkup, trials=trials, backends=backends, findings=(*checkup.findings, *findings))


def _update_backend(backend: BackendFacts, trials: Sequence[Trial]) -> BackendFacts:
    """Mark an installed backend as unable to run if its framework failed."""
    failed = {trial.first_failure.name for trial in trials if trial.first_failure is not None}
    if backend.missing is not None or backend.framework != "torch" or steps.TORCH not in failed:
        return backend
    return replace(backend, missing=f"installed, and cannot run: the step {steps.TORCH!r} failed")


def _run_each(checkup: Checkup, show: Show, timeout_s: float) -> Iterator[Trial]:
    devices: Sequence[str | None] = checkup.visible.devices or (None,)
    complete, broken = False, ""
    for device in devices:
        with _lease(checkup, device, () if complete else devices) as (reason, peer):
            if broken or reason is not None:
                trial = skipped_trial(device, broken or reason or "")
                show(render_trial(trial))
            elif complete:
                trial = run_trial(device, timeout_s, ranks=False)
                show(render_trial(trial))
            else:
                complete = True
                trial = _run_full_trial(checkup, device, peer, show, timeout_s)
        failed = trial.first_failure
        if failed is not None and failed.name in steps.HOST_STEPS:
            broken = f"after the failure of {failed.name} on {trial.device_name}"
        yield trial


def _run_full_trial(
    checkup: Checkup, device: str | None, peer: str | None, show: Show, timeout_s: float
) -> Trial:
    def show_step(step: Step) -> None:
        show(render_step(step))

    show(f"steps    on {device or 'the CPU'}, in fresh processes")
    reason = NO_VISIBLE_GPU if checkup.gpus else NO_GPU
    return run_trial(device, timeout_s, peer=peer, reason=reason, on_step=show_step)


@contextmanager
def _lease(
    checkup: Checkup, device: str | None, others: Sequence[str | None]
) -> Iterator[tuple[str | None, str | None]]:
    """Lease a device, and a second GPU with it if both are free.

    Yields the reason why the device is not available, or None, and the second GPU, or None.
    """
    peer = next((other for other in others if other not in (None, device)), None)
    if checkup.leases.directory is None:
        # Without a lock directory nothing can be leased on this host, which is a separate finding.
        yield None, peer
        return
    reason = None
    for second in dict.fromkeys((peer, None)):
        locks = _list_locks(checkup, [device] if second is None else [device, second])
        try:
            held = acquire(LockRequest(always=locks), LEASE_TIMEOUT_S, HOLDER)
        except DeviceError as error:
            reason = str(error).removeprefix("gpus: ").removesuffix(f"; {ADVICE}")
            continue
        try:
            yield None, second
        finally:
            held.release()
        return
    yield reason, None


def _list_locks(checkup: Checkup, devices: Sequence[str | None]) -> tuple[DeviceLock, ...]:
    """Return the locks that a test on these devices would take."""
    if None in devices:
        return (DeviceLock(CPU),)
    boards = {part.uuid: gpu.uuid for gpu in checkup.gpus for part in gpu.instances}
    exclusive = [DeviceLock(device) for device in devices if device is not None]
    divided = [
        DeviceLock(boards[lock.device], shared=True)
        for lock in exclusive
        if lock.device.startswith(MIG_PREFIX)
    ]
    return (*exclusive, *divided, DeviceLock(CPU, shared=True))
