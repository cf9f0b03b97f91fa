# SPDX-License-Identifier: Apache-2.0
"""Calls as bytes: what users' own modules define travels by value, what is installed by name."""

from __future__ import annotations

import functools
import io
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

#: Where pip, Debian and users (``~/.local``) install to, under whatever prefix.
INSTALLED = {"site-packages", "dist-packages"}

#: Of these a call may have millions, and they have no module.
PLAIN = (int, float, bool, str, bytes, type(None))

#: What ``functools.lru_cache`` makes.
Cached: type = type(functools.lru_cache(lambda: None))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cached functions by value, too: they would say their name, which a rank may not be able to import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Cached) and value.__module__ in cloudpickle.list_registry_pickle_by_value():
            return _cached, (value.__wrapped__, value.cache_parameters())  # type: ignore[attr-defined]
        return super().reducer_override(value)


def pickled(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A function, or the name of one, with its arguments. Raises whatever these raise when pickled."""
    call = function, args, kwargs
    modules = [*_modules(call), _module(type(function))]
    # What a test has registered by itself stays so.
    found = {each.__name__ for each in modules if each} - cloudpickle.list_registry_pickle_by_value()
    for name in found:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        with io.BytesIO() as file:
            _Pickler(file).dump(call)
            return file.getvalue()
    finally:
        for name in found:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _modules(value: Any, deep: int = 5) -> Iterator[ModuleType]:
    """Users' modules that define the functions and classes in a value, as far as one can see from outside."""
    is_definition = isinstance(value, (type, FunctionType, Cached))
    module = _module(value if is_definition else type(value))
    # A value that a rank can build by itself keeps the type that the rank knows.
    if module is not None and (is_definition or not _is_found(module)):
        yield module
    for part in _parts(value) if deep else ():
        if type(part) not in PLAIN:
            yield from _modules(part, deep - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    return [value.__wrapped__] if callable(value) and hasattr(value, "__wrapped__") else []


def _module(definition: Any) -> ModuleType | None:
    """That of a function or class, if it is a user's own."""
    module = sys.modules.get(getattr(definition, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return module if module is not None and file is not None and not _is_installed(file) else None


@functools.cache
def _is_installed(file: str) -> bool:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(file)
    return any(path.is_relative_to(place) for place in places) or not INSTALLED.isdisjoint(path.parts)


def _is_found(module: ModuleType) -> bool:
    """Whether its name leads to the same file in a rank, which has the same search path."""
    path, name = None, ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == module.__file__
