# SPDX-License-Identifier: Apache-2.0
"""Model names, errors of models that cannot be loaded, and the context length read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.errors import ModelError

ASKS_FOR_BACKEND = """
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=2)
"""


@pytest.mark.parametrize(
    ("backend", "message"),
    [("transformers", "transformers cannot load it ("), ("openvino", "a damaged GGUF file (")],
)
@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line(
    quick: pytest.Pytester, tmp_path: Path, backend: str, message: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(resolve_model(None).location).read_bytes()[:1_000_000])
    quick.makepyfile(ASKS_FOR_BACKEND)
    result = quick.runpytest(f"--energy-backend={backend}", f"--energy-model={broken}")
    result.assert_outcomes(failed=1)
    (line,) = (line for line in result.stdout.lines if line.startswith("ModelError: "))
    assert line.startswith(f"ModelError: model broken.gguf: {message}")


class TestModelNames:
    def test_the_four_kinds_of_model_names_are_parsed(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        (tmp_path / "config.json").touch()
        assert resolve_model("owner/name") == ModelSource("hub", "owner/name")
        assert resolve_model(str(tmp_path)) == ModelSource("directory", str(tmp_path))
        assert resolve_model(str(tmp_path / "m.gguf")) == ModelSource("gguf", str(tmp_path / "m.gguf"))
        assert resolve_model("random:llama-tiny") == ModelSource("random", "llama-tiny")

    def test_the_default_model_is_the_file_of_the_installed_package(self) -> None:
        source = resolve_model(None)
        assert source.kind == "gguf"
        assert source.label == "SmolLM2-135M-Instruct.Q4_1.gguf"

    def test_without_the_package_the_default_model_is_on_the_hub(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
        assert resolve_model("") == ModelSource("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")

    @pytest.mark.parametrize("spec", ["./nowhere", "~/nowhere", "nowhere.gguf", "a/b/c", "two words"])
    def test_a_name_that_fits_no_kind_is_refused(self, spec: str) -> None:
        with pytest.raises(ModelError, match="no such file or directory, and not a hub id"):
            resolve_model(spec)
