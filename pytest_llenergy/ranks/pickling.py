# SPDX-License-Identifier: Apache-2.0
"""Serialise calls to ranks and their results, and refuse calls that would only make a coroutine or generator.

cloudpickle does the work. This module decides which of the user's modules are pickled by value, that is, with
the code of their functions and classes:

- the modules of the called function, and of functions and classes among its arguments,
- any other module of the user that a rank could not import, such as a helper next to a test file under
  ``--import-mode=importlib``, and each one for ranks elsewhere, which may lack its file.

Installed packages, and the user's modules that a rank can import, are pickled by name.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import cloudpickle

import pytest_llenergy
from pytest_llenergy.errors import PlanError

Result = TypeVar("Result")

#: Directories into which pip, Debian and ``pip install --user`` install, under whatever prefix.
INSTALLED = {"site-packages", "dist-packages"}

#: The type of what ``functools.lru_cache`` returns; it has no public name.
CachedFunction: type = type(functools.lru_cache(lambda: None))

#: Attributes that each process sets by itself on import. pytest's loader cannot be pickled.
IMPORT_ATTRIBUTES = {"__builtins__", "__loader__", "__spec__"}

REFUSAL = (
    "a call of this function only makes a coroutine or generator; give a function that runs it, such as "
    "lambda: asyncio.run(f()) or lambda: list(f())"
)


# cloudpickle has no type annotations.
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Registers modules as it meets their definitions, and pickles types that cloudpickle cannot."""

    def __init__(self, file: Any, elsewhere: bool) -> None:
        super().__init__(file)
        self._elsewhere = elsewhere
        self._registered: list[ModuleType] = []

    def dump_and_unregister(self, value: Any, definitions: Iterable[Any] = ()) -> None:
        """Pickle a value, with the modules of ``definitions`` by value. Registrations by the user stay."""
        try:
            for each in definitions:
                self._register(_users_module(each))
            self.dump(value)
        finally:
            for registered in self._registered:
                cloudpickle.unregister_pickle_by_value(registered)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and self._needs_value(value):
            state = {name: each for name, each in vars(value).items() if name not in IMPORT_ATTRIBUTES}
            return ModuleType, (value.__name__,), state
        if isinstance(value, (type, FunctionType, CachedFunction)):
            module = _users_module(value)
            if self._needs_value(module):
                self._register(module)
        if isinstance(value, CachedFunction):
            # mypy does not know the type that has these attributes.
            cached: Any = value
            by_value = cached.__module__ in cloudpickle.list_registry_pickle_by_value()
            if by_value or _lookup(cached) is not cached:
                return _cache, (cached.__wrapped__, cached.cache_parameters())
        return super().reducer_override(value)

    def _needs_value(self, module: ModuleType | None) -> bool:
        """Return whether a module is the user's own and ranks cannot import it."""
        if module is None or not _is_users_own(module):
            return False
        # A rank has the same search path.
        state = (*map(id, sys.meta_path), *(path for path in sys.path if isinstance(path, str)))
        return self._elsewhere or _find_file(module.__name__, state) != module.__file__

    def _register(self, module: ModuleType | None) -> None:
        if module is not None and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


class _ResultUnpickler(pickle.Unpickler):
    """Preserves the classes of the test.

    cloudpickle recognises a class that returns from a rank, and would overwrite its methods and attributes
    with the rank's copies. No option prevents that, hence the private name.
    """

    def find_class(self, module: str, name: str) -> Any:
        target = super().find_class(module, name)
        if (module, name) != ("cloudpickle.cloudpickle", "_class_setstate"):
            return target
        return lambda kind, state: kind if _lookup(kind) is kind else target(kind, state)


def dump_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, elsewhere: bool = False
) -> bytes:
    """Pickle a function, or the name of one, with its arguments. Raises whatever these raise.

    ``elsewhere`` is whether it is for another host.
    """
    arguments = [_unwrap(each) for each in (*args, *kwargs.values())]
    definitions = [each for each in arguments if isinstance(each, (type, FunctionType, MethodType))]
    return _dump((function, args, kwargs), [_unwrap(function), *definitions], elsewhere)


def load_call(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Unpickle a call in a rank. Raises whatever unpickling its values raises."""
    function, args, kwargs = pickle.loads(call)
    return function, args, kwargs


def dump_result(result: Any) -> bytes:
    """Pickle a result in a rank. Raises whatever the result raises."""
    return _dump(result)


def load_result(result: bytes) -> Any:
    """Unpickle a result in pytest's process. Raises whatever unpickling its values raises."""
    return _ResultUnpickler(io.BytesIO(result)).load()


def _dump(value: Any, definitions: Iterable[Any] = (), elsewhere: bool = False) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, elsewhere).dump_and_unregister(value, definitions)
        return file.getvalue()


def _unwrap(function: Any) -> Any:
    """Return the function inside ``functools.partial`` and decorators; other objects as they are."""
    while isinstance(function, functools.partial):
        function = function.func
    is_function = isinstance(function, (FunctionType, CachedFunction))
    return inspect.unwrap(function) if is_function else function


def _cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _lookup(definition: Any) -> Any:
    """Return the object that the module and qualified name of a function or class refer to."""
    with suppress(AttributeError, KeyError, TypeError):
        return attrgetter(definition.__qualname__)(sys.modules[definition.__module__])
    return None


def _users_module(definition: Any) -> ModuleType | None:
    """Return the module of a function or class, or of the class of an object, if it is the user's own."""
    module = sys.modules.get(getattr(definition, "__module__", None) or "")
    return module if module is not None and _is_users_own(module) else None


def _is_users_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # All hosts have this version, and its classes must be the same objects on both sides.
    places.append(str(Path(pytest_llenergy.__file__).parent))
    path = Path(file)
    return any(path.is_relative_to(place) for place in places) or not INSTALLED.isdisjoint(path.parts)


@functools.lru_cache(maxsize=1024)
def _find_file(module: str, _import_state: tuple[object, ...]) -> str | None:
    """Return the file that a rank finds under a module's name, None if there is none."""
    path: Sequence[str] | None = None
    name, spec = "", None
    # A rank has the finders of editable installs, but not pytest's. Legacy finders may lack find_spec.
    finders = [
        each
        for each in sys.meta_path
        if hasattr(each, "find_spec") and not type(each).__module__.startswith("_pytest")
    ]
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next(filter(None, (each.find_spec(name, path) for each in finders)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None else None


def is_lazy(function: Callable[..., Any]) -> bool:
    """Return whether a call is known to return a coroutine or generator: it does no work to be measured.

    Of many functions only the result shows it: see ``check_finished``.
    """
    while isinstance(function, functools.partial):
        function = function.func
    tests = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    # An object may have such a ``__call__``.
    return any(test(each) for test in tests for each in (function, type(function).__call__))


def check_finished(result: Result, caller: str = "workers") -> Result:
    """Return a result, or raise ``PlanError`` in the name of ``caller`` if it is a coroutine or generator."""
    if inspect.iscoroutine(result):
        # Otherwise Python warns that it was never awaited.
        result.close()
    elif not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return result
    raise PlanError(f"{caller}: {REFUSAL}")
