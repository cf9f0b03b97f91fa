# SPDX-License-Identifier: Apache-2.0
"""Model names, errors of models that cannot be loaded, and the context length read from a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.errors import ModelError

ASKS_FOR_BACKEND = """
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=2)
"""


def run_with_models(quick: pytest.Pytester, *models: str, backend: str = "transformers") -> list[str]:
    """Return the error of each of these models, in one run."""
    fixture = "import pytest\n@pytest.fixture\ndef energy_model(): return "
    sources = {f"test_{n}": f"{fixture}{model!r}\n{ASKS_FOR_BACKEND}" for n, model in enumerate(models)}
    for file in quick.path.glob("test_*.py"):
        file.unlink()
    quick.makepyfile(**sources)
    result = quick.runpytest(f"--energy-backend={backend}")
    result.assert_outcomes(failed=len(models))
    return [line for line in result.stdout.lines if line.startswith("ModelError: ")]


class Hub(BaseHTTPRequestHandler):
    """Answers like the hub for a gated and for an unknown model."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        message = "Access to model is restricted." if gated else "Repository not found"
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Log nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line_that_says_what_to_do(
    quick: pytest.Pytester, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(resolve_model(None).location).read_bytes()[:1_000_000])
    gated, missing, damaged = run_with_models(quick, "owner/gated-model", "owner/missing-model", str(broken))
    assert gated.startswith(
        "ModelError: model owner/gated-model: transformers cannot load it (OSError: You are"
    )
    assert missing.startswith("ModelError: model owner/missing-model: transformers cannot load it (OSError: ")
    assert damaged.startswith("ModelError: model broken.gguf: transformers cannot load it (")
    (damaged,) = run_with_models(quick, str(broken), backend="openvino")
    assert damaged.startswith("ModelError: model broken.gguf: a damaged GGUF file (")


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
