# SPDX-License-Identifier: Apache-2.0
"""Serialise calls for ranks, and refuse calls that would do no work."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import cloudpickle

from pytest_llenergy.errors import PlanError

# Calls as bytes: what users' own modules define travels by value, what is installed by name.

#: Where pip, Debian and users (``~/.local``) install to, under whatever prefix.
INSTALLED = {"site-packages", "dist-packages"}

#: Of these a call may have millions, and they have no module.
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})

#: What ``functools.lru_cache`` makes.
Cached: type = type(functools.lru_cache(lambda: None))

#: What defines something, as opposed to its instances.
DEFINITIONS = (type, FunctionType, Cached)

#: What each process makes of a module by itself, and pytest of those whose asserts it rewrites.
OF_IMPORT = {"__builtins__", "__loader__", "__spec__"}


# cloudpickle tells no types.
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """By value also what is met on the way and a rank cannot import, and cached functions.

    ``by_value`` takes modules. It is asked before anything of theirs is pickled.
    """

    def __init__(self, file: io.BytesIO, by_value: Callable[[Iterable[ModuleType]], None]) -> None:
        super().__init__(file)
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            if _is_own(value) and not _is_found(value):
                state = {name: each for name, each in vars(value).items() if name not in OF_IMPORT}
                return cloudpickle.cloudpickle.dynamic_subimport, (value.__name__, state)
        elif isinstance(value, DEFINITIONS):
            module = _module(value)
            if module is not None and not _is_found(module):
                self._by_value([module])
        if isinstance(value, Cached) and not _has_name(value):
            # Python gives the type of cached functions no name by which mypy would know it.
            cached: Any = value
            return _cached, (cached.__wrapped__, cached.cache_parameters())
        if type(value) is functools.cached_property:
            # Before Python 3.12 it has a lock.
            return _cached_property, (value.func, value.attrname)
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


class _RankUnpickler(pickle.Unpickler):
    """Takes from classes that were sent before what they have lost since; cloudpickle only adds."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _renewed if found is cloudpickle.cloudpickle._class_setstate else found


#: The names of the attributes that a class was last sent with. What a rank has added is its own.
_sent: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def _renewed(kind: type, state: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    attributes, _ = state
    for name in _sent.get(kind, frozenset()).difference(attributes):
        with suppress(AttributeError, TypeError):
            delattr(kind, name)
    _sent[kind] = frozenset(attributes)
    return cloudpickle.cloudpickle._class_setstate(kind, state)


def load_call(data: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What ``pickled`` has made, in a rank. Raises whatever the making of these values raises."""
    function, args, kwargs = _RankUnpickler(io.BytesIO(data)).load()
    return function, args, kwargs


def dump_result(result: Any) -> bytes:
    """What a rank sends, for ``unpickled``. Raises whatever it raises when pickled."""
    with io.BytesIO() as file:
        # pytest has all the modules that a rank has.
        _Pickler(file, lambda _: None).dump(result)
        return file.getvalue()


def load_result(data: bytes) -> Any:
    """What a rank has sent, in pytest's process. Raises whatever the making of these values raises."""
    return _Unpickler(io.BytesIO(data)).load()


def dump_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A function, or the name of one, with its arguments. Raises whatever these raise when pickled."""
    call = function, args, kwargs
    registered: list[ModuleType] = []

    def register(modules: Iterable[ModuleType]) -> None:
        for module in modules:
            # What a test has registered by itself stays so.
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)

    try:
        register(_modules(call))
        register(filter(None, [_module(type(function))]))
        with io.BytesIO() as file:
            _Pickler(file, register).dump(call)
            return file.getvalue()
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    # Known from the body of its class, which nobody runs again.
    made.attrname = name
    return made


def _has_name(definition: Any) -> bool:
    """Whether it is pickled by a name, which leads to it and to nothing else."""
    if definition.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    return cloudpickle.cloudpickle._lookup_module_and_qualname(definition) is not None


def _modules(value: Any, deep: int = 5) -> Iterator[ModuleType]:
    """Users' modules that define the functions and classes in a value, as far as one can see from outside."""
    layer, kinds = [value], set[type]()
    for _ in range(deep + 1):
        below: list[Any] = []
        for each in layer:
            kind = type(each)
            if isinstance(each, DEFINITIONS):
                module = _module(each)
                if module is not None:
                    yield module
            elif kind not in kinds:
                kinds.add(kind)
                module = _module(kind)
                # A value that a rank can build by itself keeps the type that the rank knows.
                if module is not None and not _is_found(module):
                    yield module
            below += _parts(each)
        # Of these there may be millions.
        layer = [each for each in below if type(each) not in PLAIN]


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    return [value.__wrapped__] if callable(value) and hasattr(value, "__wrapped__") else []


def _module(definition: Any) -> ModuleType | None:
    """That of a function or class, if it is a user's own."""
    module = sys.modules.get(getattr(definition, "__module__", None) or "")
    return module if module is not None and _is_own(module) else None


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(file)
    return any(path.is_relative_to(place) for place in places) or not INSTALLED.isdisjoint(path.parts)


def _is_found(module: ModuleType) -> bool:
    """Whether its name leads to the same file in a rank, which has the same search path."""
    return _origin(module.__name__, _search()) == module.__file__


def _search() -> tuple[object, ...]:
    """All that decides where a name leads to."""
    return (*map(id, sys.meta_path), *(path for path in sys.path if isinstance(path, str)))


@functools.lru_cache(maxsize=1024)
def _origin(module: str, _search: tuple[object, ...]) -> str | None:
    path: Sequence[str] | None = None
    name, spec = "", None
    # Those of editable installs included: a rank has them too, but no hook of pytest's.
    own = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    # Python passes over those of old that have no such method.
    finders = [each for each in own if hasattr(each, "find_spec")]
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next(filter(None, (each.find_spec(name, path) for each in finders)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None else None


# Calls that do none of their work: they make a coroutine or a generator. Nothing would be measured.

Result = TypeVar("Result")

FUNCTIONS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
RESULTS = (inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen)

REFUSAL = (
    "a call of this function only makes a coroutine or generator; give a function that runs it, such as "
    "lambda: asyncio.run(f()) or lambda: list(f())"
)


def is_lazy(function: Callable[..., Any]) -> bool:
    """Whether a call is known to be lazy. Of many functions only what it returns tells: see ``finished``."""
    while isinstance(function, partial):
        function = function.func
    # That of an object with such a ``__call__`` too.
    return any(test(each) for test in FUNCTIONS for each in (function, type(function).__call__))


def check_finished(result: Result, who: str = "workers") -> Result:
    """What a call has returned. Raises ``PlanError`` in the name of ``who`` for what has yet to run."""
    if any(test(result) for test in RESULTS):
        if inspect.iscoroutine(result):
            # Else Python tells besides that nobody has awaited it.
            result.close()
        raise PlanError(f"{who}: {REFUSAL}")
    return result
