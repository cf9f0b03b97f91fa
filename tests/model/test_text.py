# SPDX-License-Identifier: Apache-2.0
"""Secrets in commands."""

from __future__ import annotations

import pytest

from pytest_llenergy.model.text import redact_secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--api-key", "abc", "--port", "80"], "serve --api-key *** --port 80"),
        (["serve", "--hf-token=abc", "--api_keys=abc,def"], "serve --hf-token=*** --api_keys=***"),
        (["serve", "--ssl-keyfile-password", "abc"], "serve --ssl-keyfile-password ***"),
        (["serve", "--token", "--secret", "x"], "serve --token *** x"),
        (["env", "HF_TOKEN=abc", "OPENAI_API_KEY=abc", "serve"], "env HF_TOKEN=*** OPENAI_API_KEY=*** serve"),
        (["--command=serve --api-key abc --port 80"], "--command=serve --api-key *** --port 80"),
        (["sh", "-c", "TOKEN='a b' serve --Password 'a b'"], "sh -c TOKEN=*** serve --Password ***"),
        (["env", "PASSWORD=hunter two", "serve", "--api-key=a b"], "env PASSWORD=*** serve --api-key=***"),
        (
            ["--kv-transfer-config", '{"api_key": "a b", "Password":"x", "role": 1}'],
            '--kv-transfer-config {"api_key": ***, "Password":***, "role": 1}',
        ),
        # What decides the figures stays.
        *(
            ([word], word)
            for word in (
                "serve --max-num-batched-tokens 64 --num-speculative-tokens=3",
                "serve --tokenizer t --skip-tokenizer-init",
                "--token-limit 5",
                "--ssl-keyfile key.pem",
                '{"eos_token": "</s>", "key": 1, "max_tokens": 5}',
                "test_x.py::test_it[key=1-token=2]",
                "-k=monkey",
            )
        ),
    ],
)
def test_values_of_secrets_are_redacted(words: list[str], shown: str) -> None:
    assert " ".join(redact_secrets(words)) == shown
