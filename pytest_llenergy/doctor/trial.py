# SPDX-License-Identifier: Apache-2.0
"""Run the steps on each device; the first that fails names the fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.mig import MIG_PREFIX
from pytest_llenergy.devices.queue import ADVICE
from pytest_llenergy.doctor import steps
from pytest_llenergy.doctor.checkup import BackendFacts, Checkup, Finding
from pytest_llenergy.doctor.step_process import StepProcess, collect_steps
from pytest_llenergy.doctor.steps import Step, Trial
from pytest_llenergy.doctor.text import INDENT, render_backend, render_finding, render_step, render_trial
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.workers.plan import LOCALHOST, RankPlan

# The stepwise check: the first step that fails names the fault, and nothing later is blamed for it.

#: How long one step may take (seconds). Importing torch from a cold network disk takes the longest.
STEP_TIMEOUT_S = 120.0

NO_GPU = "no GPU"
NO_NCCL = "NCCL does not run on MIG instances"

#: The steps of one process, in the order in which each needs those before it.
SINGLE_PROCESS_STEPS = (
    steps.PROCESS,
    steps.NVML,
    steps.DRIVER,
    steps.TORCH,
    steps.COUNT,
    steps.ALLOCATION,
    steps.MATMUL,
)


def run_trial(
    device: str | None,
    timeout_s: float = STEP_TIMEOUT_S,
    *,
    peer: str | None = None,
    ranks: bool = True,
    reason: str = NO_GPU,
    tell: Callable[[Step], None] = lambda step: None,
) -> Trial:
    """Take all steps in fresh processes, each for up to ``timeout_s`` seconds, until one fails.

    ``device`` is a full UUID, or ``None`` for the CPU, where ``reason`` is why the steps of GPUs are skipped.
    ``peer`` is a second GPU for NCCL, without which its group is of one rank. Without ``ranks`` the steps
    of several processes are left out. ``tell`` is called with each step as soon as it is done. The devices
    must be the caller's to use. Raises ``WorkerError`` without a place for temporary files.
    """
    names = list_steps(device, ranks)
    skips = dict.fromkeys(steps.GPU_STEPS, reason) if device is None else {}
    if device is not None and device.startswith(MIG_PREFIX):
        skips[steps.NCCL] = NO_NCCL
    done: list[Step] = []
    output: list[str] = []
    stop = ""
    with ExitStack() as end:
        try:
            directory = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="llenergy-doctor-")))
        except OSError as error:
            raise WorkerError(
                f"doctor: no directory can be made for its files ({error}); set TMPDIR"
            ) from None
        own = [name for name in names if name not in skips and name not in steps.RANK_STEPS]
        alone = end.enter_context(closing(_run_single_process(device, own, timeout_s, directory, output)))
        for name in names:
            try:
                if name in skips or stop:
                    step = Step(name, "skipped", skips.get(name, stop))
                elif name in steps.RANK_STEPS:
                    # A board may be set to take one process at a time.
                    alone.close()
                    devices = _devices_of_ranks(name, device, peer)
                    step = _run_ranks(name, devices, timeout_s, directory, output)
                else:
                    step = next(alone)
            except OSError as error:
                step = Step(name, "failed", f"no process can be started: {error}")
            done.append(step)
            tell(step)
            if step.state == "failed":
                stop = f"after the failure of {step.name}"
            elif step.name == steps.TORCH and step.state == "skipped":
                stop = step.detail
    return Trial(device, tuple(done), tuple(output))


def skipped_trial(device: str | None, reason: str) -> Trial:
    """A trial of which no step is taken."""
    return Trial(device, tuple(Step(name, "skipped", reason) for name in list_steps(device, ranks=True)))


def list_steps(device: str | None, ranks: bool) -> tuple[str, ...]:
    """The names of the steps, in their order."""
    convolution = steps.CONVOLUTION if device is None else steps.CUDNN
    return (*SINGLE_PROCESS_STEPS, convolution, *(steps.RANK_STEPS if ranks else ()))


def _devices_of_ranks(name: str, device: str | None, peer: str | None) -> tuple[str | None, ...]:
    if name == steps.GLOO:
        return device, device
    # NCCL refuses two ranks on one GPU.
    return (device,) if peer is None else (device, peer)


def _run_single_process(
    device: str | None, names: Sequence[str], timeout_s: float, directory: Path, output: list[str]
) -> Generator[Step, None, None]:
    with closing(StepProcess(_plan(device), names, directory)) as child:
        for name in names:
            (step,) = collect_steps([child], name, timeout_s).values()
            if step.state == "failed":
                output += child.output()
            yield step


def _run_ranks(
    name: str, devices: Sequence[str | None], timeout_s: float, directory: Path, output: list[str]
) -> Step:
    """One step of several ranks: the first that failed, and before others one that died."""
    rendezvous = str(directory / f"{name}-rendezvous")
    with ExitStack() as end:
        children = [
            end.enter_context(
                closing(StepProcess(_plan(device, rank, len(devices)), [name], directory, rendezvous))
            )
            for rank, device in enumerate(devices)
        ]
        said = collect_steps(children, name, timeout_s)
        duration_s = max(step.duration_s or 0.0 for step in said.values())
        versions = {key: value for step in said.values() for key, value in step.versions.items()}
        failed = sorted(
            (child for child in said if said[child].state == "failed"), key=lambda each: not each.died
        )
        if not failed:
            first = said[children[0]]
            return Step(name, first.state, first.detail, duration_s, versions)
        child = failed[0]
        output += child.output()
        detail = f"rank {child.plan.rank} of {len(devices)}: {said[child].detail}"
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


# The stepwise check for the command: each device that may be used, unless somebody measures on it.

NO_VISIBLE_GPU = "no GPU is allowed"
#: Warm ranks that wait for work are given up in less (seconds).
LEASE_WAIT_S = 1.0
HOLDER = "llenergy doctor"

Say = Callable[[str], None]


def run_trials(checkup: Checkup, say: Say, timeout_s: float = STEP_TIMEOUT_S) -> Checkup:
    """The checkup with its trials, and a finding for each that failed. ``say`` is called with each line.

    All steps are taken on the first device that is free, on the others those of a single process. Each step
    has ``timeout_s`` seconds.
    """
    trials = tuple(_run_each(checkup, say, timeout_s))
    findings = []
    for made in trials:
        if made.first_failure is not None:
            findings.append(Finding(made.sentence))
            say(render_finding(findings[-1]))
            for line in made.output:
                say(f"{INDENT}{line}")
    able = tuple(_update_backend(engine, trials) for engine in checkup.engines)
    for engine in able:
        if engine not in checkup.engines:
            say(render_backend(engine))
    return replace(checkup, trials=trials, engines=able, findings=(*checkup.findings, *findings))


def _update_backend(engine: BackendFacts, trials: Sequence[Trial]) -> BackendFacts:
    """What the steps say of a backend that is installed: without its framework it runs nowhere."""
    failed = {made.first_failure.name for made in trials if made.first_failure is not None}
    if engine.missing is not None or engine.framework != "torch" or steps.TORCH not in failed:
        return engine
    return replace(engine, missing=f"installed, and cannot run: the step {steps.TORCH!r} failed")


def _run_each(checkup: Checkup, say: Say, timeout_s: float) -> Iterator[Trial]:
    devices: Sequence[str | None] = checkup.allotment.devices or (None,)
    complete, broken = False, ""
    for device in devices:
        with _lease(checkup, device, () if complete else devices) as (reason, peer):
            if broken or reason is not None:
                made = skipped_trial(device, broken or reason or "")
                say(render_trial(made))
            elif complete:
                made = run_trial(device, timeout_s, ranks=False)
                say(render_trial(made))
            else:
                complete = True
                made = _run_full_trial(checkup, device, peer, say, timeout_s)
        failed = made.first_failure
        if failed is not None and failed.name in steps.HOST_STEPS:
            broken = f"after the failure of {failed.name} on {made.where}"
        yield made


def _run_full_trial(
    checkup: Checkup, device: str | None, peer: str | None, say: Say, timeout_s: float
) -> Trial:
    def tell(step: Step) -> None:
        say(render_step(step))

    say(f"steps    on {device or 'the CPU'}, in fresh processes")
    reason = NO_VISIBLE_GPU if checkup.gpus else NO_GPU
    return run_trial(device, timeout_s, peer=peer, reason=reason, tell=tell)


@contextmanager
def _lease(
    checkup: Checkup, device: str | None, others: Sequence[str | None]
) -> Iterator[tuple[str | None, str | None]]:
    """Lease a device, and the first other GPU with it where both are free.

    Yields why the device cannot be had, if it cannot, and the other GPU, if there is one.
    """
    peer = next((other for other in others if other not in (None, device)), None)
    if checkup.leases.directory is None:
        # Nobody can lease anything on this host, which is a finding of its own.
        yield None, peer
        return
    reason = None
    for second in dict.fromkeys((peer, None)):
        claims = _list_locks(checkup, [device] if second is None else [device, second])
        try:
            held = acquire(LockRequest(always=claims), LEASE_WAIT_S, HOLDER)
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
    """As a test on these devices would have them."""
    if None in devices:
        return (DeviceLock(CPU),)
    boards = {part.uuid: gpu.uuid for gpu in checkup.gpus for part in gpu.instances}
    own = [DeviceLock(device) for device in devices if device is not None]
    divided = [
        DeviceLock(boards[claim.device], shared=True) for claim in own if claim.device.startswith(MIG_PREFIX)
    ]
    return (*own, *divided, DeviceLock(CPU, shared=True))
