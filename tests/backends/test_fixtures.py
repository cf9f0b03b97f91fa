# SPDX-License-Identifier: Apache-2.0
"""The fixtures backend and model: missing backends, misuse, registration, and pytest without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError

Read = Callable[..., dict[str, Any]]

ASKS_FOR_BACKEND = """
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=2)
"""


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
