# SPDX-License-Identifier: Apache-2.0
"""The stepwise check for the command: each device that may be used, unless somebody measures on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pytest_llenergy.devices.claims import CPU, Claim, Request
from pytest_llenergy.devices.holders import MEND
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.mig import PREFIX
from pytest_llenergy.doctor import steps
from pytest_llenergy.doctor.checkup import Checkup, Finding
from pytest_llenergy.doctor.engines import EngineFacts
from pytest_llenergy.doctor.steps import Step, Trial
from pytest_llenergy.doctor.text import INDENT, engine_line, finding_line, step_line, trial_line
from pytest_llenergy.doctor.trial import NO_GPU, STEP_TIMEOUT_S, trial, untried
from pytest_llenergy.errors import DeviceError

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
