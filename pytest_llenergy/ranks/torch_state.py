# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that outlive a test, as torch itself lists them. Imports nothing by itself."""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pytest_llenergy.ranks.process_state import loaded_modules

#: What a function must be called to be the getter of a setting, and how its setter is called then.
GETTER = re.compile(r"_?(?:jit_)?(get|is|are|len|check|can)_(\w+)")
SETTERS = ("_set_", "set_", "use_", "_jit_set_", "_jit_override_")

#: Functions that read a setting whatever else they are called, unless they set it.
ENABLED = re.compile(r"(?!_?(?:jit_)?set_)\w+_enabled")

#: Getters that are no settings (each round sets its own random state) or deprecated.
NO_SETTINGS = re.compile(
    r".*(?:rng_state|thread_name|tracing_state|autocast_(?:cpu|gpu|ipu|xla)_\w+|nvfuser\w*)"
)

#: Functions of ``torch._C`` that return the value they replace, each with a valid value.
SWAPS: dict[str, object] = {
    "_jit_set_profiling_executor": True,
    "_jit_set_profiling_mode": True,
    "_jit_set_autocast_mode": True,
    "_jit_set_fusion_strategy": [("STATIC", 2)],
}

#: Objects below ``torch.backends`` with a precision. Reading an attribute of others may initialise CUDA.
WITH_PRECISION = ("_FP32Precision", "cuBLASModule")

#: Functions that torch itself replaces, once torch.compile is used.
REPLACED_BY_COMPILE = ("manual_seed", "__init__", "__setstate__")

#: Attributes of ``torch.cuda`` that read settings, once CUDA is initialised.
CUDA_GETTERS = (
    *("current_device", "current_stream", "get_sync_debug_mode", "get_allocator_backend"),
    "get_per_process_memory_fraction",
)


def settings() -> dict[str, object]:
    """Return the settings by name; of configuration modules only those that differ from their defaults."""
    torch = sys.modules.get("torch")
    if getattr(torch, "_C", None) is None:
        return {}
    with warnings.catch_warnings():
        # Some getters warn that they, or the setting, are deprecated.
        warnings.simplefilter("ignore")
        return {
            **{name: _call(getter) for name, getter in _getters(torch).items()},
            **dict(_backend_settings(torch)),
            **dict(_autocast(torch)),
            **dict(_swapped(torch)),
            **dict(_variables(torch)),
            **dict(_compiler()),
            **dict(_hooks(torch)),
            **dict(_changed_configuration()),
            **dict(_cuda(torch)),
            "process group": _process_group(),
        }


def is_replaced_by_compile(name: str, function: object) -> bool:
    """Return whether a function is one that torch.compile has put in the place of another."""
    return name in REPLACED_BY_COMPILE and str(getattr(function, "__module__", None)).startswith("torch.")


def patchable() -> list[Any]:
    """Return the module and classes of torch whose functions models call."""
    torch = sys.modules.get("torch")
    if getattr(torch, "nn", None) is None:
        return []
    return [torch, torch.nn.functional, torch.nn.Module, torch.Tensor]  # type: ignore[union-attr]


@lru_cache(maxsize=1)
def _getters(torch: Any) -> dict[str, Callable[[], object]]:
    """Return functions without arguments that read a setting: they have a setter or end in ``_enabled``."""
    found = {}
    for owner in (torch._C, torch._C._autograd, torch.__future__, torch):
        for name in dir(owner):
            if NO_SETTINGS.fullmatch(name):
                continue
            has_setter = False
            if match := GETTER.fullmatch(name):
                kind, setting = match.groups()
                stems = (setting, setting.removesuffix("_enabled"), f"{kind}_{setting}")
                has_setter = kind == "len" or any(
                    hasattr(owner, f"{prefix}{stem}") for prefix in SETTERS for stem in stems
                )
            if has_setter or ENABLED.fullmatch(name):
                getter = getattr(owner, name)
                # Those with arguments read something else.
                if _call(getter) is not TypeError:
                    found[f"{owner.__name__}.{name}"] = getter
    return found


def _call(getter: Callable[..., object], *args: object) -> object:
    try:
        value = getter(*args)
    except Exception as error:
        # torch raises for the precision of matmul once both its old and its new interface were used.
        return type(error)
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=1)
def _backend_attributes(torch: Any) -> list[tuple[str, Any, str]]:
    """Return the properties of each module of ``torch.backends`` and its variables, with their owners."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(f"{torch.__name__}.backends"):
            continue
        # Properties replace the module by an object that holds it.
        for name, value in {**vars(vars(module).get("m", module)), **vars(type(module))}.items():
            if type(value).__name__ in WITH_PRECISION:
                found.append((f"{module_name}.{name}.fp32_precision", value, "fp32_precision"))
            elif not name.startswith("__") and (hasattr(type(value), "__set__") or _is_simple(value)):
                found.append((f"{module_name}.{name}", module, name))
    return found


def _backend_settings(torch: Any) -> Iterator[tuple[str, object]]:
    for name, owner, attribute in _backend_attributes(torch):
        value = _call(getattr, owner, attribute)
        # Some are None until a library is loaded.
        yield name, value if _is_simple(value) else None


def _is_simple(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, type))


def _autocast(torch: Any) -> Iterator[tuple[str, object]]:
    devices = getattr(torch._C, "_autocast_supported_devices", lambda: ("cpu", "cuda"))
    for device in devices():
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            yield f"torch.{name}({device!r})", _call(getattr(torch, name), device)


def _swapped(torch: Any) -> Iterator[tuple[str, object]]:
    """Yield settings that only their setters return."""
    for name, value in SWAPS.items():
        if (setter := getattr(torch._C, name, None)) is not None:
            now = setter(value)
            setter(now)
            yield f"torch._C.{name}", tuple(now) if isinstance(now, list) else now


def _variables(torch: Any) -> Iterator[tuple[str, object]]:
    """Yield settings that are variables of modules."""
    yield "torch.set_printoptions", repr(torch._tensor_str.PRINT_OPTS)
    yield "torch.jit._state", torch.jit._state._enabled.enabled
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    yield "torch.utils.checkpoint", getattr(checkpoint, "_checkpoint_debug_enabled", None)
    yield "torch.library", _replaced_operators(frozenset(torch.library._impls))


@lru_cache(maxsize=1)
def _replaced_operators(implementations: frozenset[str]) -> frozenset[str]:
    """Return those of torch's own operators. Libraries add others when they are imported."""
    return frozenset(name for name in implementations if name.startswith("aten/"))


def _compiler() -> Iterator[tuple[str, object]]:
    """Yield settings of torch.compile that differ from their defaults. It may be imported during a test."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    if stance is not None and stance != type(stance)():
        yield "torch.compiler.set_stance", repr(stance)
    backend = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_default_backend", "inductor")
    if backend != "inductor":
        yield "torch.compiler.set_default_backend", backend
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    if (set_hook := getattr(frames, "set_guard_complete_hook", None)) is not None:
        hook = set_hook(None)
        set_hook(hook)
        if hook is not None:
            yield "torch.compiler.set_enable_guard_collectives", True


def _hooks(torch: Any) -> Iterator[tuple[str, object]]:
    """Yield the hooks that concern all modules and all tensors."""
    for name, value in list(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_"):
            yield f"torch.nn.modules.module.{name}", tuple(value) if isinstance(value, dict) else value
    with suppress(AttributeError, TypeError):
        yield (
            "torch.autograd.graph.saved_tensors_hooks",
            torch._C._autograd._top_saved_tensors_default_hooks(False),
        )


def _changed_configuration() -> Iterator[tuple[str, object]]:
    """Yield what code has changed in the configuration of torch.compile, distributed and the like.

    They may be imported during a test, so that their state before it is unknown. Their defaults are known.
    """
    for module_name in _configuration_modules(loaded_modules()):
        entries = getattr(sys.modules.get(module_name), "_config", None)
        if not isinstance(entries, dict):
            continue
        # Before torch 2.6 the modules hold the values and the defaults themselves.
        defaults = getattr(sys.modules[module_name], "_default", None)
        for name, entry in entries.items():
            value, default = _override(entry) if defaults is None else (entry, defaults[name])
            if value is not default and value != default:
                yield f"{module_name}.{name}", repr(value)


@lru_cache(maxsize=1)
def _configuration_modules(_loaded: object) -> list[str]:
    return [name for name in sys.modules if name.startswith("torch.") and name.endswith("config")]


def _override(entry: Any) -> tuple[object, object]:
    """Return the value that code has set, and the one without it, which an environment variable may set."""
    value = entry.user_override
    if isinstance(value, ContextVar):
        value = value.get()
    # The marker of values that nobody has set is private.
    if type(value) is object:
        return None, None
    default = entry.env_value_default
    return value, entry.default if type(default) is object else default


def _cuda(torch: Any) -> Iterator[tuple[str, object]]:
    if torch.cuda.is_initialized():
        for name in CUDA_GETTERS:
            yield f"torch.cuda.{name}", _call(getattr(torch.cuda, name, tuple))


def _process_group() -> tuple[object, int] | None:
    """Return the default process group, without keeping it alive, and its size."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return weakref.ref(dist.group.WORLD), dist.get_world_size()
