# SPDX-License-Identifier: Apache-2.0
"""Embeddings: each text's vector is that of the text alone; tokens count as input only."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Embedding, EmbeddingParams
from pytest_llenergy.errors import BackendError

from .loaded_ranks import LoadedRanks, counts

Read = Callable[..., dict[str, Any]]

BERT = "random:bert-tiny"
TEXTS = ["abc", "hello world", "x"]


def embed_by_hand(texts: list[str]) -> dict[str, list[list[float]]]:
    """Embed one text at a time with plain transformers, without mask and padding."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = pretrained_path(resolve_model("random:bert-tiny"))
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    actual: dict[str, list[list[float]]] = {"mean": [], "cls": [], "last": []}
    for text in texts:
        with torch.inference_mode():
            (hidden,) = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
        actual["mean"].append(hidden.mean(dim=0).tolist())
        actual["cls"].append(hidden[0].tolist())
        actual["last"].append(hidden[-1].tolist())
    return actual


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
def by_hand(bert: LoadedRanks) -> dict[str, list[list[float]]]:
    found: list[dict[str, list[list[float]]]] = bert.call(embed_by_hand, TEXTS)
    return found[0]


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


def test_input_tokens_are_counted_and_there_are_no_output_tokens(bert: LoadedRanks) -> None:
    embedding = embed(bert, TEXTS)
    assert counts(embedding) == [(3, 0), (11, 0), (1, 0)]
    assert {(each.first_token_ns, each.last_token_ns, each.token_ns) for each in embedding.requests} == {
        (None, None, ())
    }


def test_a_generating_model_embeds_with_its_base_model() -> None:
    with LoadedRanks(dtype="float32") as llama:
        batch = embed(llama, TEXTS, pooling="last")
        alone = [embed(llama, [text], pooling="last").vectors[0] for text in TEXTS]
        # The same ranks can still generate.
        assert llama.generate(["abc"])[0].output_tokens == 8
    assert close(batch.vectors, alone)
    assert batch.dimension == 256


def test_a_text_that_is_too_long_is_refused() -> None:
    message = "transformers: a text has 513 tokens and the model takes 512"
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
