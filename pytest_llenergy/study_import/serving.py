# SPDX-License-Identifier: Apache-2.0
"""A study with a server (``serving_mode: server``): its traffic, and how the server is divided over GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_llenergy.model.load_curve import ATTAINMENT, Slo
from pytest_llenergy.study_import.case import Key, Notes

#: Name of the backend that sends the load.
SERVER = "server"

_PREFIX = "server.traffic."

_NUMBERS = (
    *("rate", "burstiness", "window_seconds", "window_requests", "concurrency_cap"),
    *("slo.ttft_ms", "slo.tpot_ms"),
)

#: Keys that become arguments.
TRAFFIC = tuple(f"{_PREFIX}{name}" for name in ("arrival", "seed", "slo.percentile", *_NUMBERS))

#: Length of a window where a file does not give it (seconds).
_WINDOW_S = 240.0

_DEGREES = (
    "a server's load is converted with tensor parallelism only; remove the key, then write every degree as a "
    "number into --energy-server-command, and their product into pytest.mark.gpus(n)"
)
_ON_CPU = "a server with tensor parallelism needs GPUs; convert it without --fallback"


def explain_degrees(kinds: Mapping[str, str], rest: Iterable[Key], fallback: str | None) -> dict[str, str]:
    """Return why a server cannot be divided over devices as a file says, by key; empty if it can be.

    Args:
        kinds: Kinds of parallelism whose degree is above 1, by key.
        rest: Keys without a meaning of their own, which may be further degrees of the engine.
        fallback: ``cpu`` if the load has to run on the CPU too.
    """
    others = [path for path, kind in kinds.items() if kind != "tensor"]
    others += [key.path for key in rest if key.name.endswith("parallel_size") and key.value not in (None, 1)]
    return dict.fromkeys(others, _DEGREES) or dict.fromkeys(kinds if fallback else (), _ON_CPU)


def explain_traffic(experiment: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Return the first invalid key with its value and what it needs; None if all are valid."""
    given = _given(experiment)
    for name in _NUMBERS:
        value = given.get(name)
        if (value is not None or name == "rate") and not _is_above_zero(value):
            return f"{_PREFIX}{name}", value, "needs a number above 0"
    if given.get("arrival") not in (None, "poisson", "gamma"):
        return f"{_PREFIX}arrival", given["arrival"], "needs poisson or gamma"
    return None


def convert_traffic(experiment: Mapping[str, Any], params: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the arguments of ``backend.serve`` that valid traffic stands for.

    Args:
        experiment: Values by path.
        params: Arguments found so far, with the seed of the task.
        notes: Gets what has no counterpart.
    """
    given = _given(experiment)
    rate, requests = given["rate"], given.get("window_requests")
    load: dict[str, Any] = {"request_rate": float(rate)}
    # Its windows have a length, and a load here has a number of requests.
    load["num_requests"] = requests or max(1, round(rate * given.get("window_seconds", _WINDOW_S)))
    if "burstiness" in given:
        if given.get("arrival") == "gamma":
            # There the coefficient of variation of the gaps, here the shape of their distribution.
            load["burstiness"] = round(given["burstiness"] ** -2, 6)
        else:
            notes.add(f"{_PREFIX}burstiness", given["burstiness"], "only arrival: gamma has one")
    if "concurrency_cap" in given:
        load["concurrency"] = given["concurrency_cap"]
    if "seed" in given:
        load["seed"] = given["seed"]
        if params.get("do_sample") and given["seed"] != params["seed"]:
            reason = f"one seed is for arrivals and sampling, that of {_PREFIX}seed"
            notes.add("random_seed", params["seed"], reason)
    limits = {name: given[f"slo.{name}_ms"] / 1000 for name in ("ttft", "tpot") if f"slo.{name}_ms" in given}
    share = given.get("slo.percentile", ATTAINMENT)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        notes.add(f"{_PREFIX}slo.percentile", share, f"needs a share such as 0.99; {ATTAINMENT} is used")
        share = ATTAINMENT
    if limits:
        load["slo"] = Slo(ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"), attainment=float(share))
    return load


def _is_above_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _given(experiment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path.removeprefix(_PREFIX): value
        for path, value in experiment.items()
        if path in TRAFFIC and value is not None
    }
