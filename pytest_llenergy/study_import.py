# SPDX-License-Identifier: Apache-2.0
"""Convert studies of LLenergyMeasure (YAML) into test files.

Three layouts are read: that of its first examples (``model_name``, ``fp_precision``), the flat one of its
later examples (``model``, ``backend``, ``n``), and that of version 0.9 (``task.model``, ``engine``). A key
without a counterpart becomes a note with its value and the reason, never a guess.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.registry import load_backends
from pytest_llenergy.backends.tasks import EXTRA_PARAMS
from pytest_llenergy.errors import PlanError

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
    **dict.fromkeys(("max_output_tokens", "task.max_output_tokens"), "max_new_tokens"),
    **dict.fromkeys(("random_seed", "task.random_seed"), "seed"),
    **dict.fromkeys(("precision", "fp_precision", "dtype"), "dtype"),
    **dict.fromkeys(("batch_size", "harness.batch_size", "llem_execution.batch_size"), "batch_size"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor"),
    "pipeline_parallel_size": "pipeline",
    "num_processes": "data",
    "sampling_preset": "preset",
}

#: Sections whose keys count as if they stood one level higher.
SECTIONS = ("engine.", "engine_params.", "sampling.", "sampling_params.", "decoder.")
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

#: Options of its generation that no backend here takes, although libraries have options without a list.
GENERATION = ("cache_implementation", "early_stopping", "length_penalty", "no_repeat_ngram_size")

#: Values that change nothing, so that a key without a counterpart needs no note: switched off, or neutral.
NEUTRAL: dict[str, object] = {
    **{"use_cache": True, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"num_beams": 1, "n": 1, "device_map": "auto", "low_cpu_mem_usage": True},
}

#: Why a key has no counterpart, by the beginning of its path.
REASONS = {
    "dataset_order": (ORDER := "prompts come in the order of their file"),
    "task.dataset.order": ORDER,
    "max_input_tokens": (UNCUT := "prompts are not cut; give shorter ones"),
    "task.max_input_tokens": UNCUT,
    "warmup": (WARMUP := "warm-up ends when time and power have settled, or after --energy-warmup=N"),
    "measurement.warmup": WARMUP,
    "baseline": (BASELINE := "idle power is measured in the quiet gaps around each round"),
    "measurement.baseline": BASELINE,
    "energy": (METER := "--energy-meter chooses for a run"),
    "measurement.energy_sampler": METER,
    "measurement": "rounds are measured whole",
    "timeseries": "the record has the power over one round",
    "runners": (HERE := "tests run where pytest runs; --energy-python names other environments"),
    "images": HERE,
    "gpus": "--energy-gpus chooses for a run",
    "execution.n_cycles": (CYCLES := "--energy-rounds=N, or llenergy ab for new processes"),
    "study_execution.n_cycles": CYCLES,
    **{
        f"{section}.{key}": reason
        for section in ("execution", "study_execution")
        for key, reason in {
            **dict.fromkeys(("experiment_order", "cycle_order", "shuffle_seed"), "tests run in file order"),
            **dict.fromkeys(
                ("experiment_gap_seconds", "cycle_gap_seconds"), "quiet gaps around each round (--energy-gap)"
            ),
            **dict.fromkeys(
                ("experiment_timeout_seconds", "max_consecutive_failures"),
                "pytest's own options: --energy-timeout, --maxfail",
            ),
        }.items()
    },
    "output": "--energy-report=FILE.json",
    "output_dir": "--energy-report=FILE.json",
    "lora": "no backend takes it from a study",
    "tensorrt.build_cache": "TensorRT-LLM's PyTorch backend builds no engine",
}

#: Keys that describe the file.
TITLES = ("name", "study_name", "config_name", "campaign_name", "schema_version", "version")

#: Most experiments of a sweep.
MAX_EXPERIMENTS = 100_000


@dataclass
class Case:
    """One experiment as a test: what a backend loads, and what it does with a batch of prompts."""

    backend: str
    model: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    degrees: dict[str, int] = field(default_factory=dict)


@dataclass
class Study:
    """A converted study: ``notes`` name the keys without a counterpart, with their values, by reason."""

    title: str
    cases: list[Case]
    notes: list[str]


class _Notes:
    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[str]]] = {}

    def add(self, path: str, value: object, reason: str) -> None:
        values = self._values.setdefault(reason, {}).setdefault(path, [])
        if json.dumps(value, default=str) not in values:
            values.append(json.dumps(value, default=str))

    def lines(self) -> list[str]:
        """Return one line per reason, since many keys have the same."""
        return [
            ", ".join(f"{path} = {' | '.join(each)}" for path, each in values.items()) + f": {reason}"
            for reason, values in self._values.items()
        ]


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
    notes = _Notes()
    try:
        experiments = list(itertools.islice(_expand(content), MAX_EXPERIMENTS + 1))
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(
            f"{name}: sweep needs lists by key, and experiments a list of mappings ({error})"
        ) from None
    if len(experiments) > MAX_EXPERIMENTS:
        raise PlanError(f"{name}: its sweep has more than {MAX_EXPERIMENTS:,} experiments; remove some axes")
    found: dict[str, Case] = {}
    capabilities = {spec.name: spec.capabilities for spec in load_backends().values()}
    for experiment in experiments:
        case = _convert(experiment, capabilities, notes)
        if case is not None:
            found.setdefault(repr(case), case)
    cases = list(found.values())
    if not cases:
        reason = next(iter(notes.lines()), "it names no model")
        raise PlanError(f"{name} is no study of LLenergyMeasure that can be converted: {reason}")
    if len(cases) < len(experiments):
        notes.add("experiments", len(experiments), f"{len(cases)} distinct, without what has no counterpart")
    title = next((str(content[key]) for key in TITLES[:4] if key in content), PurePath(name).stem)
    return Study(title, cases, notes.lines())


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
            axes.append([variant for group in given for variant in _product(dict(_flatten(group or {})))])
        else:
            axes.append([{path: each} for each in given])
    for chosen in itertools.product(*axes):
        yield {path: value for part in chosen for path, value in part.items()}


def _product(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = [each if isinstance(each, list) else [each] for each in group.values()]
    yield from (dict(zip(group, chosen, strict=True)) for chosen in itertools.product(*values))


def _convert(
    experiment: Mapping[str, Any], capabilities: Mapping[str, Capabilities], notes: _Notes
) -> Case | None:
    """Convert one experiment. Returns None, with a note, for an engine that has no backend here."""
    engine = next(
        (each for path, each in experiment.items() if KEYS.get(path) == "engine"), DEFAULTS["engine"]
    )
    if not isinstance(engine, str) or engine not in ENGINES:
        notes.add("engine", engine, "no backend here")
        return None
    found: dict[str, Any] = {}
    rest: dict[str, tuple[str, Any]] = {}
    for path, value in experiment.items():
        owner, _, name = path.partition(".")
        if owner in ENGINES and ENGINES[owner] != ENGINES[engine]:
            continue
        name = name if owner in ENGINES else path
        for section in SECTIONS:
            name = name.removeprefix(section)
        key = KEYS.get(name, name)
        if key in (*KEYS.values(), *SAMPLING):
            found[key] = value if value is not None else found.get(key)
        elif path not in TITLES:
            rest[path] = (name, value)
    values = {**DEFAULTS, **{key: each for key, each in found.items() if each is not None}}
    if not isinstance(values.get("model"), str):
        notes.add("model", values.get("model"), "an experiment needs one")
        return None
    for key in (*COUNTS, *DEGREES):
        if type(values.get(key, 1)) is not int or values.get(key, 1) < (key != "seed"):
            notes.add(key, values[key], "needs a whole number")
            return None
    backend = ENGINES[engine]
    # Its other engines get all prompts at once, and batch them by themselves.
    batch = values["batch_size"] * values.get("data", 1) if backend == "transformers" else values["prompts"]
    case = Case(backend, values["model"], batch, params=_params(values, notes))
    if backend == "transformers":
        notes.add("prompts", values["prompts"], "an iteration is one batch; --energy-rounds for more of them")
    if "dtype" in values:
        case.options["dtype"] = DTYPES.get(str(values["dtype"]), values["dtype"])
    case.degrees = {name: values[name] for name in DEGREES if values.get(name, 1) != 1}
    if "dataset" in values:
        notes.add(
            "dataset", values["dataset"], "the built-in prompts, in turn; --energy-prompts=FILE for others"
        )
    for path, (name, value) in rest.items():
        _convert_option(case, path, name, value, capabilities[backend], notes)
    return case


def _params(values: Mapping[str, Any], notes: _Notes) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": values["max_new_tokens"], "seed": values["seed"]}
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        notes.add("preset", preset, f"is none of {', '.join(PRESETS)}")
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **PRESETS.get(str(preset), {})}
    sampling |= {name: values[name] for name in SAMPLING if name in values and name != "preset"}
    if not sampling["temperature"] or sampling.get("do_sample") is False:
        return params
    if not sampling["top_k"] or sampling["top_k"] < 0:
        notes.add("top_k", sampling.pop("top_k"), "sampling from all tokens; the default of generate counts")
    return {**params, **sampling, "do_sample": True}


def _convert_option(case: Case, path: str, name: str, value: Any, row: Capabilities, notes: _Notes) -> None:
    """Make a load option or a parameter of a key, or a note."""
    if value is None or value is False or value == {} or NEUTRAL.get(name, notes) == value:
        return
    if name == "cache_implementation" and value in ("static", "dynamic"):
        case.params["cache"] = value
        return
    if name in row.sampling and name in EXTRA_PARAMS:
        case.params[name] = value
        return
    if name in GENERATION:
        notes.add(path, value, f"{case.backend} has no such option")
        return
    if name == "torch_compile":
        name, value = "compile", "default" if value is True else value
    reason = next((REASONS[each] for each in _prefixes(path) if each in REASONS), None)
    in_engine = path.partition(".")[0] in ENGINES
    if reason is None and in_engine and (name in row.options or (row.passes and "." not in name)):
        case.options[name] = value
        return
    notes.add(
        path, value, reason or (f"{case.backend} has no such option" if in_engine else "no counterpart")
    )


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


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
