# SPDX-License-Identifier: Apache-2.0
"""Calls as bytes: what users' own modules define travels by value, what is installed by name."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
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


# cloudpickle tells no types.
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cached functions by value, too: they would say their name, which a rank may not be able to import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Cached) and value.__module__ in cloudpickle.list_registry_pickle_by_value():
            # Python gives the type of cached functions no name by which mypy would know it.
            cached: Any = value
            return _cached, (cached.__wrapped__, cached.cache_parameters())
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    """Leaves classes that this process has as they are: what comes from a rank are values.

    cloudpickle would put the rank's copies of methods and attributes into the test's own class.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known = set(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values())

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is not cloudpickle.cloudpickle._class_setstate:
            return found
        return lambda made, state: made if made in self._known else found(made, state)


def unpickled(data: bytes) -> Any:
    """What a rank has sent, in pytest's process. Raises whatever the making of these values raises."""
    return _Unpickler(io.BytesIO(data)).load()


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
    return _origin(module.__name__, len(sys.meta_path)) == module.__file__


@functools.lru_cache(maxsize=1024)
def _origin(module: str, _finders: int) -> str | None:
    path: Sequence[str] | None = None
    name, spec = "", None
    # Those of editable installs included: a rank has them too, but no hook of pytest's.
    finders = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next(filter(None, (each.find_spec(name, path) for each in finders)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None else None
