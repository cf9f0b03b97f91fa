# SPDX-License-Identifier: Apache-2.0
"""The plugin's side, as a user would write it. Its file name keeps it out of ``pytest benchmarks``.

``peers_run.py`` gives the load as JSON in the environment.
"""

from __future__ import annotations

import json
import os

from pytest_llenergy.api import BackendHandle, Energy


def test_same_load(energy: Energy, backend: BackendHandle) -> None:
    """Send the prompts once, in a closed loop or at a constant rate."""
    load = json.loads(os.environ["SERVING_PEERS_LOAD"])
    prompts, rate = load["prompts"], load["rate"]
    arrivals = (
        {"arrivals": "trace", "trace": [number / rate for number in range(len(prompts))]}
        if rate
        else {"concurrency": load["concurrency"], "num_requests": len(prompts)}
    )
    run = energy(backend.serve, prompts, **arrivals, max_new_tokens=load["new_tokens"], ignore_eos=True)
    assert run.result.output_tokens == len(prompts) * load["new_tokens"]
