# SPDX-License-Identifier: Apache-2.0
"""Energy of serving requests at three arrival rates.

Runs for every available server: llama.cpp's with the package xllamacpp, and those given by
``--energy-server``.
"""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle, Energy
from pytest_llenergy.plugin.default_prompts import Prompts

pytestmark = [pytest.mark.gpus(1, fallback="cpu"), pytest.mark.backend_needs(task="serve")]

#: Seconds from the first request to the last, and tokens of each answer. A minute or more, and as many tokens
#: as your users read, make a benchmark of a real load.
LOAD_S, NEW_TOKENS = 2.0, 8


@pytest.mark.parametrize("request_rate", [1.0, 2.0, 4.0])
def test_request_rate(energy: Energy, backend: BackendHandle, prompts: Prompts, request_rate: float) -> None:
    """Send requests for the same time with Poisson arrivals (open loop) at increasing rates."""
    requests = 1 + round(LOAD_S * request_rate)
    short = sorted(prompts, key=len)[:4]
    run = energy(
        backend.serve,
        short,
        request_rate=request_rate,
        num_requests=requests,
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
    )
    assert run.result.output_tokens == requests * NEW_TOKENS
