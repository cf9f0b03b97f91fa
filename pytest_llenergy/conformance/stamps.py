# SPDX-License-Identifier: Apache-2.0
"""Checks of when tokens are said to have appeared. Each returns what is wrong, or ``None``."""

from __future__ import annotations

from itertools import pairwise

from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.conformance.engine import Made
from pytest_llenergy.model.timeline import RequestTimeline

#: Engines round their stamps (nanoseconds).
ROUNDING_NS = 1000


def stamped(made: Made, row: Capabilities) -> str | None:
    """The stamps of a batch of which each sequence has several tokens, as the row claims them."""
    start_ns, end_ns = made.timeline.start_ns, made.timeline.end_ns
    for number, request in enumerate(made.requests):
        wrong = _claimed(request, row) or _ordered(request, start_ns, end_ns)
        if wrong is None and row.exact and request.first_token_ns == request.last_token_ns:
            wrong = "its first and last token have one stamp, and the row says exact=True"
        if wrong is not None:
            return f"prompt {number}: {wrong}"
    return None


def _claimed(request: RequestTimeline, row: Capabilities) -> str | None:
    given = request.first_token_ns is not None and request.last_token_ns is not None
    if row.timestamps == "none":
        some = given or request.first_token_ns is not None or bool(request.token_ns)
        return "the row says timestamps='none', and there are some; declare them" if some else None
    if not given:
        return (
            f"the row says timestamps={row.timestamps!r}, and first_token_ns or last_token_ns is None; give "
            "both, or say 'none'"
        )
    if row.timestamps == "token" and len(request.token_ns) != request.output_tokens:
        return (
            f"the row says timestamps='token', and token_ns has {len(request.token_ns)} stamps of "
            f"{request.output_tokens} tokens"
        )
    return None


def _ordered(request: RequestTimeline, start_ns: int, end_ns: int) -> str | None:
    """Within the window and in order. Stamps are ``time.monotonic_ns()``."""
    stamps = [start_ns, request.start_ns, request.first_token_ns, *request.token_ns, request.last_token_ns]
    known = [stamp for stamp in stamps if stamp is not None]
    if any(later < earlier - ROUNDING_NS for earlier, later in pairwise(known)):
        return (
            "its stamps are not in order, or lie before the work began: start of the work, start_ns, "
            "first_token_ns, token_ns, last_token_ns; they are time.monotonic_ns()"
        )
    if known[-1] > end_ns + ROUNDING_NS:
        return f"its last stamp is {(known[-1] - end_ns) / 1e6:g} ms after the end of the work"
    return None
