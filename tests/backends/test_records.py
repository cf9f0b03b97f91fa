# SPDX-License-Identifier: Apache-2.0
"""From test files to energy.json: one run of transformers with every kind of work, and its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Read = Callable[..., dict[str, Any]]

OTHERS = """
import pytest
from pytest_llenergy.backends.traffic import synthetic

REQUESTS = synthetic(count=3, input_tokens=20, output_tokens=2)

@pytest.mark.backend_options(attn_implementation="eager", no_repeat_ngram_size=2)
def test_options(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=4, ignore_eos=True)

def test_requests(energy, backend):
    energy(backend.generate, REQUESTS, ignore_eos=True)

@pytest.mark.gpus(2, fallback="cpu")
@pytest.mark.parallel(tensor=2)
def test_sharded(energy, backend):
    generate = backend.with_options(dtype="float32").generate
    run = energy(generate, ["abc", "hello"], max_new_tokens=8, ignore_eos=True)
    assert [len(ids) for ids in run.result.token_ids] == [8, 8]
"""


def records_of(quick: pytest.Pytester, read_report: Read, **outcome: int) -> dict[str, dict[str, Any]]:
    """Run the files, and return the records of transformers by the part of their names after ``test_``."""
    # Forks import torch and transformers once for all ranks.
    options = ["--energy-start-method=forkserver", "--energy-model=random:llama-tiny", "--energy-report"]
    result = quick.runpytest_subprocess(
        *options, "--energy-backend=transformers,openvino", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(**outcome)
    records = read_report()["records"]
    reasons = {each["reason"] for each in records if each["params"].get("backend") == "openvino"}
    assert any("openvino reads .gguf files" in reason for reason in reasons)
    return {
        each["id"].partition("::")[2].partition("[")[0].removeprefix("test_"): each
        for each in records
        if each["params"].get("backend") == "transformers"
    }


@pytest.mark.slow
def test_every_kind_of_work_is_recorded(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(test_others=OTHERS)
    found = records_of(quick, read_report, passed=3, skipped=3)
    check_shards(found["sharded"])
    options_of = found["options"]["backend"]["options"]
    assert (options_of["attn_implementation"], options_of["no_repeat_ngram_size"]) == ("eager", "2")
    requests = found["requests"]
    assert requests["rounds"][0]["tokens"] == {"input": 60, "output": 6}
    generation = requests["backend"]["generation"]
    assert generation["requests"] == "synthetic(count=3, input_tokens=20, output_tokens=2, seed=0)"
    assert generation["max_new_tokens"] == 2


def check_shards(record: dict[str, Any]) -> None:
    """Degree, processes, and tokens counted once."""
    assert record["parallel"]["tensor"] == 2
    assert len({rank["pid"] for rank in record["ranks"]}) == len(record["ranks"]) == 2
    for round_ in record["rounds"]:
        assert round_["tokens"] == {"input": 8 * round_["iterations"], "output": 16 * round_["iterations"]}
        assert round_["requests"] == 2 * round_["iterations"]
    assert record["backend"]["options"]["parameters_of_rank"] < 1_000_000
