# SPDX-License-Identifier: Apache-2.0
"""The fixtures backend and model: missing backends, misuse, registration, and pytest without torch."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.registry import BUILTIN
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError

Read = Callable[..., dict[str, Any]]

ASKS_FOR_BACKEND = """
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=2)
"""


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real environment with everything but torch and the backends' libraries."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory / "venv", symlinks=True)
    packages = directory / "packages"
    packages.mkdir()
    hidden = ("torch", "transformers", "openvino", "accelerate", "onnxruntime", "xllamacpp")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(hidden) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
    import pytest_llenergy

    (site / "shared.pth").write_text(f"{packages}\n{Path(pytest_llenergy.__file__).parent.parent}\n")
    return directory / "venv" / "bin" / "python"


def test_without_torch_tests_are_skipped_with_the_reason_and_the_pip_line(
    quick: pytest.Pytester, read_report: Read, python_without_torch: Path
) -> None:
    quick.makepyfile(ASKS_FOR_BACKEND + "def test_plain(energy):\n    energy(sum, [1])\n")
    done = subprocess.run(
        [python_without_torch, "-m", "pytest", "--energy-report", "-v", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"1 passed, {sum(spec.needs is None for spec in BUILTIN)} skipped" in done.stdout
    reason = (
        "transformers is not available: no module torch, transformers; "
        "pip install 'pytest-llenergy[transformers]'"
    )
    assert f": {reason}" in " ".join(done.stdout.split())
    skipped = [record for record in read_report()["records"] if record["status"] == "skipped"]
    assert skipped[0]["reason"] == reason
    assert "pip install 'pytest-llenergy[openvino]'" in skipped[1]["reason"]


class TestGenerateArguments:
    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"top_p": 1.5}, "generate: top_p: Expected `float` <= 1.0"),
            ({"max_tokens": 5}, "generate: unknown argument max_tokens; known: max_new_tokens, do_sample"),
            ({"max_new_tokens": "5"}, "generate: max_new_tokens: Expected `int`, got `str`"),
            ({"seed": 2**31}, "generate: seed: Expected `int` <= 2147483647"),
            ({"cache": "paged"}, "generate: cache: Invalid enum value 'paged'"),
        ],
    )
    def test_invalid_arguments_are_refused(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(BackendError) as caught:
            GenerationParams.parse(params)
        assert message in str(caught.value)

    def test_misuse_in_a_test_gives_a_one_line_error(self, quick: pytest.Pytester) -> None:
        quick.makepyfile(
            """
            import pytest
            def test_text(backend):
                backend.generate("one prompt")
            def test_nothing(backend):
                backend.generate([])
            def test_option(backend):
                backend.with_options(dtyp="float32").generate(["a"])
            @pytest.mark.gpus(2, fallback="cpu")
            def test_too_few(backend):
                backend.generate(["a"])
            """
        )
        result = quick.runpytest("--energy-model=random:llama-tiny", "--energy-backend=transformers")
        result.assert_outcomes(failed=4)
        result.stdout.fnmatch_lines(
            [
                "BackendError: generate: prompts must be *, or of requests, found 'one prompt'",
                "BackendError: generate: prompts must be a list of one or more *, or of requests, found []",
                "BackendError: * cannot load it with dtyp='float32' (TypeError: * 'dtyp')",
                "BackendError: generate: 1 prompts for 2 data-parallel ranks; a rank would have no work",
            ]
        )


def test_a_user_fixture_named_backend_is_not_parametrised(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.fixture\ndef backend(): return 'mine'\n"
        "def test_it(backend): assert backend == 'mine'\n"
    )
    pytester.runpytest().assert_outcomes(passed=1)
