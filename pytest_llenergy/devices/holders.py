# SPDX-License-Identifier: Apache-2.0
"""Who has the devices, told to people."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from pytest_llenergy.devices.claims import Claim, Request, conflict
from pytest_llenergy.devices.tickets import Seen, pid_namespace
from pytest_llenergy.devices.turns import Scene

#: A test's name in another user's ticket is cut there.
MOST_CHARACTERS = 200

SILENT = "a process that says nothing of itself"

MEND = "wait for it, or raise --energy-lease-timeout"


def waited(request: Request, seconds: float, scene: Scene, refused: Collection[Claim] = ()) -> str:
    """One line: what was wanted, everybody who has some of it, everybody who came earlier, what to do.

    ``refused`` is what others had locked; its holders may have no ticket.
    """
    return f"gpus: waited {seconds:g} s for {_wanted(request)}: {_reason(request, scene, refused)}; {MEND}"


def waits(request: Request, scene: Scene, refused: Collection[Claim] = ()) -> str:
    """The same while it waits, for who looks on."""
    return f"waiting for {_wanted(request)}: {_reason(request, scene, refused)}"


def _wanted(request: Request) -> str:
    wanted = ", ".join(request.devices)
    return f"{request.n} of {wanted}" if 0 < request.n < len(request.choices) else wanted


def _reason(request: Request, scene: Scene, refused: Collection[Claim]) -> str:
    claims = {claim for choice in (request.always, *request.choices) for claim in choice}
    told = []
    for seen in scene.holding:
        held = [claim.device for claim in seen.holds if conflict((claim,), claims)]
        if held:
            told.append(f"{_what(held, request)}held by {who(seen)}")
    named = [claim for seen in scene.holding for claim in seen.holds]
    silent = [claim.device for claim in refused if not conflict((claim,), named)]
    if silent:
        told.append(f"{_what(silent, request)}held by {SILENT}")
    told += [f"queued before: {who(seen)}" for seen in scene.ahead if seen.content.request.wants(claims)]
    return "; ".join(told) or f"held by {SILENT}"


def who(seen: Seen) -> str:
    """Process, user, since when, and the test, of one ticket."""
    content = seen.content
    elsewhere = content.namespace != pid_namespace()
    process = f"process {content.pid}" + (" of another container" if elsewhere else "")
    if seen.is_left:
        process = f"what {process} left running"
    test = _plain(content.test)
    return f"{process} of {_user(seen.uid)} since {_clock(content.since_s)}" + (f" ({test})" if test else "")


def overreach(held: Collection[Claim], request: Request) -> str:
    """Why a process that has devices may not wait for others."""
    has = ", ".join(dict.fromkeys(claim.device for claim in held))
    return (
        f"gpus: this process already holds {has} and asks for {', '.join(request.devices)}; ask for all "
        "devices at once: who waits with devices in hand can be waited for"
    )


def _what(devices: Collection[str], request: Request) -> str:
    # A single device that was asked for need not be named twice.
    return "" if list(devices) == list(request.devices) else f"{', '.join(sorted(set(devices)))} "


def _plain(text: str) -> str:
    """What another user wrote, harmless to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:MOST_CHARACTERS])


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _clock(wall_s: float) -> str:
    try:
        then = time.localtime(wall_s)
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def told(seen: Sequence[Seen]) -> list[str]:
    """One line a ticket, for people who look at the whole queue.

    Without what is shared, such as the host among tests on GPUs: it reads as if others could not have it.
    """
    lines = []
    for each in seen:
        verb, devices = "held", [claim.device for claim in each.holds if not claim.shared]
        if each.state != "holding":
            verb, devices = "awaited", list(each.content.request.devices)
        if devices:
            lines.append(f"{', '.join(map(_plain, devices))} {verb} by {who(each)}")
    return lines
