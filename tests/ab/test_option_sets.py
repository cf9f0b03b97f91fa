# SPDX-License-Identifier: Apache-2.0
"""Comparing two option sets on the same code."""

from __future__ import annotations

import pytest

from pytest_llenergy.ab.join import pair_by_parameters, unpaired_note
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import Record

from .project import Project

BACKENDS = """
import pytest
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities

def pytest_llenergy_backends(config):
    return [BackendSpec(name, "nothing:Nothing", (), "", Capabilities()) for name in ("slow", "fast")]
"""

TESTS = """
import pytest
from work import use

@pytest.mark.parametrize("size", [1, 8])
def test_decode(energy, backend, size, request):
    slow = "slow" in request.node.name
    energy(use, 10.0 * size if slow else 9.0 * size)
"""


@pytest.fixture
def backends(project: Project) -> Project:
    project.write("conftest.py", (project.path / "conftest.py").read_text() + BACKENDS)
    project.write("test_some.py", TESTS)
    return project


def test_two_backends_are_compared_test_by_test(backends: Project) -> None:
    result = backends.ab(
        "--a=--energy-backend=slow",
        "--b=--energy-backend=fast",
        "--pairs=6",
        "--rounds-per-session=3",
        "--metric=energy_j",
        "--",
        "pytest",
    )
    assert result.status == 0
    paired = backends.paired()
    found = {each.id: each for each in paired.compared.comparisons}
    assert list(found) == ["test_some.py::test_decode[1]", "test_some.py::test_decode[8]"]
    for each in found.values():
        assert (each.verdict, each.n_base, each.n_head) == ("improved", 6, 6)
        assert "different workload: params.backend: 'slow' -> 'fast'" in each.notes
    assert (
        {each.id for each in paired.base.records} == {each.id for each in paired.head.records} == set(found)
    )
    sides = paired.compared.base, paired.compared.head
    assert [each.origin for each in sides] == ["--energy-backend=slow", "--energy-backend=fast"]
    assert result.lines[0] == "a: --energy-backend=slow; b: --energy-backend=fast"


def records(*tests: tuple[str, dict[str, Primitive]]) -> dict[str, Record]:
    return {
        name: Record(id=name, attempt=1, status="measured", params=dict(params)) for name, params in tests
    }


def test_same_id_is_paired_first() -> None:
    a = records(("t.py::test[x-1]", {"backend": "x", "n": 1}), ("t.py::test[y-1]", {"backend": "y", "n": 1}))
    b = records(("t.py::test[x-1]", {"backend": "x", "n": 1}))
    names = pair_by_parameters(a, b)
    assert names.base == {"t.py::test[x-1]": "t.py::test[x-1]", "t.py::test[y-1]": "t.py::test[y-1]"}
    assert names.head == {"t.py::test[x-1]": "t.py::test[x-1]"}
    assert names.unpaired == ("t.py::test[y-1]",)


def test_tests_are_paired_if_only_the_backend_differs() -> None:
    a = records(("t.py::test[x]", {"backend": "x"}), ("t.py::other[x-1]", {"backend": "x", "n": 1}))
    b = records(("t.py::test[y]", {"backend": "y"}), ("t.py::other[y-2]", {"backend": "y", "n": 2}))
    names = pair_by_parameters(a, b)
    assert names.base["t.py::test[x]"] == names.head["t.py::test[y]"] == "t.py::test"
    assert names.unpaired == ("t.py::other[x-1]", "t.py::other[y-2]")
    assert unpaired_note(names.unpaired).endswith(
        "no single other test matches: t.py::other[x-1], t.py::other[y-2]"
    )


def test_ambiguous_tests_are_not_paired() -> None:
    a = records(("t.py::test[x]", {"backend": "x"}))
    b = records(("t.py::test[y]", {"backend": "y"}), ("t.py::test[z]", {"backend": "z"}))
    assert len(pair_by_parameters(a, b).unpaired) == 3
