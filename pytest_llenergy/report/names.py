# SPDX-License-Identifier: Apache-2.0
"""How tables name tests: as short as is unique, with the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import MAX_NAME_LENGTH, one_line, short_test_name, shorten

#: If a parameter is a longer text, pytest's id of the parameters is shown instead.
MAX_PARAM_LENGTH = 40


def unique_function_names(ids: Iterable[str]) -> dict[str, str]:
    """Return the function of each id without parameters, with the class or file if another has the same name.

    ``test_x.py::TestA::test_m`` becomes ``test_m``, or ``TestA::test_m`` next to ``TestB::test_m``.
    """
    functions = {test_id: test_id.partition("[")[0] for test_id in ids}
    ambiguous = set(functions.values())
    names = {function: function for function in ambiguous}
    for first in (-1, 1):
        candidates = {function: "::".join(function.split("::")[first:]) or function for function in ambiguous}
        counts = Counter(candidates.values())
        found = {function: name for function, name in candidates.items() if counts[name] == 1}
        names |= found
        ambiguous -= found.keys()
    return {test_id: names[function] for test_id, function in functions.items()}


def list_names(ids: Sequence[str]) -> list[str]:
    """Return the function of each test with pytest's id of its parameters."""
    functions = unique_function_names(ids)
    return [_label("".join([functions[each], *each.partition("[")[1:]])) for each in ids]


def name_some(ids: Sequence[str]) -> str:
    """Return the name of the first test, and the number of the others."""
    first, *others = dict.fromkeys(ids)
    return short_test_name(first) + (f" and {len(others)} more" if others else "")


def record_labels(records: Sequence[Record], *, brief: bool = False) -> dict[str, str]:
    """Return the label of each test by its id: function and parameters; if ``brief``, no function of all."""
    names = unique_function_names(record.id for record in records)
    params = params_labels(records, names)
    if brief and len(set(names.values())) == 1 and all(params.values()):
        return params
    return {record.id: _label(f"{names[record.id]} {params[record.id]}") for record in records}


def params_labels(records: Sequence[Record], names: Mapping[str, str]) -> dict[str, str]:
    """Return a label of the parameters by test id: pytest's own where those of a function's tests repeat."""
    labels = {record.id: _params_label(record) for record in records}
    counts = Counter((names[test], label) for test, label in labels.items())
    return {
        test: label if counts[names[test], label] == 1 else _pytest_label(test) or label
        for test, label in labels.items()
    }


def _params_label(record: Record) -> str:
    """Return ``openvino, batch_size=8, ranks=2``, or pytest's id of long parameters."""
    if any(isinstance(value, str) and len(value) > MAX_PARAM_LENGTH for value in record.params.values()):
        return _pytest_label(record.id)
    params = [f"{name}={value}" for name, value in record.params.items() if name != "backend"]
    backend = [str(record.params["backend"])] if "backend" in record.params else []
    ranks = [f"ranks={len(record.ranks)}"] * (len(record.ranks) > 1)
    return _label(", ".join([*backend, *params, *ranks]))


def _pytest_label(test: str) -> str:
    return _label(test.partition("[")[2].removesuffix("]"))


def _label(text: str) -> str:
    return shorten(one_line(text), MAX_NAME_LENGTH)
