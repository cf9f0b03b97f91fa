# SPDX-License-Identifier: Apache-2.0
"""Options that are passed on to transformers, and those with one meaning in every backend."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.base import is_installed
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.engine_options import (
    COMMON_OPTIONS,
    CommonOptions,
    check_engine_options,
    combine_options,
)
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.registry import BUILTIN
from pytest_llenergy.errors import BackendError, ModelError

from .adapters import save_adapter
from .loaded_ranks import PROMPTS, TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]


def refusal(**options: Any) -> str:
    """Return the error of loading the tiny model in transformers with these options."""
    with pytest.raises(BackendError) as caught:
        LoadedRanks(**options)
    message = str(caught.value.args[0])
    assert "\n" not in message
    return message


def test_common_options_have_types() -> None:
    assert set(CommonOptions.__struct_fields__) == set(COMMON_OPTIONS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": 32}, "dtype is 32, needs a name"),
        ({"chunked_prefill": 0}, "chunked_prefill is 0, needs True, False or the tokens of a step"),
        ({"prefix_cache": "yes"}, "prefix_cache is 'yes', needs True or False"),
        (
            {"speculative": {"num_tokens": 2, "modle": "m"}},
            "speculative is {'num_tokens': 2, 'modle': 'm'}, needs a dict with num_tokens, and model or "
            "method; max_ngram for prompt_lookup (Object contains unknown field `modle` at speculative)",
        ),
    ],
)
def test_values_of_another_type_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        CommonOptions.parse("vllm", given)
    assert str(caught.value).startswith(f"vllm: {message}")


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(BackendError, match="x: compile sets enforce_eager as well; give one of them"):
        combine_options("x", {"compile": {"enforce_eager": True}}, {"enforce_eager": False})


def test_an_option_that_contradicts_a_common_one_is_refused() -> None:
    with pytest.raises(BackendError, match="x: compile sets level as well; give one of them"):
        combine_options("x", {"compile": {"eager": True}}, {"level": 2}, decides={"compile": ("level",)})


@pytest.mark.parametrize("spec", BUILTIN, ids=lambda spec: spec.name)
def test_common_options_that_are_not_declared_are_not_passed_on(spec: Any) -> None:
    row = spec.capabilities
    refused = set(row.unknown_options(COMMON_OPTIONS))
    assert refused == set(COMMON_OPTIONS) - set(row.options)


def test_attributes_of_the_configuration_and_of_generation_are_passed_on() -> None:
    with LoadedRanks(dtype="float32") as ranks:
        plain, _ = ranks.generate(PROMPTS, max_new_tokens=16)
    with LoadedRanks(dtype="float32", no_repeat_ngram_size=1, rms_norm_eps=1e-5) as ranks:
        assert ranks.info.options["no_repeat_ngram_size"] == "1"
        generation, _ = ranks.generate(PROMPTS[:1], max_new_tokens=16)
    (ids,) = generation.token_ids
    assert len(set(ids)) == len(ids) == 16
    assert len(set(plain.token_ids[0])) < 16, "without the option tokens repeat"


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    message = refusal(no_repeat_ngram=2)
    assert message.startswith("transformers: transformers 5.")
    # Part of a docstring.
    assert "has no option kwargs" in refusal(kwargs=1)
    assert "has no option no_repeat_ngram; did you mean no_repeat_ngram_size?" in message
    # Names that the library does not have, one common to all backends and one of this backend.
    assert "did you mean chunked_prefill?" in refusal(chunkd_prefil=64)
    assert "did you mean max_batch_tokens?" in refusal(max_batch_token=64)


def test_the_names_that_are_listed_include_those_of_the_backend() -> None:
    with pytest.raises(BackendError, match=r"x: x 1 has no option zzz; it takes: a, b$"):
        check_engine_options("x", {"zzz": 1}, ["b"], declared=["a"], where="x 1")


def test_many_names_are_counted_instead_of_listed() -> None:
    many = [f"option_{number}" for number in range(50)]
    with pytest.raises(BackendError, match=r"no option zzz; it takes: a, and 50 others that it lists$"):
        check_engine_options("x", {"zzz": 1}, many, declared=["a"], where="x 1")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"b": [{"token_limit": 5}, {"api_key": "x"}]}, "{'b': [{'token_limit': 5}, {'api_key': '***'}]}"),
        ({"env": {"HF_TOKEN": "x"}, "eos_token": "y"}, "{'env': {'HF_TOKEN': '***'}, 'eos_token': 'y'}"),
        ('{"access_token": "x"}', '{"access_token": "***"}'),
    ],
)
def test_a_secret_in_the_value_of_an_option_is_refused(value: object, shown: str) -> None:
    with pytest.raises(BackendError) as caught:
        check_engine_options("x", {"a": value}, ["a"], declared=["a"], where="x 1")
    assert str(caught.value) == f"x: the load option a holds a secret, and options are recorded: {shown}"


@pytest.mark.parametrize("name", ["HF_TOKEN", "auth_token", "access_token", "wandb_api_key", "password"])
def test_a_secret_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(
        BackendError, match=rf"^x: the load option {name} is not available: it is a secret, and"
    ):
        check_engine_options("x", {name: "y"}, [name], declared=["a"], where="x 1")
    with pytest.raises(BackendError, match=r"it takes: a, b$"):
        check_engine_options("x", {"zzz": 1}, ["b", name], declared=["a"], where="x 1")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attn_implementation": "eager"}, "use the load option attention"),
        ({"device_map": "auto"}, "the devices are those of the test; use the marks gpus and parallel"),
        ({"num_beams": 2}, "it is an argument of generate"),
        ({"prompt_lookup_num_tokens": 2}, "it is part of the load option speculative"),
        ({"architectures": ["X"]}, "it describes the model, and changes nothing"),
        ({"id2label": {}}, "it describes the model, and changes nothing"),
        ({"presence_penalty": 1}, "it is an argument of generate"),
        *(
            ({name: "x"}, "it is a secret, and options are recorded; set the environment variable HF_TOKEN")
            for name in ("token", "use_auth_token", "hf_token")
        ),
        ({"return_dict": False}, "outputs are counted as one sequence of tokens per prompt"),
        ({"num_return_sequences": 2}, "outputs are counted as one sequence of tokens per prompt"),
    ],
)
def test_what_the_adapter_sets_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    (name,) = given
    assert refusal(**given) == f"transformers: the load option {name} is not available: {reason}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("experts_implementation", "none-such"), ("hidden_size", 3), ("num_hidden_layers", "many")],
)
def test_a_value_with_which_a_model_cannot_be_loaded_is_one_line(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"transformers cannot load random:llama-tiny with {name}={value!r}: ")


@pytest.mark.parametrize(
    "options", [{"num_hidden_layers": 9}, {"intermediate_size": 100, "ignore_mismatched_sizes": True}]
)
def test_weights_that_are_not_in_the_file_are_not_measured(options: dict[str, Any]) -> None:
    """transformers would make random ones."""
    assert re.fullmatch(
        r"transformers cannot load random:llama-tiny with .*: its files lack weights, or have them in "
        r"another shape: (63|6) would be random, such as model\.layers\.\d\.\S+",
        refusal(**options),
    )


def test_a_model_whose_files_lack_weights_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(pretrained_path(resolve_model(TINY)), whole)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    lacking = r"model whole: ValueError: its files lack weights[^\n]*: 9 would be random[^\n]*$"
    with pytest.raises(ModelError, match=f"^{lacking}"):
        LoadedRanks(model=str(whole))
    with pytest.raises(ModelError, match=f"^speculative: {lacking}"):
        LoadedRanks(speculative={"model": str(whole), "num_tokens": 4})


def test_options_that_continuous_batching_would_ignore_are_refused() -> None:
    assert refusal(batching="continuous", no_repeat_ngram_size=2) == (
        "transformers: batching='continuous' does not apply no_repeat_ngram_size=2; leave one out"
    )


def test_a_value_with_which_no_job_can_be_prepared_is_one_line() -> None:
    with (
        LoadedRanks(watermarking_config={"a": 1}) as ranks,
        pytest.raises(BackendError, match=r"^transformers cannot generate with watermarking_config=[^\n]*$"),
    ):
        ranks.generate(PROMPTS)


def test_a_value_with_which_transformers_cannot_generate_is_one_line() -> None:
    with (
        LoadedRanks(no_repeat_ngram_size="many") as ranks,
        pytest.raises(
            BackendError, match="transformers cannot generate with no_repeat_ngram_size='many': '>'"
        ),
    ):
        ranks.generate(PROMPTS)


def test_a_prompt_that_is_prefilled_in_chunks_gives_the_same_tokens() -> None:
    with LoadedRanks(dtype="float32") as ranks:
        expected, _ = ranks.generate(["abcdefghij" * 4])
    with LoadedRanks(dtype="float32", chunked_prefill=16) as ranks:
        assert ranks.info.options["chunked_prefill"] == "16"
        assert ranks.generate(["abcdefghij" * 4])[0].token_ids == expected.token_ids


@pytest.mark.skipif(not is_installed("peft"), reason="needs peft; pip install 'pytest-llenergy[lora]'")
def test_an_adapter_changes_the_tokens_and_is_counted(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter")
    with LoadedRanks(dtype="float32") as ranks:
        plain, _ = ranks.generate(PROMPTS)
    with LoadedRanks(dtype="float32", lora=str(tmp_path / "adapter")) as ranks:
        adapted, _ = ranks.generate(PROMPTS)
        assert int(ranks.info.options["lora_parameters"] or 0) > 0
    assert adapted.token_ids != plain.token_ids


@pytest.mark.skipif(is_installed("peft"), reason="peft is installed")
def test_without_peft_an_adapter_is_refused_with_the_install_command(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter")
    assert refusal(lora=str(tmp_path / "adapter")) == (
        "transformers: lora needs peft, which is not installed; pip install 'pytest-llenergy[lora]'"
    )


def test_the_handle_passes_options_of_the_library_and_refuses_others_early(
    quick: pytest.Pytester, read_report: Read
) -> None:
    quick.makepyfile(
        """
        import pytest
        from pytest_llenergy.errors import BackendError

        @pytest.mark.backend_options(attention="eager", no_repeat_ngram_size=2)
        def test_passes(energy, backend):
            with pytest.raises(BackendError, match="unknown load option kv_cache_dtype"):
                backend.with_options(kv_cache_dtype="int8")
            energy(backend.generate, ["abc"], max_new_tokens=4, ignore_eos=True)
        """
    )
    result = quick.runpytest(
        "--energy-report", "--energy-model=random:llama-tiny", "--energy-backend=transformers"
    )
    result.assert_outcomes(passed=1)
    options = read_report()["records"][0]["backend"]["options"]
    assert (options["attention"], options["no_repeat_ngram_size"]) == ("eager", "2")
