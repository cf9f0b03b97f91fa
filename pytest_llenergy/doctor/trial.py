# SPDX-License-Identifier: Apache-2.0
"""Run the steps on each device; the first that fails names the fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from pytest_llenergy.devices.lease import CPU, Claim, Request
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.mig import PREFIX
from pytest_llenergy.devices.queue import MEND
from pytest_llenergy.doctor import steps
from pytest_llenergy.doctor.checkup import Checkup, EngineFacts, Finding
from pytest_llenergy.doctor.step_process import Child, answers
from pytest_llenergy.doctor.steps import Step, Trial
from pytest_llenergy.doctor.text import INDENT, engine_line, finding_line, step_line, trial_line
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.workers.plan import LOCALHOST, RankPlan

# The stepwise check: the first step that fails names the fault, and nothing later is blamed for it.

#: How long one step may take (seconds). Importing torch from a cold network disk takes the longest.
STEP_TIMEOUT_S = 120.0

NO_GPU = "no GPU"
NO_NCCL = "NCCL does not run on MIG instances"

#: The steps of one process, in the order in which each needs those before it.
ALONE = (
    steps.PROCESS,
    steps.NVML,
    steps.DRIVER,
    steps.TORCH,
    steps.COUNT,
    steps.ALLOCATION,
    steps.MATMUL,
)


def trial(
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
    names = steps_on(device, ranks)
    skips = dict.fromkeys(steps.OF_GPUS, reason) if device is None else {}
    if device is not None and device.startswith(PREFIX):
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
        own = [name for name in names if name not in skips and name not in steps.OF_RANKS]
        alone = end.enter_context(closing(_alone(device, own, timeout_s, directory, output)))
        for name in names:
            try:
                if name in skips or stop:
                    step = Step(name, "skipped", skips.get(name, stop))
                elif name in steps.OF_RANKS:
                    # A board may be set to take one process at a time.
                    alone.close()
                    devices = _devices_of_ranks(name, device, peer)
                    step = _together(name, devices, timeout_s, directory, output)
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


def untried(device: str | None, reason: str) -> Trial:
    """A trial of which no step is taken."""
    return Trial(device, tuple(Step(name, "skipped", reason) for name in steps_on(device, ranks=True)))


def steps_on(device: str | None, ranks: bool) -> tuple[str, ...]:
    """The names of the steps, in their order."""
    convolution = steps.CONVOLUTION if device is None else steps.CUDNN
    return (*ALONE, convolution, *(steps.OF_RANKS if ranks else ()))


def _devices_of_ranks(name: str, device: str | None, peer: str | None) -> tuple[str | None, ...]:
    if name == steps.GLOO:
        return device, device
    # NCCL refuses two ranks on one GPU.
    return (device,) if peer is None else (device, peer)


def _alone(
    device: str | None, names: Sequence[str], timeout_s: float, directory: Path, output: list[str]
) -> Generator[Step, None, None]:
    with closing(Child(_plan(device), names, directory)) as child:
        for name in names:
            (step,) = answers([child], name, timeout_s).values()
            if step.state == "failed":
                output += child.output()
            yield step


def _together(
    name: str, devices: Sequence[str | None], timeout_s: float, directory: Path, output: list[str]
) -> Step:
    """One step of several ranks: the first that failed, and before others one that died."""
    rendezvous = str(directory / f"{name}-rendezvous")
    with ExitStack() as end:
        children = [
            end.enter_context(
                closing(Child(_plan(device, rank, len(devices)), [name], directory, rendezvous))
            )
            for rank, device in enumerate(devices)
        ]
        said = answers(children, name, timeout_s)
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

NOT_ALLOWED = "no GPU is allowed"
#: Warm ranks that wait for work are given up in less (seconds).
LEASE_WAIT_S = 1.0
HOLDER = "llenergy doctor"

Say = Callable[[str], None]


def toured(checkup: Checkup, say: Say, timeout_s: float = STEP_TIMEOUT_S) -> Checkup:
    """The checkup with its trials, and a finding for each that failed. ``say`` is called with each line.

    All steps are taken on the first device that is free, on the others those of a single process. Each step
    has ``timeout_s`` seconds.
    """
    trials = tuple(_trials(checkup, say, timeout_s))
    findings = []
    for made in trials:
        if made.first_failure is not None:
            findings.append(Finding(made.sentence))
            say(finding_line(findings[-1]))
            for line in made.output:
                say(f"{INDENT}{line}")
    able = tuple(_engine(engine, trials) for engine in checkup.engines)
    for engine in able:
        if engine not in checkup.engines:
            say(engine_line(engine))
    return replace(checkup, trials=trials, engines=able, findings=(*checkup.findings, *findings))


def _engine(engine: EngineFacts, trials: Sequence[Trial]) -> EngineFacts:
    """What the steps say of a backend that is installed: without its framework it runs nowhere."""
    failed = {made.first_failure.name for made in trials if made.first_failure is not None}
    if engine.missing is not None or engine.framework != "torch" or steps.TORCH not in failed:
        return engine
    return replace(engine, missing=f"installed, and cannot run: the step {steps.TORCH!r} failed")


def _trials(checkup: Checkup, say: Say, timeout_s: float) -> Iterator[Trial]:
    devices: Sequence[str | None] = checkup.allotment.devices or (None,)
    complete, broken = False, ""
    for device in devices:
        with _ours(checkup, device, () if complete else devices) as (reason, peer):
            if broken or reason is not None:
                made = untried(device, broken or reason or "")
                say(trial_line(made))
            elif complete:
                made = trial(device, timeout_s, ranks=False)
                say(trial_line(made))
            else:
                complete = True
                made = _complete(checkup, device, peer, say, timeout_s)
        failed = made.first_failure
        if failed is not None and failed.name in steps.OF_HOST:
            broken = f"after the failure of {failed.name} on {made.where}"
        yield made


def _complete(checkup: Checkup, device: str | None, peer: str | None, say: Say, timeout_s: float) -> Trial:
    def tell(step: Step) -> None:
        say(step_line(step))

    say(f"steps    on {device or 'the CPU'}, in fresh processes")
    reason = NOT_ALLOWED if checkup.gpus else NO_GPU
    return trial(device, timeout_s, peer=peer, reason=reason, tell=tell)


@contextmanager
def _ours(
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
        claims = _claims(checkup, [device] if second is None else [device, second])
        try:
            held = acquire(Request(always=claims), LEASE_WAIT_S, HOLDER)
        except DeviceError as error:
            reason = str(error).removeprefix("gpus: ").removesuffix(f"; {MEND}")
            continue
        try:
            yield None, second
        finally:
            held.release()
        return
    yield reason, None


def _claims(checkup: Checkup, devices: Sequence[str | None]) -> tuple[Claim, ...]:
    """As a test on these devices would have them."""
    if None in devices:
        return (Claim(CPU),)
    boards = {part.uuid: gpu.uuid for gpu in checkup.gpus for part in gpu.instances}
    own = [Claim(device) for device in devices if device is not None]
    divided = [Claim(boards[claim.device], shared=True) for claim in own if claim.device.startswith(PREFIX)]
    return (*own, *divided, Claim(CPU, shared=True))
