# SPDX-License-Identifier: Apache-2.0
"""Read studies of LLenergyMeasure: their layouts, sweeps and listed experiments.

Three layouts are read: that of its first examples (``model_name``, ``fp_precision``), the flat one of its
later examples (``model``, ``backend``, ``n``), and the current one (``task.model``, ``engine``), which
began with version 0.9; the project has renumbered its versions since, and the last one seen is 0.7.0 of
August 2026. A key without a counterpart becomes a note with its value and the reason, never a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.registry import load_backends
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.secrets import redact_text
from pytest_llenergy.study_import.case import (
    SERVER_OPTION,
    Case,
    Key,
    Notes,
    convert_keys,
    explain_refusal,
    show,
)
from pytest_llenergy.study_import.serving import (
    SERVER,
    TRAFFIC,
    convert_traffic,
    explain_degrees,
    explain_traffic,
)

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
    **dict.fromkeys(
        ("batch_size", "batching.batch_size", "harness.batch_size", "llem_execution.batch_size"), "batch_size"
    ),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "pipeline"),
    "num_processes": "data",
    **dict.fromkeys(("parallelism.strategy", "sharding.strategy"), "strategy"),
    **dict.fromkeys(("parallelism.degree", "sharding.num_shards"), "degree"),
    "sampling_preset": "preset",
    "serving_mode": "serving_mode",
}

#: Sections whose keys count as if they stood one level higher.
SAMPLING_SECTIONS = ("sampling.", "sampling_params.", "decoder.")
SECTIONS = ("engine.", "engine_params.", *SAMPLING_SECTIONS)
SAMPLING = ("temperature", "do_sample", "top_p", "top_k", "preset")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PRESETS: dict[str, dict[str, Any]] = {
    "deterministic": {"temperature": 0.0},
    "standard": {"temperature": 1.0, "top_p": 0.95},
    "creative": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "factual": {"temperature": 0.3},
}
#: What it takes where a file says nothing.
DEFAULTS = {
    **{"prompts": 100, "max_new_tokens": 256, "seed": 42, "batch_size": 1},
    **{"engine": "transformers", "serving_mode": "offline"},
}
COUNTS = ("prompts", "max_new_tokens", "seed", "batch_size")
DEGREES = ("data", "tensor", "pipeline")
STRATEGIES = {f"{name}_parallel": name for name in DEGREES}

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


def convert_study(content: Any, name: str, fallback: str | None = None) -> Study:
    """Convert the content of a file.

    Args:
        content: The parsed YAML.
        name: Name of the file, for messages.
        fallback: ``cpu`` for tests that run on the CPU where GPUs are missing.

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
    _check_lists(content, name)
    notes, refused = Notes(), Notes()
    experiments: list[dict[str, Any]] = []
    keys = 0
    for each in itertools.islice(_expand(content), MAX_EXPERIMENTS + 1):
        experiments.append(each)
        keys += len(each)
        if keys > MAX_KEYS:
            break
    if keys > MAX_KEYS:
        raise PlanError(f"{name}: its experiments have more than {MAX_KEYS:,} keys; remove some axes")
    if len(experiments) > MAX_EXPERIMENTS:
        raise PlanError(f"{name}: its sweep has more than {MAX_EXPERIMENTS:,} experiments; remove some axes")
    found: dict[str, Case] = {}
    capabilities = {spec.name: spec.capabilities for spec in load_backends().values()}
    for experiment in experiments:
        case = _convert(experiment, capabilities, notes, refused, fallback)
        if case is not None:
            found.setdefault(repr(case), case)
    cases = list(found.values())
    if not cases:
        reason = next(iter(refused.lines()), "its sweep has no experiment")
        raise PlanError(f"{name} is no study of LLenergyMeasure that can be converted: {reason}")
    if len(cases) < len(experiments):
        notes.add("experiments", len(experiments), f"{len(cases)} distinct, without what has no counterpart")
    engines = sorted({case.engine for case in cases if case.engine})
    if len(engines) > 1:
        notes.add("engine", engines, "the server of each gets every load")
    title = next((str(content[key]) for key in TITLES[:4] if key in content), PurePath(name).stem)
    return Study(redact_text(title), cases, [*refused.lines(), *notes.lines()])


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


def _check_lists(content: Mapping[str, Any], name: str) -> None:
    """Refuse a campaign, and a sweep or a list of experiments of another form."""
    configs = content.get("configs")
    if isinstance(configs, list):
        raise PlanError(f"{name} is a campaign of LLenergyMeasure; convert its configs: {show(configs)}")
    sweep, listed = content.get("sweep") or {}, content.get("experiments") or []
    if not isinstance(sweep, dict) or not all(isinstance(path, str) for path in sweep):
        raise PlanError(f"{name}: sweep is {show(sweep)}, needs lists by key")
    if not isinstance(listed, list):
        raise PlanError(f"{name}: experiments is {show(listed)}, needs a list of mappings")
    groups = {path: values for path, values in sweep.items() if isinstance(values, list)}
    for path, values in [("experiments", listed), *groups.items()]:
        wrong = [each for each in values if not isinstance(each, dict | None)]
        if wrong and (values is listed or any(isinstance(each, dict) for each in values)):
            raise PlanError(f"{name}: {path} has {show(wrong[0])}, needs mappings alone")
        if not values and values is not listed:
            raise PlanError(
                f"{name}: the axis {path} of its sweep is empty, which leaves no experiment; give it values, "
                "or remove it"
            )


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
        yield {**base, **dict(_flatten(each or {}))}


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
    experiment: Mapping[str, Any],
    capabilities: Mapping[str, Capabilities],
    notes: Notes,
    refused: Notes,
    fallback: str | None,
) -> Case | None:
    """Convert one experiment. Returns None, with the reason in ``refused``, if that is not possible."""
    engine = next(
        (each for path, each in experiment.items() if KEYS.get(path) == "engine"), DEFAULTS["engine"]
    )
    if not isinstance(engine, str) or engine not in ENGINES:
        refused.add("engine", engine, "no backend here")
        return None
    found: dict[str, Any] = {}
    paths: dict[str, str] = {}
    rest: dict[str, Key] = {}
    own = {path: each for path, each in experiment.items() if _is_for(path, engine)}
    is_server = own.get("serving_mode") == "server"
    for path, value in _with_preset(own, notes).items():
        name, inner = _split_sections(path)
        key = KEYS.get(name, name)
        if key in (*KEYS.values(), *SAMPLING):
            found[key] = value if value is not None else found.get(key)
            paths[key] = path
        elif path not in TITLES and not (is_server and path in TRAFFIC):
            rest[path] = Key(path, name, value, inner != path, inner.startswith(SAMPLING_SECTIONS))
    values = {**DEFAULTS, **{key: each for key, each in found.items() if each is not None}}
    degree = STRATEGIES.get(str(values.get("strategy")))
    if degree is not None:
        values[degree] = values.get("degree", 1)
    elif values.get("strategy") not in (None, "none"):
        notes.add("strategy", values["strategy"], f"is none of {', '.join(STRATEGIES)}")
    wrong = _explain_values(values)
    if wrong is not None:
        needs = _NEEDS.get(wrong, "needs a whole number of 1 or more")
        refused.add(paths.get(wrong, wrong), values.get(wrong), needs)
        return None
    if is_server:
        case = _load(values, engine, experiment, notes, refused)
        if case is None:
            return None
    else:
        case = _batch(values, ENGINES[engine], notes)
    case.degrees = {name: values[name] for name in DEGREES if values.get(name, 1) != 1}
    if is_server:
        kinds = {paths.get(name, paths.get("degree", name)): name for name in case.degrees}
        divided = explain_degrees(kinds, rest.values(), fallback)
        for path, why in divided.items():
            refused.add(path, own[path], why)
        if divided:
            return None
    if "dataset" in values:
        notes.add(
            "dataset",
            values["dataset"],
            "the built-in prompts, in turn; use --energy-prompts=FILE for others",
        )
    convert_keys(case, rest.values(), capabilities[case.backend], notes)
    reason = explain_refusal(case, capabilities[case.backend])
    if reason is not None:
        refused.add("model", case.model, reason)
        return None
    return case


def _is_for(path: str, engine: str) -> bool:
    """Return whether a path is not in the section of another engine."""
    owner = path.partition(".")[0]
    return owner not in ENGINES or ENGINES[owner] == ENGINES[engine]


def _split_sections(path: str) -> tuple[str, str]:
    """Return a path without its engine and sections, and without its engine alone."""
    owner, _, rest = path.partition(".")
    inner = name = rest if owner in ENGINES else path
    for section in SECTIONS:
        name = name.removeprefix(section)
    return name, inner


def _with_preset(experiment: Mapping[str, Any], notes: Notes) -> Mapping[str, Any]:
    """Add the values of a preset that the experiment does not give itself."""
    names = {path: _split_sections(path)[0] for path, value in experiment.items() if value is not None}
    presets = [experiment[path] for path, name in names.items() if KEYS.get(name, name) == "preset"]
    preset = presets[0] if presets else None
    if preset is not None and str(preset) not in PRESETS:
        notes.add("preset", preset, f"is none of {', '.join(PRESETS)}")
    given = PRESETS.get(str(preset), {})
    missing = {f"sampling.{key}": each for key, each in given.items() if key not in names.values()}
    return {**missing, **experiment}


#: What a value needs, other than a whole number of 1 or more.
_NEEDS = {
    "model": "an experiment needs one",
    "seed": "needs a whole number of 0 or more",
    "serving_mode": "needs offline or server",
}


def _explain_values(values: Mapping[str, Any]) -> str | None:
    """Return the key of the first value with which nothing can be measured."""
    model = values.get("model")
    if not isinstance(model, str) or not model.strip():
        return "model"
    for key in (*COUNTS, *DEGREES):
        if type(values.get(key, 1)) is not int or values.get(key, 1) < (key != "seed"):
            return key
    return None if values["serving_mode"] in ("offline", "server") else "serving_mode"


def _batch(values: Mapping[str, Any], backend: str, notes: Notes) -> Case:
    """Return an offline experiment: a batch of prompts."""
    # Its other engines get all prompts at once, and batch them by themselves.
    batch = values["batch_size"] * values.get("data", 1) if backend == "transformers" else values["prompts"]
    case = Case(backend, values["model"], batch, params=_params(values, notes))
    if backend == "transformers":
        notes.add(
            "prompts", values["prompts"], "an iteration is one batch; use --energy-rounds=N for more of them"
        )
    if "dtype" in values:
        case.options["dtype"] = DTYPES.get(str(values["dtype"]), values["dtype"])
    return case


def _load(
    values: Mapping[str, Any], engine: str, experiment: Mapping[str, Any], notes: Notes, refused: Notes
) -> Case | None:
    """Return an experiment with a server: a load. None, with the reason, if it has no valid traffic."""
    if ENGINES[engine] == "transformers":
        refused.add("engine", engine, "its server mode has vllm and tensorrt")
        return None
    wrong = explain_traffic(experiment)
    if wrong is not None:
        refused.add(*wrong)
        return None
    case = Case(SERVER, values["model"], values["prompts"], params=_params(values, notes))
    case.engine = ENGINES[engine]
    case.params |= convert_traffic(experiment, case.params, notes)
    if "dtype" in values:
        notes.add("dtype", values["dtype"], SERVER_OPTION)
    return case


def _params(values: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": values["max_new_tokens"], "seed": values["seed"]}
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    sampling |= {name: values[name] for name in SAMPLING if name in values and name != "preset"}
    if not sampling["temperature"] or sampling.get("do_sample") is False:
        return params
    if sampling["top_k"] in (0, -1):
        notes.add("top_k", sampling.pop("top_k"), "sampling from all tokens; the default of generate counts")
    return {**params, "do_sample": True, **sampling}
