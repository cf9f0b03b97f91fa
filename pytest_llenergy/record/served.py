# SPDX-License-Identifier: Apache-2.0
"""The requests of a served load in one round: latencies, token counts, failures."""

from __future__ import annotations

from pytest_llenergy.record.base import Count, Number, StoredStruct
from pytest_llenergy.record.defaults import Sharing

#: Flags of loads without a steady state.
SATURATED, SHORT_LOAD = "saturated", "short-load"

#: Flags of loads of a search that ended early: because they miss the SLO, or because more requests
#: failed than may.
ENDED_EARLY, REFUSED = CUT_SHORT = "ended-early", "refused"

#: Flag of loads of which requests failed, but not too many.
FAILED = "failed-request"


class TokenGaps(StoredStruct, frozen=True):
    """Times between consecutive tokens of all requests of a round, as a histogram.

    Tokens of one chunk have no gap between them.

    Attributes:
        gap_s: Each gap that occurred, ascending, to three significant digits and at best a microsecond. A
            round of thousands of tokens then has a few hundred, with an error of 0.5 % at most.
        count: How often each occurred.
    """

    gap_s: list[Number]
    count: list[Count]


class ServedRequests(StoredStruct, frozen=True):
    """The requests of a served load in the order of sending, one list per field.

    Attributes:
        sent_s: Seconds from the start of the round.
        time_to_first_token_s: Latency from sending a request to its first token.
        end_to_end_latency_s: Latency from sending a request to its last token.
        time_per_output_token_s: Time from the first token to the last, over the number of tokens after the
            first; None for a request with one token.
        token_gaps: None if the number of tokens in a chunk is unknown.
        input_tokens: Tokens of the prompt, as the server counts them.
        waited_s: Time for which a limit on requests in flight held a request back before it was sent.
        cached_tokens: Tokens of the prompt found in the server's prefix cache; empty if it does not report
            them.
        failures: Why requests failed, one message each. These requests are in no other list.
        good: Whether the request met every limit of the load's SLO; None without an SLO.
    """

    sent_s: list[Number]
    time_to_first_token_s: list[Number]
    end_to_end_latency_s: list[Number]
    output_tokens: list[Count]
    time_per_output_token_s: list[Number | None] = []
    token_gaps: TokenGaps | None = None
    input_tokens: list[Count] = []
    waited_s: list[Number] = []
    cached_tokens: list[Count] = []
    failures: list[str] = []
    good: list[bool] | None = None


class RequestEnergies(StoredStruct, frozen=True):
    """Energy that is attributed to each request of a round: no meter tells one request from another.

    The power of each moment is shared among the requests that are active, from sending to the last token, and
    that of moments without a request among all of them. So they add up to the energy of the round.

    Attributes:
        shared: Whether shares are equal, or by the tokens of the prompt and the output.
        p50_u_j: Standard uncertainty of the request at this percentile, for comparing on the same devices.
        energy_j: Energy of each request in the order of sending; empty unless ``--energy-requests`` is given.
        energy_u_j: Its standard uncertainty.
        reason: Why there are none.
    """

    shared: Sharing = "equal"
    p50_j: Number | None = None
    p50_u_j: Number | None = None
    p90_j: Number | None = None
    p90_u_j: Number | None = None
    p99_j: Number | None = None
    p99_u_j: Number | None = None
    energy_j: list[Number] = []
    energy_u_j: list[Number] = []
    reason: str | None = None
