# SPDX-License-Identifier: Apache-2.0
"""Reading YAML files of LLenergyMeasure: one experiment, or a study with a sweep, as single experiments.

The rules are those of its ``config/grid.py``, ``sweep_expansion.py`` and ``sweep_idioms.py``, version 0.7.0
(https://github.com/henrycgbaker/llenergymeasure). Its rules of which values an engine refuses are not known
here: experiments that it would leave out for that are among those returned.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import ExperimentError

#: As experiments name them, and their sections.
ENGINES = ("transformers", "vllm", "tensorrt")

#: Keys of a study that are none of its experiments.
OF_THE_STUDY = (
    *("sweep", "experiments", "study_execution", "base", "study_name", "version"),
    *("runners", "images", "output", "name"),
)

#: What the key ``version`` may say. It may be left out.
VERSIONS = ("2", "2.0")

#: Keys of version 1, which had no ``task``.
OF_VERSION_1 = ("model", "model_name", "fp_precision", "decoder", "num_input_prompts")

#: Digits that a number made of a range is rounded to.
DIGITS = 10

Values = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A file: what it says of the study, and its experiments; ``swept`` are dotted paths that differ."""

    file: Path
    name: str | None
    settings: Values
    experiments: list[Values]
    swept: frozenset[str]


def read_study(file: Path) -> Study:
    """Read a file. Raises ``ExperimentError``, one line, for what is none or cannot be read."""
    raw = _load(file)
    version = str(raw.get("version", VERSIONS[0]))
    if version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise ExperimentError(f"{file.name}: version {version!r} is not known; this reads version {known}")
    old = [key for key in OF_VERSION_1 if key in raw]
    if old:
        raise ExperimentError(
            f"{file.name}: {old[0]!r} at the top level is of version 1; put it where version 2 has it, such "
            "as task.model"
        )
    try:
        experiments, swept = _expanded(raw, file)
    except ExperimentError as error:
        raise ExperimentError(f"{file.name}: {error}") from None
    except RecursionError:
        raise ExperimentError(f"{file.name}: a key holds itself; no experiment can be made of it") from None
    if not experiments:
        raise ExperimentError(f"{file.name}: no experiment in it; give it task.model, a sweep or experiments")
    settings = {key: raw[key] for key in OF_THE_STUDY if key in raw and key not in ("sweep", "experiments")}
    name = raw.get("study_name") or raw.get("name")
    return Study(file, str(name) if name else None, settings, experiments, swept)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its dotted path; lists are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _load(file: Path) -> Values:
    try:
        import yaml
    except ImportError:
        raise ExperimentError(
            "reading YAML needs the module yaml; pip install 'pytest-llenergy[import]'"
        ) from None
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ExperimentError(f"{file.name}: cannot be read ({why})") from None
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise ExperimentError(f"{file.name}: no YAML ({what})") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ExperimentError(f"{file.name}: needs keys such as task and engine, has {_kind(raw)}")
    return raw


def _expanded(raw: Values, file: Path) -> tuple[list[Values], frozenset[str]]:
    """First those of the sweep, then those of the list."""
    shared = {**_base(raw, file), **{key: raw[key] for key in raw if key not in OF_THE_STUDY}}
    sweep, listed = raw.get("sweep") or {}, raw.get("experiments") or []
    if not isinstance(sweep, dict):
        raise ExperimentError(f"sweep is {_kind(sweep)}, needs keys with lists")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ExperimentError("experiments needs a list of experiments, each with keys")
    found: list[Values] = []
    if sweep:
        found += _of_sweep(sweep, shared)
    elif not listed and "task" in shared:
        found.append(_of_engine(shared, _engine(shared)))
    for each in listed:
        merged = _merged(shared, each)
        own = (_engine(merged), *each)
        found.append({key: value for key, value in merged.items() if key not in ENGINES or key in own})
    paths = [dict(flat(each)) for each in found]
    names = {name for each in paths for name in each}
    swept = {name for name in names if any(each.get(name) != paths[0].get(name) for each in paths)}
    return found, frozenset(swept)


def _base(raw: Values, file: Path) -> Values:
    """The experiment that a study starts from."""
    if not raw.get("base"):
        return {}
    return {
        key: value for key, value in _load(file.parent / str(raw["base"])).items() if key not in OF_THE_STUDY
    }


def _of_sweep(sweep: Values, shared: Values) -> list[Values]:
    """Every combination of axes and groups, for each engine that the study or one of its keys names."""
    axes = {key: _axis(key, value) for key, value in sweep.items() if not _is_group(key, value)}
    groups = {key: _group(key, value) for key, value in sweep.items() if key not in axes}
    scoped = {scope for scope in map(_scope, sweep) if scope is not None}
    asked = shared.get("engine", ENGINES[0])
    if isinstance(asked, list):
        engines = asked
    else:
        engines = sorted(scoped | ({asked} if "engine" in shared or not scoped else set()))
    found: list[Values] = []
    for engine in engines:
        base = {**_of_engine(shared, engine), "engine": engine}
        ours = {key: value for key, value in axes.items() if _scope(key) in (None, engine)}
        variants = [value for key, value in groups.items() if _scope(key) in (None, engine)]
        # Universal axes are outside of those of an engine.
        ours = dict(sorted(ours.items(), key=lambda item: _scope(item[0]) is not None))
        for overlays in itertools.product(*variants):
            for point in itertools.product(*ours.values()):
                one = base
                for keys in (dict(zip(ours, point, strict=True)), *overlays):
                    for path, value in keys.items():
                        one = _merged(one, _nested(path, value)) if "." in path else {**one, path: value}
                found.append(one)
    return found


def _scope(key: str) -> str | None:
    """The engine that an axis or a group is of alone."""
    first, dot, _ = key.partition(".")
    return first if dot and first in ENGINES else None


def _is_group(key: str, value: Any) -> bool:
    """Whether it is a list of alternatives with keys of their own, not one of values."""
    if not isinstance(value, list) or not any(isinstance(each, dict) for each in value):
        return False
    if not all(isinstance(each, dict) for each in value):
        raise ExperimentError(f"sweep.{key} mixes values and groups of keys; it needs one kind")
    return True


def _group(key: str, value: list[Values]) -> list[Values]:
    """Its alternatives; one that has lists is as many as these have combinations."""
    found: list[Values] = []
    for each in value:
        lists = {name: given for name, given in each.items() if _is_inner_axis(given)}
        for point in itertools.product(*lists.values()):
            found.append({**each, **dict(zip(lists, point, strict=True))})
    return found


def _is_inner_axis(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list | dict)


def _axis(key: str, value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _range(key, value)
    return value if isinstance(value, list) else [value]


def _range(key: str, value: Values) -> list[Any]:
    """``{min, max, num}``, ``{log: {min, max, num}}`` or ``{pow2: {min, max}}`` as a list."""
    kind = next((name for name in ("log", "pow2") if set(value) == {name}), "even")
    limits = value.get(kind, value)
    names = {"min", "max"} if kind == "pow2" else {"min", "max", "num"}
    if not isinstance(limits, dict) or set(limits) != names or not all(map(_is_number, limits.values())):
        raise ExperimentError(
            f"sweep.{key} is {value!r}, needs a list, {{min, max, num}}, {{log: {{min, max, num}}}} or "
            "{pow2: {min, max}}, of numbers"
        )
    low, high, number = limits["min"], limits["max"], limits.get("num", 2)
    if low > high or number < 2 or number != int(number) or (kind != "even" and low <= 0):
        above = "" if kind == "even" else ", both above 0"
        raise ExperimentError(f"sweep.{key} is {value!r}, needs min up to max{above}, and a whole num from 2")
    steps = [step / (number - 1) for step in range(int(number))]
    if kind == "even":
        made = [low + (high - low) * step for step in steps]
    elif kind == "log":
        made = [low * (high / low) ** step for step in steps]
    else:
        # One more on either side: logarithms are rounded, and too many are taken away again.
        powers = range(math.floor(math.log2(low)) - 1, math.ceil(math.log2(high)) + 2)
        made = [2.0**power for power in powers if low <= 2.0**power <= high]
    rounded = [float(f"{each:.{DIGITS}g}") for each in made]
    integers = kind == "pow2" or (isinstance(low, int) and isinstance(high, int))
    whole = integers and all(each.is_integer() for each in rounded)
    return list(dict.fromkeys(int(each) if whole else each for each in rounded))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_engine(values: Values, engine: str) -> Values:
    """Without the sections of other engines, which are there for other experiments."""
    return {key: value for key, value in values.items() if key not in ENGINES or key == engine}


def _engine(values: Values) -> str:
    return str(values.get("engine", ENGINES[0]))


def _nested(path: str, value: Any) -> Values:
    for key in reversed(path.split(".")):
        value = {key: value}
    nested: Values = value
    return nested


def _merged(below: Values, above: Values) -> Values:
    """``above`` over ``below``, key by key at every depth."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return merged


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
