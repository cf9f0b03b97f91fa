# SPDX-License-Identifier: Apache-2.0
"""Names of credentials, and keys in what a server prints."""

from __future__ import annotations

import pytest

from pytest_llenergy.backends.secrets import find_secret, hide_keys, is_secret, remember_keys


def test_credentials_are_told_from_the_tokens_of_models() -> None:
    credentials = "token HF_TOKEN hf_token auth_token access-token wandb_api_key OPENAI_API_KEY secret_key"
    assert [each for each in f"{credentials} db.password apikey".split() if not is_secret(each)] == []
    others = "eos_token pad_token image_token max_tokens token_limit key sort_key tokenizer keys"
    assert [each for each in others.split() if is_secret(each)] == []


def test_members_of_a_value_are_searched() -> None:
    assert find_secret({"a": [{"b": 1}, ({"HF_TOKEN": "x"},)]}) == "HF_TOKEN"
    assert find_secret({"a": ["token"], "eos_token": "x"}) is None


def test_keys_of_the_environment_and_of_a_command_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-12345678")
    monkeypatch.setenv("HF_TOKEN", "short")
    remember_keys(
        ["env", "VLLM_API_KEY=third-key", "serve", "--api-key=first-key", "--api-key", "second-key"]
    )
    remember_keys(["sh", "-c", "serve --token='fourth-key' --eos-token word-after"])
    text = "keys sk-12345678 first-key second-key third-key fourth-key, a short one, word-after"
    assert hide_keys(text) == "keys *** *** *** *** ***, a short one, word-after"
