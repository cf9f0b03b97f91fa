# SPDX-License-Identifier: Apache-2.0
"""Who has the devices, told to people."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from pytest_llenergy.devices.claims import Claim, Request, conflict
from pytest_llenergy.devices.tickets import Seen, pid_namespace
from pytest_llenergy.devices.turns import Scene

#: A test's name in another user's ticket is cut there.
MOST_CHARACTERS = 200

MEND = "wait for it, or raise --energy-lease-timeout"


def waited(request: Request, seconds: float, scene: Scene) -> str:
    """One line: what was wanted, everybody who has some of it, everybody who came earlier, what to do."""
    wanted = ", ".join(request.devices)
    if 0 < request.n < len(request.choices):
        wanted = f"{request.n} of {wanted}"
    claims = {claim for choice in (request.always, *request.choices) for claim in choice}
    told = []
    for seen in scene.holding:
        held = [claim.device for claim in seen.content.holds if conflict((claim,), claims)]
        if held:
            # A single device that was asked for need not be named twice.
            what = "" if held == list(request.devices) else f"{', '.join(sorted(held))} "
            told.append(f"{what}held by {who(seen)}")
    told += [f"queued before: {who(seen)}" for seen in scene.ahead if seen.content.request.wants(claims)]
    reason = "; ".join(told) or "held by a process that says nothing of itself"
    return f"gpus: waited {seconds:g} s for {wanted}: {reason}; {MEND}"


def who(seen: Seen) -> str:
    """Process, user, since when, and the test, of one ticket."""
    content = seen.content
    elsewhere = content.namespace != pid_namespace()
    process = f"process {content.pid}" + (" of another container" if elsewhere else "")
    if content.left or (not elsewhere and not _exists(content.pid)):
        process = f"what {process} left running"
    test = "".join(each if each.isprintable() else "?" for each in content.test)[:MOST_CHARACTERS]
    return f"{process} of {_user(seen.uid)} since {_clock(content.since_s)}" + (f" ({test})" if test else "")


def overreach(held: Collection[Claim], request: Request) -> str:
    """Why a process that has devices may not wait for others."""
    has = ", ".join(dict.fromkeys(claim.device for claim in held))
    return (
        f"gpus: this process already holds {has} and asks for {', '.join(request.devices)}; ask for all "
        "devices at once: who waits with devices in hand can be waited for"
    )


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


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
    """One line a ticket, for people who look at the whole queue."""
    lines = []
    for each in seen:
        content = each.content
        own = [claim.device for claim in content.holds if not claim.shared]
        verb, devices = ("held", own) if each.state == "holding" else ("awaited", content.request.devices)
        lines.append(f"{', '.join(devices)} {verb} by {who(each)}")
    return lines
