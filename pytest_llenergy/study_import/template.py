# SPDX-License-Identifier: Apache-2.0
"""The test file of a study: its cases, their names, and the notes on what was not carried over."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from pytest_llenergy.model.load_curve import Slo
from pytest_llenergy.study_import.case import Case
from pytest_llenergy.study_import.study import Study

#: What starts the server of an engine.
COMMANDS = {
    "vllm": "vllm serve {model} --host {host} --port {port}",
    "tensorrt-llm": "trtllm-serve {model} --host {host} --port {port}",
}

#: What is added if a load has several GPUs, whose number differs between loads.
SHARDS = {"vllm": " --tensor-parallel-size {gpus}", "tensorrt-llm": " --tp_size {gpus}"}


def render_tests(study: Study, origin: str, fallback: str | None = None) -> str:
    """Return the source of a test file.

    Args:
        study: The study.
        origin: Name of the file that it comes from.
        fallback: ``cpu`` for tests that run on the CPU where GPUs are missing.
    """
    notes = "".join(f"\n#   {_one_line(note)}" for note in study.notes) or " nothing"
    batches = [case for case in study.cases if not case.engine]
    # Servers are backends of the run: each of them gets every load.
    loads = list({repr(replace(case, engine="")): case for case in study.cases if case.engine}.values())
    gpus = f'1, fallback="{fallback}"' if fallback else "1"
    parts = [
        HEADER.format(
            title=_one_line(study.title),
            origin=_one_line(origin),
            backends=_backend_options(study.cases),
            notes=notes,
            slo="from pytest_llenergy import slo\n" * any("slo" in case.params for case in loads),
        )
    ]
    for cases, template in ((batches, BATCHES), (loads, LOADS)):
        named = zip(cases, _names(cases), strict=True)
        rows = "\n".join(f"    {_render_case(case, name, fallback)}," for case, name in named)
        parts += [template.format(rows=rows, gpus=gpus)] * bool(cases)
    return "\n\n".join(parts)


def _backend_options(cases: Sequence[Case]) -> str:
    """Return the options that choose the backends, and start the servers."""
    engines = list(dict.fromkeys(case.engine for case in cases if case.engine))
    names = {engine: f"{engine}-server=" if len(engines) > 1 else "" for engine in engines}
    backends = dict.fromkeys(names.get(case.engine, "").rstrip("=") or case.backend for case in cases)
    # The server of each engine gets every load.
    sharded = any(case.engine and case.degrees for case in cases)
    commands = [
        f" --energy-server-command='{name}{COMMANDS[engine]}{SHARDS[engine] * sharded}'"
        for engine, name in names.items()
    ]
    return "".join([f"--energy-backend={','.join(backends)}", *commands])


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text


def _names(cases: list[Case]) -> list[str]:
    """Return a name for each case: its backend and model, batch size, options and parameters that differ."""
    rows = [
        {
            "backend": case.backend,
            "model": PurePath(case.model).name,
            "batch_size": case.batch,
            **case.options,
            **case.params,
            **case.degrees,
        }
        for case in cases
    ]
    keys = [key for key in dict.fromkeys(itertools.chain(*rows)) if len({repr(r.get(key)) for r in rows}) > 1]
    names: dict[str, None] = {}
    for row in rows:
        parts = [
            str(row[key]) if key in ("backend", "model") else f"{key}={row[key]}"
            for key in keys or ["model"]
            if row.get(key) is not None
        ]
        name = "-".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "_", part)[:40] for part in parts)
        name = name or "defaults"
        names[name if name not in names else f"{name}-{len(names)}"] = None
    return list(names)


def _render_case(case: Case, name: str, fallback: str | None) -> str:
    own = (case.model, case.batch) if case.engine else (case.backend, case.model, case.batch, case.options)
    values = ", ".join([*map(repr, own), _literal(case.params)])
    if not case.degrees:
        return f"pytest.param({values}, id={name!r})"
    devices = 1
    for degree in case.degrees.values():
        devices *= degree
    given = ", ".join(f"{name}={degree}" for name, degree in case.degrees.items())
    gpus = f'{devices}, fallback="{fallback}"' if fallback else str(devices)
    # A server divides its work itself, and refuses the mark parallel.
    parallel = "" if case.engine else f", pytest.mark.parallel({given})"
    return f"pytest.param({values}, id={name!r}, marks=[pytest.mark.gpus({gpus}){parallel}])"


def _literal(params: Mapping[str, Any]) -> str:
    """Return the source of a dictionary whose values are plain or limits of latencies."""
    values = {name: repr(value) for name, value in params.items()}
    if isinstance(limits := params.get("slo"), Slo):
        given = {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "attainment": limits.attainment}
        known = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        values["slo"] = f"slo({known})"
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in values.items())}}}"


HEADER = """\
# Study {title} of LLenergyMeasure, converted from {origin} by llenergy import.
#
# Run: pytest FILE {backends} --energy-report
#
# Not carried over:{notes}

import itertools

import pytest
{slo}

@pytest.fixture
def energy_model(model):
    return model
"""

BATCHES = """\
CASES = [
{rows}
]


@pytest.mark.gpus({gpus})
@pytest.mark.parametrize(("engine", "model", "batch_size", "options", "params"), CASES)
def test_study(energy, backend, prompts, engine, model, batch_size, options, params):
    if backend.name != engine:
        pytest.skip(f"a case of {{engine}}")
    batch = list(itertools.islice(itertools.cycle(prompts), batch_size))
    energy(backend.with_options(**options).generate, batch, **params)
"""

LOADS = """\
LOADS = [
{rows}
]


@pytest.mark.gpus({gpus})
@pytest.mark.parametrize(("model", "n_prompts", "params"), LOADS)
def test_load(energy, backend, prompts, model, n_prompts, params):
    if "serve" not in backend.tasks:
        pytest.skip("a load of a server")
    energy(backend.serve, list(itertools.islice(itertools.cycle(prompts), n_prompts)), **params)
"""
