# SPDX-License-Identifier: Apache-2.0
"""Options of pytest itself: selected tests have records, others have none."""

from __future__ import annotations

import pytest

from .runs import ONE, OUTCOMES, STATUSES, SUITE, RunSuite

#: Built-in plugins that a run may disable; the first few are also disabled one at a time.
DISPENSABLE = (
    *("terminal", "cacheprovider", "logging", "capture", "debugging", "junitxml", "warnings", "setuponly"),
    *("setupplan", "stepwise", "faulthandler", "unittest", "doctest", "tmpdir", "monkeypatch", "recwarn"),
    *("pastebin", "threadexception", "unraisableexception", "legacypath", "pytester", "subtests", "xdist"),
)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("prepend", marks=pytest.mark.slow),
        pytest.param("append", marks=pytest.mark.slow),
        "importlib",
    ],
)
def test_every_import_mode_gives_the_same_records(run_suite: RunSuite, mode: str) -> None:
    ran = run_suite(SUITE, "-Werror", f"--import-mode={mode}")
    ran.result.assert_outcomes(**OUTCOMES)
    assert ran.statuses() == STATUSES


@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=str)
def test_a_run_with_warnings_as_errors_has_the_same_records(
    run_suite: RunSuite, workers: tuple[str, ...]
) -> None:
    ran = run_suite(SUITE, "-Werror", "--strict-markers", "--strict-config", *workers, plugins=("xdist",))
    ran.result.assert_outcomes(**OUTCOMES)
    assert ran.statuses() == STATUSES


#: Warns like the package pynvml, which may be installed next to nvidia-ml-py.
DEPRECATED = """
import sys, warnings
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "pynvml":
            warnings.warn("The pynvml package is deprecated.", FutureWarning)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=str)
def test_a_deprecation_warning_of_pynvml_is_no_error(
    run_suite: RunSuite, ten_watts: str, workers: tuple[str, ...]
) -> None:
    plugins = ("xdist",) if workers else ()
    ran = run_suite(
        {"conftest": ten_watts + DEPRECATED, "test_it": ONE}, "-Werror", *workers, plugins=plugins
    )
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == {("test_one", 1): "measured"}


@pytest.mark.parametrize(
    "names",
    [DISPENSABLE, *(pytest.param((name,), marks=pytest.mark.slow) for name in DISPENSABLE[:4])],
    ids=lambda names: "all" if len(names) > 1 else names[0],
)
def test_a_run_without_builtin_plugins_is_measured(run_suite: RunSuite, names: tuple[str, ...]) -> None:
    blocked = [part for name in names for part in ("-p", f"no:{name}")]
    ran = run_suite(ONE, *blocked, "-Werror")
    assert ran.result.ret == 0
    assert ran.statuses() == {("test_one", 1): "measured"}


def test_disabling_this_plugin_removes_its_options_and_marks(
    run_suite: RunSuite, pytester: pytest.Pytester
) -> None:
    """Disabling the plugin removes its options and marks; other tests run."""
    pytester.makepyfile("def test_other():\n    pass\n")
    pytester.makeconftest("")
    pytester.makeini("[pytest]\n")
    result = pytester.runpytest_subprocess("-p", "no:llenergy", "-Werror")
    result.assert_outcomes(passed=1)
    assert "energy" not in pytester.runpytest_subprocess("-p", "no:llenergy", "--markers").stdout.str()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("-k", "measured"), {"test_measured[0]", "test_measured[1]"}),
        pytest.param(
            ("-k", "not measured and not window"),
            {"test_fails", "test_skips", "test_xfails"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--deselect=test_it.py::test_measured", "--deselect=test_it.py::test_fails"),
            {"test_window", "test_skips", "test_xfails"},
            marks=pytest.mark.slow,
        ),
        pytest.param(("test_it.py::test_measured[1]",), {"test_measured[1]"}, marks=pytest.mark.slow),
        (("-x",), {"test_measured[0]", "test_measured[1]", "test_window", "test_fails"}),
        pytest.param(
            ("--sw",),
            {"test_measured[0]", "test_measured[1]", "test_window", "test_fails"},
            marks=pytest.mark.slow,
        ),
        pytest.param(("--sw-skip",), {test for test, _ in STATUSES}, marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_deselected_tests_have_no_record(
    run_suite: RunSuite, args: tuple[str, ...], expected: set[str]
) -> None:
    ran = run_suite(SUITE, *args)
    assert ran.statuses() == {key: status for key, status in STATUSES.items() if key[0] in expected}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--lf", ["test_fails"]),
        pytest.param("--ff", ["test_fails", "test_one"], marks=pytest.mark.slow),
        pytest.param("--nf", ["test_one", "test_fails"], marks=pytest.mark.slow),
        pytest.param("--sw", ["test_fails"], marks=pytest.mark.slow),
    ],
)
def test_last_failed_selects_failed_energy_tests(
    run_suite: RunSuite, option: str, expected: list[str]
) -> None:
    failing = ONE + "def test_fails(energy):\n    energy(time.sleep, 0.05)\n    assert False\n"
    run_suite(failing, "--sw") if option == "--sw" else run_suite(failing)
    ran = run_suite(failing, option)
    assert [test for test, _ in ran.records()] == expected


@pytest.mark.parametrize(
    "args",
    [
        ("--co",),
        pytest.param(("--co", "-q"), marks=pytest.mark.slow),
        ("--setup-plan",),
        pytest.param(("--fixtures",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_collecting_measures_nothing(run_suite: RunSuite, args: tuple[str, ...]) -> None:
    ran = run_suite(SUITE, *args, "-Werror")
    assert ran.result.ret == 0
    assert not list(ran.path.glob("energy*"))
    assert "ten-watts" not in ran.result.stdout.str()


def test_setup_only_measures_nothing(run_suite: RunSuite) -> None:
    ran = run_suite(SUITE, "--setup-only")
    ran.result.assert_outcomes()
    ran.result.stdout.fnmatch_lines(["*SETUP    F energy (fixtures used: *"])
    assert ran.result.ret == 0
    assert not list(ran.path.glob("energy*"))


@pytest.mark.parametrize(
    "args",
    [
        ("-s",),
        *(
            pytest.param((option,), marks=pytest.mark.slow)
            for option in ("--setup-show", "--capture=sys", "--capture=tee-sys", "-vv", "-qq", "--tb=native")
        ),
    ],
    ids=str,
)
def test_display_options_change_no_record(run_suite: RunSuite, args: tuple[str, ...]) -> None:
    ran = run_suite(SUITE, *args)
    assert ran.result.ret == pytest.ExitCode.TESTS_FAILED
    assert ran.statuses() == STATUSES


def test_options_from_the_environment_apply(run_suite: RunSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = run_suite(ONE)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--energy-report=other.json --energy-rounds=3")
    ran = run_suite(ONE)
    # The command line takes precedence.
    assert len(ran.records()["test_one", 1]["rounds"]) == 3
    assert not (quick.path / "other.json").exists()
