# SPDX-License-Identifier: Apache-2.0
"""Convert studies of LLenergyMeasure (YAML) into test files.

Three layouts are read: that of its first examples (``model_name``, ``fp_precision``), the flat one of its
later examples (``model``, ``backend``, ``n``), and that of version 0.9 (``task.model``, ``engine``). A key
without a counterpart becomes a note with its value and the reason, never a guess.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.registry import load_backends
from pytest_llenergy.errors import PlanError
from pytest_llenergy.study_case import Case, Key, Notes, convert_keys, explain_refusal

#: Its engines, and what they are here.
ENGINES = {
    "pytorch": "transformers",
    "transformers": "transformers",
    "vllm": "vllm",
    "tensorrt": "tensorrt-llm",
}

#: Keys by their names in all layouts.
KEYS = {
    **dict.fromkeys(("model", "model_name", "task.model"), "model"),
    **dict.fromkeys(("backend", "engine"), "engine"),
    **dict.fromkeys(
        ("n", "num_input_prompts", "task.dataset.n_prompts", "dataset.n_prompts", "dataset.sample_size"),
        "prompts",
    ),
    **dict.fromkeys(("dataset", "dataset.name", "dataset.source", "task.dataset.source"), "dataset"),
    **dict.fromkeys(("max_output_tokens", "task.max_output_tokens", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("random_seed", "task.random_seed"), "seed"),
    **dict.fromkeys(("precision", "fp_precision", "dtype"), "dtype"),
    **dict.fromkeys(("batch_size", "harness.batch_size", "llem_execution.batch_size"), "batch_size"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor"),
    "pipeline_parallel_size": "pipeline",
    "num_processes": "data",
    "sampling_preset": "preset",
}

#: Sections whose keys count as if they stood one level higher.
SAMPLING_SECTIONS = ("sampling.", "sampling_params.", "decoder.")
SECTIONS = ("engine.", "engine_params.", *SAMPLING_SECTIONS)
SAMPLING = ("temperature", "do_sample", "top_p", "top_k", "preset")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PRESETS: dict[str, dict[str, Any]] = {
    "deterministic": {"temperature": 0.0},
    "standard": {"temperature": 1.0, "top_p": 0.95},
    "creative": {"temperature": 0.8, "top_p": 0.9},
    "factual": {"temperature": 0.3},
}
#: What it takes where a file says nothing.
DEFAULTS = {"prompts": 100, "max_new_tokens": 256, "seed": 42, "batch_size": 1, "engine": "transformers"}
COUNTS = ("prompts", "max_new_tokens", "seed", "batch_size")
DEGREES = ("data", "tensor", "pipeline")

#: Keys that describe the file.
TITLES = ("name", "study_name", "config_name", "campaign_name", "schema_version", "version")

#: Most experiments of a sweep, and keys of all of them.
MAX_EXPERIMENTS, MAX_KEYS = 100_000, 10_000_000

#: Most values of a file with its aliases in full, and sections within each other.
MAX_VALUES, MAX_DEPTH = 10_000, 20


@dataclass
class Study:
    """A converted study: ``notes`` name the keys without a counterpart, with their values, by reason."""

    title: str
    cases: list[Case]
    notes: list[str]


def convert_study(content: Any, name: str) -> Study:
    """Convert the content of a file.

    Args:
        content: The parsed YAML.
        name: Name of the file, for messages.

    Raises:
        PlanError: The content is no study, or no case of it can be converted.
    """
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise PlanError(f"{name} is no study of LLenergyMeasure: needs keys such as model and engine")
    if "total_energy_j" in content or "aggregation" in content:
        raise PlanError(
            f"{name} is a result of LLenergyMeasure: one total without rounds or uncertainty, which no "
            "report can hold; import its study, and measure again"
        )
    _check_size(content, name)
    notes, refused = Notes(), Notes()
    experiments: list[dict[str, Any]] = []
    keys = 0
    try:
        for each in itertools.islice(_expand(content), MAX_EXPERIMENTS + 1):
            experiments.append(each)
            keys += len(each)
            if keys > MAX_KEYS:
                break
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(
            f"{name}: sweep needs lists by key, and experiments a list of mappings ({error})"
        ) from None
    if keys > MAX_KEYS:
        raise PlanError(f"{name}: its experiments have more than {MAX_KEYS:,} keys; remove some axes")
    if len(experiments) > MAX_EXPERIMENTS:
        raise PlanError(f"{name}: its sweep has more than {MAX_EXPERIMENTS:,} experiments; remove some axes")
    found: dict[str, Case] = {}
    capabilities = {spec.name: spec.capabilities for spec in load_backends().values()}
    for experiment in experiments:
        case = _convert(experiment, capabilities, notes, refused)
        if case is not None:
            found.setdefault(repr(case), case)
    cases = list(found.values())
    if not cases:
        reason = next(iter(refused.lines()), "it names no model")
        raise PlanError(f"{name} is no study of LLenergyMeasure that can be converted: {reason}")
    if len(cases) < len(experiments):
        notes.add("experiments", len(experiments), f"{len(cases)} distinct, without what has no counterpart")
    title = next((str(content[key]) for key in TITLES[:4] if key in content), PurePath(name).stem)
    return Study(title, cases, [*refused.lines(), *notes.lines()])


def _check_size(content: Any, name: str) -> None:
    """Refuse aliases that contain themselves, or multiply, before anything follows them."""
    found, count = [(content, 0)], 0
    while found:
        value, depth = found.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise PlanError(
                f"{name} has more than {MAX_DEPTH} sections within each other; remove the innermost, or an "
                "alias that contains itself"
            )
        if count > MAX_VALUES:
            raise PlanError(
                f"{name} has more than {MAX_VALUES:,} values with its aliases in full; remove some aliases"
            )
        if isinstance(value, (dict, list)):
            found.extend((each, depth + 1) for each in (value.values() if isinstance(value, dict) else value))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _expand(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each experiment of a study as a flat mapping: of its sweep, then those that are listed."""
    base = dict(_flatten({key: each for key, each in content.items() if key not in ("sweep", "experiments")}))
    sweep, listed = content.get("sweep") or {}, content.get("experiments") or []
    if sweep or not listed:
        for engine in _engines(base, sweep):
            yield from (
                {**base, **engine, **each} for each in _sweep(sweep, next(iter(engine.values()), None))
            )
    for each in listed:
        yield {**base, **dict(_flatten(each))}


def _engines(base: Mapping[str, Any], sweep: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the engine of each sub-sweep, if only the names of axes say which engines there are."""
    named = [key for key in (*base, *sweep) if KEYS.get(key) == "engine"]
    prefixes = dict.fromkeys(path.partition(".")[0] for path in sweep if path.partition(".")[0] in ENGINES)
    return [{"engine": each} for each in prefixes] if prefixes and not named else [{}]


def _sweep(sweep: Mapping[str, Any], engine: str | None) -> Iterator[dict[str, Any]]:
    """Yield the product of all axes, and of all groups, whose variants are alternatives."""
    axes: list[list[dict[str, Any]]] = []
    for path, values in sweep.items():
        prefix = path.partition(".")[0]
        if engine is not None and prefix in ENGINES and prefix != engine:
            continue
        given = values if isinstance(values, list) else [values]
        if any(isinstance(each, dict) for each in given):
            variants = (variant for group in given for variant in _product(dict(_flatten(group or {}))))
            axes.append(list(itertools.islice(variants, MAX_EXPERIMENTS + 1)))
        else:
            axes.append([{path: each} for each in given])
    for chosen in itertools.product(*axes):
        yield {path: value for part in chosen for path, value in part.items()}


def _product(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = [each if isinstance(each, list) else [each] for each in group.values()]
    yield from (dict(zip(group, chosen, strict=True)) for chosen in itertools.product(*values))


def _convert(
    experiment: Mapping[str, Any], capabilities: Mapping[str, Capabilities], notes: Notes, refused: Notes
) -> Case | None:
    """Convert one experiment. Returns None, with the reason in ``refused``, if that is not possible."""
    engine = next(
        (each for path, each in experiment.items() if KEYS.get(path) == "engine"), DEFAULTS["engine"]
    )
    if not isinstance(engine, str) or engine not in ENGINES:
        refused.add("engine", engine, "no backend here")
        return None
    found: dict[str, Any] = {}
    rest: dict[str, Key] = {}
    for path, value in experiment.items():
        owner, _, name = path.partition(".")
        if owner in ENGINES and ENGINES[owner] != ENGINES[engine]:
            continue
        name = inner = name if owner in ENGINES else path
        for section in SECTIONS:
            name = name.removeprefix(section)
        key = KEYS.get(name, name)
        if key in (*KEYS.values(), *SAMPLING):
            found[key] = value if value is not None else found.get(key)
        elif path not in TITLES:
            sampling = inner.startswith(SAMPLING_SECTIONS)
            rest[path] = Key(path, name, value, owner in ENGINES, sampling)
    values = {**DEFAULTS, **{key: each for key, each in found.items() if each is not None}}
    if not isinstance(values.get("model"), str):
        refused.add("model", values.get("model"), "an experiment needs one")
        return None
    for key in (*COUNTS, *DEGREES):
        if type(values.get(key, 1)) is not int or values.get(key, 1) < (key != "seed"):
            refused.add(key, values[key], "needs a whole number")
            return None
    backend = ENGINES[engine]
    # Its other engines get all prompts at once, and batch them by themselves.
    batch = values["batch_size"] * values.get("data", 1) if backend == "transformers" else values["prompts"]
    case = Case(backend, values["model"], batch, params=_params(values, notes))
    if backend == "transformers":
        notes.add(
            "prompts", values["prompts"], "an iteration is one batch; use --energy-rounds=N for more of them"
        )
    if "dtype" in values:
        case.options["dtype"] = DTYPES.get(str(values["dtype"]), values["dtype"])
    case.degrees = {name: values[name] for name in DEGREES if values.get(name, 1) != 1}
    if "dataset" in values:
        notes.add(
            "dataset",
            values["dataset"],
            "the built-in prompts, in turn; use --energy-prompts=FILE for others",
        )
    convert_keys(case, rest.values(), capabilities[backend], notes)
    reason = explain_refusal(case, capabilities[backend])
    if reason is not None:
        refused.add("model", case.model, reason)
        return None
    return case


def _params(values: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": values["max_new_tokens"], "seed": values["seed"]}
    preset = values.get("preset")
    if preset is not None and str(preset) not in PRESETS:
        notes.add("preset", preset, f"is none of {', '.join(PRESETS)}")
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **PRESETS.get(str(preset), {})}
    sampling |= {name: values[name] for name in SAMPLING if name in values and name != "preset"}
    if not sampling["temperature"] or sampling.get("do_sample") is False:
        return params
    if sampling["top_k"] in (0, -1):
        notes.add("top_k", sampling.pop("top_k"), "sampling from all tokens; the default of generate counts")
    return {**params, "do_sample": True, **sampling}


def render_tests(study: Study, origin: str, fallback: str | None = None) -> str:
    """Return the source of a test file.

    Args:
        study: The study.
        origin: Name of the file that it comes from.
        fallback: ``cpu`` for tests that run on the CPU where GPUs are missing.
    """
    backends = list(dict.fromkeys(case.backend for case in study.cases))
    notes = "".join(f"\n#   {_one_line(note)}" for note in study.notes) or " nothing"
    named = zip(study.cases, _names(study.cases), strict=True)
    rows = "\n".join(f"    {_render_case(case, name, fallback)}," for case, name in named)
    return TEMPLATE.format(
        title=_one_line(study.title),
        origin=_one_line(origin),
        backends=",".join(backends),
        notes=notes,
        rows=rows,
        gpus=f'1, fallback="{fallback}"' if fallback else "1",
    )


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
    values = ", ".join(map(repr, (case.backend, case.model, case.batch, case.options, case.params)))
    if not case.degrees:
        return f"pytest.param({values}, id={name!r})"
    devices = 1
    for degree in case.degrees.values():
        devices *= degree
    given = ", ".join(f"{name}={degree}" for name, degree in case.degrees.items())
    gpus = f'{devices}, fallback="{fallback}"' if fallback else str(devices)
    marks = f"[pytest.mark.gpus({gpus}), pytest.mark.parallel({given})]"
    return f"pytest.param({values}, id={name!r}, marks={marks})"


TEMPLATE = """\
# Study {title} of LLenergyMeasure, converted from {origin} by llenergy import.
#
# Run: pytest FILE --energy-backend={backends} --energy-report
#
# Not carried over:{notes}

import itertools

import pytest

CASES = [
{rows}
]


@pytest.fixture
def energy_model(model):
    return model


@pytest.mark.gpus({gpus})
@pytest.mark.parametrize(("engine", "model", "batch_size", "options", "params"), CASES)
def test_study(energy, backend, prompts, engine, model, batch_size, options, params):
    if backend.name != engine:
        pytest.skip(f"a case of {{engine}}")
    batch = list(itertools.islice(itertools.cycle(prompts), batch_size))
    energy(backend.with_options(**options).generate, batch, **params)
"""
