# SPDX-License-Identifier: Apache-2.0
"""Serialise calls to ranks, and their results.

cloudpickle does the work. This module decides which of the user's modules are pickled by value, that is, with
the code of their functions and classes:

- the modules of the called function, and of functions and classes among its arguments,
- any other module that a rank could not import, such as a helper next to a test file under
  ``--import-mode=importlib``, and each one for ranks elsewhere, which may lack its file.

Installed packages, and the user's modules that a rank can import, are pickled by name.
"""

from __future__ import annotations

import functools
import pickle
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

#: Directories into which pip, Debian and ``pip install --user`` install, under whatever prefix.
INSTALLED = {"site-packages", "dist-packages"}


def dump_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, elsewhere: bool = False
) -> bytes:
    """Pickle a function, or the name of one, with its arguments. Raises whatever these raise.

    ``elsewhere`` is whether it is for another host.
    """
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    definitions = [
        each for each in (*args, *kwargs.values()) if isinstance(each, (type, FunctionType, MethodType))
    ]
    names = {getattr(each, "__module__", None) for each in (called, *definitions)}
    modules = list(_users_modules())
    if elsewhere:
        # What cannot cross by value, such as a structure of ctypes, may be importable there.
        with suppress(Exception):
            return _dump((function, args, kwargs), modules)
    by_value = [
        module
        for module in modules
        if module.__name__ in names or not _is_importable(module.__name__, str(module.__file__))
    ]
    return _dump((function, args, kwargs), by_value)


def _dump(call: object, by_value: Sequence[ModuleType]) -> bytes:
    try:
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(call))
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def load_call(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Unpickle a call in a rank. Raises whatever unpickling its values raises."""
    function, args, kwargs = pickle.loads(call)
    return function, args, kwargs


def dump_result(result: Any) -> bytes:
    """Pickle a result in a rank. Raises whatever the result raises."""
    return bytes(cloudpickle.dumps(result))


def load_result(result: bytes) -> Any:
    """Unpickle a result in pytest's process. Raises whatever unpickling its values raises."""
    return pickle.loads(result)


def _users_modules() -> Iterator[ModuleType]:
    """Yield the imported modules that the user wrote, but for those that he registered for himself."""
    registered = cloudpickle.list_registry_pickle_by_value()
    for name, module in list(sys.modules.items()):
        # Not by getattr, which some packages answer by an import.
        known = vars(module) if isinstance(module, ModuleType) else {}
        file = known.get("__file__")
        if file and known["__name__"] == name and name not in registered and not _is_installed(file):
            yield module


@functools.cache
def _is_installed(file: str) -> bool:
    # All hosts have this package, and its classes must be the same objects on both sides.
    places = [str(Path(__file__).parents[1])]
    places += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(file)
    return any(path.is_relative_to(place) for place in places) or not INSTALLED.isdisjoint(path.parts)


def _is_importable(module: str, file: str) -> bool:
    """Return whether a rank, which has the same search path, finds a module in this file."""
    places = _find_package(module.partition(".")[0], tuple(map(str, sys.path)))
    return any(Path(file).is_relative_to(place) for place in places)


@functools.lru_cache
def _find_package(name: str, _search_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the directories of a package, or the file of a module that is not in one, as a rank finds it."""
    # A rank has the finders of editable installs, but not pytest's.
    finders = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    spec = next(filter(None, (each.find_spec(name, None) for each in finders)), None)
    if spec is None:
        return ()
    return tuple(spec.submodule_search_locations or [str(spec.origin)])
