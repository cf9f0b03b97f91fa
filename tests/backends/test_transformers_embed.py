# SPDX-License-Identifier: Apache-2.0
"""Embeddings: each text's vector is that of the text alone; tokens count as input only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Embedding, EmbeddingParams
from pytest_llenergy.backends.transformers.options import LoadOptions
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Parallel

from .loaded_ranks import LoadedRanks, counts

Read = Callable[..., dict[str, Any]]

BERT = "random:bert-tiny"
TEXTS = ["abc", "hello world", "x"]

#: Embeds one text at a time with plain transformers, without mask and padding.
BY_HAND = """
import json
import sys
import torch
from transformers import AutoModel, AutoTokenizer
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
path = pretrained_path(resolve_model("random:bert-tiny"))
model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
actual = {"mean": [], "cls": [], "last": []}
for text in json.loads(sys.argv[1]):
    with torch.inference_mode():
        (hidden,) = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
    actual["mean"].append(hidden.mean(dim=0).tolist())
    actual["cls"].append(hidden[0].tolist())
    actual["last"].append(hidden[-1].tolist())
print(json.dumps(actual))
"""


@pytest.fixture(scope="module")
def bert() -> Iterator[LoadedRanks]:
    with LoadedRanks(model=BERT, dtype="float32") as ranks:
        yield ranks


def embed(ranks: LoadedRanks, texts: list[str], **params: Any) -> Embedding:
    """Return a vector per text, by pooling."""
    workload = ranks.prepare(texts, EmbeddingParams.parse(params))
    workload.run_round()
    return Embedding.merge(workload.results())


@pytest.fixture(scope="module")
def by_hand() -> dict[str, list[list[float]]]:
    done = subprocess.run(
        [sys.executable, "-c", BY_HAND, json.dumps(TEXTS)], capture_output=True, text=True, check=True
    )
    actual: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return actual


def close(vectors: list[list[float]], others: list[list[float]]) -> bool:
    return all(one == pytest.approx(other, abs=1e-5) for one, other in zip(vectors, others, strict=True))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_does_not_change_a_vector(
    bert: LoadedRanks, by_hand: dict[str, list[list[float]]], pooling: str
) -> None:
    embedding = embed(bert, TEXTS, pooling=pooling, normalize=False)
    assert close(embedding.vectors, by_hand[pooling])
    assert not close(embedding.vectors[:1], embedding.vectors[1:2]), "equal vectors would prove nothing"
    assert embedding.dimension == 128


def test_the_poolings_differ(by_hand: dict[str, list[list[float]]]) -> None:
    assert not close(by_hand["mean"], by_hand["cls"])
    assert not close(by_hand["last"], by_hand["cls"])


def test_vectors_are_normalised_by_default(bert: LoadedRanks) -> None:
    unit, as_they_are = embed(bert, TEXTS), embed(bert, TEXTS, normalize=False)
    assert [sum(x * x for x in vector) for vector in unit.vectors] == pytest.approx([1.0] * 3)
    assert min(sum(x * x for x in vector) for vector in as_they_are.vectors) > 2


def test_input_tokens_are_counted_and_there_are_no_output_tokens(bert: LoadedRanks) -> None:
    embedding = embed(bert, TEXTS)
    assert counts(embedding) == [(3, 0), (11, 0), (1, 0)]
    assert {(each.first_token_ns, each.last_token_ns, each.token_ns) for each in embedding.requests} == {
        (None, None, ())
    }


def test_two_ranks_split_the_texts(bert: LoadedRanks) -> None:
    with LoadedRanks(model=BERT, degrees=Parallel(data=2), dtype="float32") as pair:
        both = embed(pair, TEXTS)
    assert close(both.vectors, embed(bert, TEXTS).vectors)
    assert [each.input_tokens for each in both.requests] == [3, 11, 1]


def test_a_generating_model_embeds_with_its_base_model() -> None:
    with LoadedRanks(dtype="float32") as llama:
        batch = embed(llama, TEXTS, pooling="last")
        alone = [embed(llama, [text], pooling="last").vectors[0] for text in TEXTS]
        # The same ranks can still generate.
        assert llama.generate(["abc"])[0].output_tokens == 8
    assert close(batch.vectors, alone)
    assert batch.dimension == 256


def test_a_text_that_is_too_long_is_refused() -> None:
    message = "transformers: a text has 513 tokens and the model takes 512; shorten the text, texts are"
    with LoadedRanks(model=BERT, dtype="float32") as ranks:
        assert embed(ranks, ["a" * 512]).requests[0].input_tokens == 512
        with pytest.raises(BackendError, match=message):
            embed(ranks, ["a" * 513])


def test_an_encoder_needs_no_pooling_layer_in_its_files(tmp_path: Path) -> None:
    """Those of masked language models lack it, and embeddings do not use it."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(pretrained_path(resolve_model(BERT)), model)
    weights = load_file(model / "model.safetensors")
    rest = {name: value for name, value in weights.items() if "pooler." not in name}
    assert len(rest) < len(weights)
    save_file(rest, model / "model.safetensors", metadata={"format": "pt"})
    with LoadedRanks(model=str(model), dtype="float32") as ranks:
        assert ranks.info.model == "model"


def test_an_encoder_refuses_to_generate() -> None:
    """AutoModelForCausalLM would load it with a randomly initialised head."""
    message = "transformers: model random:bert-tiny cannot generate; use backend.embed"
    with LoadedRanks(model=BERT, dtype="float32") as ranks, pytest.raises(BackendError, match=message):
        ranks.generate(["abc"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"batching": "continuous"}, "batching"),
        ({"compile": True}, "compile"),
        ({"passed": ["no_repeat_ngram_size"]}, "no_repeat_ngram_size"),
        ({"speculative": {"method": "prompt_lookup", "num_tokens": 3}}, "speculative"),
    ],
)
def test_options_of_generation_are_refused_for_embedding(given: dict[str, Any], names: str) -> None:
    passed = given.pop("passed", ())
    with pytest.raises(BackendError) as caught:
        LoadOptions.parse(given, on_cpu=True).check_embedding(passed)
    assert str(caught.value) == (
        f"transformers: embed runs one padded batch; {names} applies to generate only; leave it out"
    )


def test_invalid_arguments_give_a_one_line_error() -> None:
    with pytest.raises(BackendError, match="embed: pooling is 'max', needs one of "):
        EmbeddingParams.parse({"pooling": "max"})
    with pytest.raises(
        BackendError, match="embed: unknown argument max_new_tokens; known: pooling, normalize"
    ):
        EmbeddingParams.parse({"max_new_tokens": 3})


def test_a_backend_without_embedding_skips(quick: pytest.Pytester) -> None:
    quick.makepyfile("def test_it(energy, backend): energy(backend.embed, ['abc'])")
    result = quick.runpytest("--energy-backend=openvino")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["BackendError: openvino does not embed; it does: generate"])


def test_the_record_has_energy_per_sequence_and_no_token_metrics(
    quick: pytest.Pytester, read_report: Read
) -> None:
    quick.makepyfile(
        """
        import pytest

        def test_it(energy, backend):
            run = energy(backend.embed, ["abc", "hello world"], pooling="cls")
            assert run.energy_per_request_j == pytest.approx(run.energy_j / 2)
            assert (len(run.result.vectors), run.result.dimension) == (2, 128)
        """
    )
    result = quick.runpytest(
        "--energy-report", "--energy-model=random:bert-tiny", "--energy-backend=transformers"
    )
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    backend, metrics = record["backend"], record["metrics"]
    assert backend["task"] == "embed"
    assert backend["generation"] == {"pooling": "cls", "normalize": True}
    assert metrics["energy_per_request_j"]["value"] > 0
    for name in ("energy_per_output_token_j", "output_tokens_per_s"):
        assert metrics[name]["value"] is None
        assert metrics[name]["reason"] == "no output tokens (count yours: energy(fn, output_tokens=...))"
    assert metrics["time_to_first_token_s"]["reason"] == "no token timestamps"
    assert metrics["prefill_energy_j"]["reason"] == "the workload has no phases"
    for round_ in record["rounds"]:
        assert round_["tokens"]["output"] == 0
        assert round_["tokens"]["input"] % 14 == 0
        assert round_["phases"] == []
