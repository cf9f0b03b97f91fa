# SPDX-License-Identifier: Apache-2.0
"""Which backends a test can run on: its marks are checked against capabilities before anything starts."""

from __future__ import annotations

import pytest

#: Two backends that never load anything: tests are refused earlier.
TWO = """
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities

def pytest_llenergy_backends(config):
    one = Capabilities(
        data=True, tensor=True, options=("dtype",), caches=("dynamic", "static"), timestamps="token")
    other = Capabilities(timestamps="step")
    return [BackendSpec(name, f"nowhere:{name}", (), "", row)
            for name, row in (("one", one), ("other", other))]
"""
TEST = "import pytest\n{marks}\ndef test_it(backend):\n    print('given', backend.name, backend.options)\n"


@pytest.fixture
def two(quick: pytest.Pytester) -> pytest.Pytester:
    conftest = quick.path / "conftest.py"
    conftest.write_text(conftest.read_text() + TWO)
    return quick


def run(two: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    two.makepyfile(source)
    return two.runpytest("--energy-backend=one,other", "-rsP", *args)


def text_of(result: pytest.RunResult) -> str:
    return " ".join(result.stdout.str().replace("\nE  ", "").split())


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ("backend_options(dtype='float32')", "other does not offer the load option dtype (it takes: none)"),
        (
            "backend_needs(timestamps='token', cache='static')",
            "other does not offer a static cache (it has: dynamic) and timestamps of each token (it has: "
            "step)",
        ),
    ],
)
def test_a_backend_without_the_requirement_is_skipped_and_says_why(
    two: pytest.Pytester, mark: str, reason: str
) -> None:
    result = run(two, TEST.format(marks=f"@pytest.mark.{mark}"))
    result.assert_outcomes(passed=1, skipped=1)
    assert reason in text_of(result)
    result.stdout.fnmatch_lines(["given one *"])


def test_load_options_reach_the_backend(two: pytest.Pytester) -> None:
    result = run(two, TEST.format(marks="@pytest.mark.backend_options(dtype='float32')"))
    result.stdout.fnmatch_lines(["given one {'dtype': 'float32'}"])


def test_a_requirement_that_no_backend_meets_is_a_collection_error(two: pytest.Pytester) -> None:
    marks = "@pytest.mark.gpus(2, fallback='cpu')\n@pytest.mark.parallel(placement=2)\n"
    marks += "@pytest.mark.backend_needs(task='serve')"
    result = run(two, TEST.format(marks=marks))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "one does not offer placement parallelism" in text_of(result)


def test_an_option_that_no_selected_backend_can_know_is_an_error(two: pytest.Pytester) -> None:
    """Others pass unknown options on, but they are not in the run, which would only skip its tests."""
    result = run(two, TEST.format(marks="@pytest.mark.backend_options(dtyp='float32')"))
    result.assert_outcomes(errors=1)
    actual = text_of(result)
    assert "one does not offer the load option dtyp (it takes: dtype; did you mean dtype?)" in actual
    assert "other does not offer the load option dtyp (it takes: none)" in actual


def test_several_devices_default_to_data_parallelism(two: pytest.Pytester) -> None:
    result = run(two, TEST.format(marks="@pytest.mark.gpus(2, fallback='cpu')"))
    result.assert_outcomes(passed=1, skipped=1)
    assert (
        "other does not offer data parallelism (with 2 devices and no mark parallel(...) a test is data "
        "parallel)"
    ) in text_of(result)


OF_A_PARAMETER = """
import pytest
@pytest.mark.parametrize("i", [0, pytest.param(1, marks=pytest.mark.{mark})])
def test_it(backend, i): pass
"""


def test_an_unmet_mark_of_a_parameter_is_a_collection_error(two: pytest.Pytester) -> None:
    result = run(two, OF_A_PARAMETER.format(mark="backend_needs(task='serve', cache='static')"))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "test_an_unmet_mark_of_a_parameter_is_a_collection_error.py::test_it: " in text_of(result)
    assert "one does not offer the task serve (it has: generate)" in text_of(result)
