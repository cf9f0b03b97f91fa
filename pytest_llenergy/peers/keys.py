# SPDX-License-Identifier: Apache-2.0
"""What the keys of an LLenergyMeasure experiment are here, and why the others are nothing.

Defaults, presets and what engines make of them are those of its version 0.7.0 (``config/models.py``,
``config/ssot.py``, ``engines/*/plugin.py`` in https://github.com/henrycgbaker/llenergymeasure).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.generation import GenerationParams
from pytest_llenergy.errors import BackendError, ExperimentError
from pytest_llenergy.peers.study import ENGINES, flat

#: What it takes where a file says nothing.
PROMPTS, NEW_TOKENS, INPUT_TOKENS, SEED, DATASET = 100, 256, 256, 42, "aienergyscore"

PRESETS: dict[str, dict[str, Any]] = {
    "deterministic": {"temperature": 0.0},
    "standard": {"temperature": 1.0, "top_p": 0.95},
    "creative": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "factual": {"temperature": 0.3},
}

#: Where an engine's keys stood from version to version; without any of them last.
LOADING = ("engine_params.", "engine.", "")
SAMPLING = ("sampling_params.", "sampling.")
BATCH = ("transformers.llem_execution.batch_size", "harness.batch_size", "transformers.batch_size")

#: Our backends by the names of its engines, where they differ.
NAMES = {"tensorrt": ("tensorrt", "tensorrt-llm", "tensorrt_llm", "trtllm")}

#: Degrees that are marks here.
DEGREES = {"tensor_parallel_size": "tensor", "pipeline_parallel_size": "pipeline", "tp_size": "tensor"}

#: Why a key is nothing here, by the beginning of its path, the closest first.
REASONS = {
    "task.dataset.order": "prompts come in the order of their file",
    "task.max_input_tokens": "prompts are taken whole; give shorter ones",
    "measurement.energy_sampler": "--energy-meter chooses for a whole run",
    "measurement.baseline": "idle power is measured in the quiet gaps of every round",
    "measurement.latency_profiling": "times to the first token and between tokens are in every record",
    "measurement.measurement_": "rounds are measured whole, after a warm-up",
    "measurement.steady_state": "rounds are measured whole, after a warm-up",
    "measurement.warmup_discard": "rounds are measured whole, after a warm-up",
    "measurement.warmup": "warm-up ends when time and power have settled, or after --energy-warmup=N",
    "offline.warmup": "warm-up ends when time and power have settled, or after --energy-warmup=N",
    "study_execution.n_cycles": "a test has --energy-rounds rounds in one process; run it again for more",
    "study_execution.experiment_order": "tests run in the order of the file",
    "study_execution.shuffle_seed": "tests run in the order of the file",
    "study_execution.experiment_gap": "--energy-gap is around every round; there is no rest to cool down",
    "study_execution.cycle_gap": "--energy-gap is around every round; there is no rest to cool down",
    "study_execution.gpu_indices": "--energy-gpus chooses for a whole run",
    "study_execution.experiment_timeout": "--energy-timeout is the longest wait for a rank",
    "study_execution.deduplicate": "every case is measured",
    "vllm.sampling_params.max_tokens": "task.max_output_tokens counts, as it does there",
    "tensorrt.sampling_params.max_tokens": "task.max_output_tokens counts, as it does there",
    "runners": "tests run where pytest runs, in no container",
    "images": "tests run where pytest runs, in no container",
    "output": "--energy-report=FILE.json says where the report goes",
}


#: What says what is so here anyway.
SAME = {"task.dataset.order": "interleaved", "measurement.energy_sampler": "auto"}


@dataclass
class Case:
    """One experiment as a test: an engine, what it loads and how, a batch of prompts, what it does with it.

    ``lost`` has the keys that are nothing here, with their values, as dotted paths.
    """

    engine: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    degrees: dict[str, int] = field(default_factory=dict)
    dataset: str = DATASET
    batch: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, Any] = field(default_factory=dict)


@dataclass
class Notes:
    """What is not carried over, by path: why, and the values that cases have for it."""

    told: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def add(self, path: str, value: Any, why: str) -> None:
        """Note a key once, with each of its values."""
        values = self.told.setdefault(path, (why, []))[1]
        if str(value) not in values:
            values.append(str(value))

    @property
    def lines(self) -> list[str]:
        """One a key."""
        return [f"{path} = {' | '.join(values)}: {why}" for path, (why, values) in self.told.items()]


def case_of(experiment: Mapping[str, Any], backends: Mapping[str, BackendSpec], notes: Notes) -> Case:
    """An experiment as a test. Raises ``ExperimentError`` for values that are none of its kind."""
    values = dict(flat(experiment))
    take = _Taker(values)
    mode = take("serving_mode", "offline", _one_of("offline", "server"))
    if mode == "server":
        raise ExperimentError("serving_mode is 'server'; only offline experiments are made into tests")
    engine = take("engine", ENGINES[0], _one_of(*ENGINES))
    case = Case(engine=_backend(engine, backends, notes), model=take("task.model", None, _text))
    spec = backends.get(case.engine)
    _read_task(case, take, notes)
    _read_batch(case, engine, take, notes)
    _read_sampling(case, engine, take, notes)
    _read_engine(case, engine, spec, take, notes)
    try:
        GenerationParams.of(case.params)
    except BackendError as error:
        raise ExperimentError(str(error)) from None
    for path, value in take.left().items():
        if value is not None and SAME.get(path) != value:
            _lose(case, notes, path, value)
    return case


def settings_lost(settings: Mapping[str, Any], notes: Notes) -> None:
    """What a study says of itself: all of it is of the run here, not of tests."""
    for path, value in flat({key: settings[key] for key in settings if key not in OF_THE_FILE}):
        if value is not None:
            notes.add(path, value, _reason(path))


#: What a study says that is in the written file, or is about itself.
OF_THE_FILE = ("study_name", "name", "version", "base")


class _Taker:
    """Hands out values, and knows which nobody has asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def __call__(self, path: str, default: Any, check: Callable[[Any], str | None]) -> Any:
        value = self._values.get(path, default)
        self._taken.add(path)
        wrong = check(value)
        if wrong:
            raise ExperimentError(f"{path} is {value!r}, needs {wrong}")
        return value

    def has(self, path: str) -> bool:
        return path in self._values

    def section(self, prefixes: tuple[str, ...]) -> dict[str, str]:
        """Keys right under any of these prefixes, by their last name, with their path."""
        return {
            path.removeprefix(prefix): path
            for prefix in reversed(prefixes)
            for path in self._values
            if path.startswith(prefix) and "." not in path.removeprefix(prefix)
        }

    def left(self) -> dict[str, Any]:
        return {path: value for path, value in self._values.items() if path not in self._taken}


def _read_task(case: Case, take: _Taker, notes: Notes) -> None:
    if "/" not in case.model and not case.model.startswith(("random:", ".", "~")):
        notes.add("task.model", case.model, "a hub id needs its owner here, such as openai-community/gpt2")
    new = take("task.max_output_tokens", NEW_TOKENS, _whole(1, or_none=True))
    if new is None:
        default = GenerationParams().max_new_tokens
        why = f"a number is needed here; it is the default, {default}"
        _lose(case, notes, "task.max_output_tokens", None, why)
    else:
        case.params["max_new_tokens"] = new
    seed = take("task.random_seed", SEED, _whole())
    if seed < 0:
        _lose(case, notes, "task.random_seed", seed, "a seed is 0 or more here; it is the default, 0")
    else:
        case.params["seed"] = seed
    case.dataset = take("task.dataset.source", DATASET, _text)
    if not case.dataset.endswith(".jsonl"):
        notes.add(
            "task.dataset.source", case.dataset, "is not here; --energy-prompts names a file of prompts"
        )
    cut = take("task.max_input_tokens", INPUT_TOKENS, _whole(1, or_none=True))
    if cut is not None:
        _lose(case, notes, "task.max_input_tokens", cut)


def _read_batch(case: Case, engine: str, take: _Taker, notes: Notes) -> None:
    prompts = take("task.dataset.n_prompts", PROMPTS, _whole(1))
    if engine != "transformers":
        # They are given all prompts at once.
        case.batch = prompts
        return
    path = next((each for each in BATCH if take.has(each)), BATCH[0])
    case.batch = min(prompts, take(path, None, _whole(1, or_none=True)) or 1)
    if case.batch < prompts:
        why = "an iteration is one batch, over and over, not all prompts in turn"
        _lose(case, notes, "task.dataset.n_prompts", prompts, why)


def _read_sampling(case: Case, engine: str, take: _Taker, notes: Notes) -> None:
    preset = take("sampling_preset", None, _one_of(*PRESETS, None))
    given = dict(PRESETS.get(preset, {}))
    paths = take.section(tuple(f"{engine}.{part}" for part in SAMPLING))
    given |= {name: take(path, None, _anything) for name, path in paths.items()}
    given = {name: value for name, value in given.items() if value is not None}
    path_of = {name: paths.get(name, f"sampling_preset.{name}") for name in given}
    for name, check in (
        ("temperature", _number),
        ("top_p", _number),
        ("top_k", _whole()),
        ("do_sample", _switch),
    ):
        wrong = check(given[name]) if name in given else None
        if wrong:
            raise ExperimentError(f"{path_of[name]} is {given[name]!r}, needs {wrong}")
    temperature = given.pop("temperature", 1.0 if engine == "vllm" else None)
    sampled = given.pop("do_sample", None if engine == "transformers" else temperature is not None)
    known: dict[str, Any] = {name: given.pop(name) for name in ("top_p", "top_k") if name in given}
    if sampled and temperature != 0:
        case.params["do_sample"] = True
        case.params |= {"temperature": temperature} if temperature is not None else {}
        if known.get("top_k", 1) < 1:
            known.pop("top_k")
        case.params |= known
        if engine != "transformers" and "top_k" not in known:
            default = GenerationParams().top_k
            notes.add(f"{engine}.sampling_params.top_k", "off", f"it is the default here, {default}")
    elif sampled is None and temperature != 0:
        why = "the model's own defaults decide there whether to sample; here it does not, do_sample=True does"
        notes.add(f"{engine}.sampling_params.do_sample", "not set", why)
        asked: dict[str, Any] = {"temperature": temperature, **known}
        for name, value in asked.items():
            if value is not None:
                _lose(case, notes, path_of[name], value, "nothing without do_sample=True")
    for name, value in given.items():
        if name in GenerationParams.__struct_fields__:
            case.params[name] = value
        else:
            _lose(case, notes, path_of[name], value)


def _lose(case: Case, notes: Notes, path: str, value: Any, why: str | None = None) -> None:
    """A key that is nothing here."""
    case.lost[path] = value
    notes.add(path, value, why or _reason(path))


def _read_engine(case: Case, engine: str, spec: BackendSpec | None, take: _Taker, notes: Notes) -> None:
    """Its load options, as far as our backend has options of that name; degrees; the kind of cache."""
    caches = spec.capabilities.caches if spec is not None else ()
    options = spec.capabilities.options if spec is not None else ("dtype",)
    for name, path in take.section(tuple(f"{engine}.{part}" for part in LOADING)).items():
        value = take(path, None, _anything)
        if value is None or path in BATCH:
            continue
        if name in DEGREES:
            degree = take(path, None, _whole(1))
            case.degrees |= {DEGREES[name]: degree} if degree > 1 else {}
        elif name in options:
            case.options[name] = value
        elif name == "cache_implementation" and value in caches:
            case.params["cache"] = value
        elif not (name == "use_cache" and value is True):
            _lose(case, notes, path, value)


def _backend(engine: str, backends: Mapping[str, BackendSpec], notes: Notes) -> str:
    """What it is called here."""
    names = NAMES.get(engine, (engine,))
    found = next((name for name in names if name in backends), None)
    if found is None:
        notes.add("engine", engine, "no backend of that name here; its tests are skipped")
    return found or engine


def _reason(path: str) -> str:
    fits = [start for start in REASONS if path.startswith(start)]
    return REASONS[max(fits, key=len)] if fits else "there is nothing like it here"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "a name"


def _number(value: Any) -> str | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return None if good else "a number, 0 or more"


def _switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _anything(_value: Any) -> str | None:
    return None


def _whole(least: int | None = None, *, or_none: bool = False) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value is None and or_none:
            return None
        good = isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
        return None if good else "a whole number" + (f", {least} or more" if least is not None else "")

    return check


def _one_of(*words: Any) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        known = isinstance(value, str | None) and value in words
        return None if known else f"one of {', '.join(str(word) for word in words if word is not None)}"

    return check


def warmup_of(experiment: Mapping[str, Any]) -> int | None:
    """How many warm-up iterations were asked for in so many words; ``None`` where that is not so."""
    for section in ("offline", "measurement"):
        told = experiment.get(section)
        warmup = told.get("warmup") if isinstance(told, Mapping) else None
        if not isinstance(warmup, Mapping) or warmup.get("convergence_detection"):
            continue
        if warmup.get("enabled") is False:
            return 0
        number = warmup.get("n_prompts", warmup.get("n_warmup"))
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            return number
    return None
