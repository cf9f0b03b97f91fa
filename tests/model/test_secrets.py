# SPDX-License-Identifier: Apache-2.0
"""Names of secrets, and commands without them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_llenergy.model.secrets import hide_secrets, is_secret, redact_secrets, redact_text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--api-key", "abc", "--port", "80"], "serve --api-key *** --port 80"),
        (["serve", "--hf-token=abc", "--api_keys=abc,def"], "serve --hf-token=*** --api_keys=***"),
        (["serve", "--ssl-keyfile-password", "abc"], "serve --ssl-keyfile-password ***"),
        (["serve", "--token", "--secret", "x"], "serve --token --secret ***"),
        (["env", "HF_TOKEN=abc", "OPENAI_API_KEY=abc", "serve"], "env HF_TOKEN=*** OPENAI_API_KEY=*** serve"),
        (["--command=serve --api-key abc --port 80"], "--command=serve --api-key *** --port 80"),
        (["sh", "-c", "TOKEN='a b' serve --Password 'a b'"], "sh -c TOKEN=*** serve --Password ***"),
        (["env", "PASSWORD=hunter two", "serve", "--api-key=a b"], "env PASSWORD=*** serve --api-key=***"),
        (
            ["--kv-transfer-config", '{"api_key": "a b", "Password":"x", "role": 1}'],
            '--kv-transfer-config {"api_key": ***, "Password":***, "role": 1}',
        ),
        (["/bin/env", "-i", "PASSWORD=a b", "A=1", "SECRET=a b"], "/bin/env -i PASSWORD=*** A=1 SECRET=***"),
        (["serve.py", "api_key=abc", '{"token":5,"n":1}'], 'serve.py api_key=*** {"token":***,"n":1}'),
        (["PASSWORD=a b", "serve"], "PASSWORD=*** serve"),
        (
            ["docker", "run", "-e", "HF_TOKEN=a b", "--env=HF_TOKEN=a b"],
            "docker run -e HF_TOKEN=*** --env=HF_TOKEN=***",
        ),
        (
            ["--command=env 'PASSWORD=a b' serve \"--api-key=a b\""],
            "--command=env PASSWORD=*** serve --api-key=***",
        ),
        (
            ["--json={'apiKey': ['a', 'b'], 'n': 1}", "--kv.api_key", "a"],
            "--json={'apiKey': ***, 'n': 1} --kv.api_key ***",
        ),
        (['serve --kv "{\\"api_key\\": \\"a b\\", \\"n\\": 1}"'], 'serve --kv \'{"api_key": ***, "n": 1}\''),
        (["--note=don't --api-key abc", "PASSWORD='a b"], "'--note=don t --api-key ***' PASSWORD=***"),
        # What decides the figures stays.
        (["sh", "-c", "TOKEN=abc serve --dtype x"], "sh -c TOKEN=*** serve --dtype x"),
        (["sh", "-c", "TOKEN='a b' serve --dtype x"], "sh -c TOKEN=*** serve --dtype x"),
        (
            ["bash", "-lc", "cd d && TOKEN=a\\ b serve --dtype x"],
            "bash -lc cd d && TOKEN=*** serve --dtype x",
        ),
        (["ssh", "host", "TOKEN=abc serve --dtype x"], "ssh host TOKEN=*** serve --dtype x"),
        (
            ["--command=sh -c 'API_KEY=abc exec serve --dtype x'", "--n=1"],
            "--command=sh -c 'API_KEY=*** exec serve --dtype x' --n=1",
        ),
        (["--command=HF_TOKEN=abc serve --dtype x"], "--command=HF_TOKEN=*** serve --dtype x"),
        (["sh", "-c", "TOKEN=abc;STEP=4;exec serve"], "sh -c TOKEN=***;STEP=4;exec serve"),
        (["sh", "-c", "TOKEN=abc&&A=x&&serve"], "sh -c TOKEN=***&&A=x&&serve"),
        (["--command=sh -c 'TOKEN=abc|A=x'", "(TOKEN=a b)"], "--command=sh -c 'TOKEN=***|A=x' (TOKEN=*** b)"),
        (["x", "--set", "a.token=abc,a.dtype=x"], "x --set a.token=***,a.dtype=x"),
        (["x", "--set", "token='a,b=c',dtype=x"], "x --set token=***,dtype=x"),
        (["srun", "--export=ALL,HF_TOKEN=abc,DTYPE=x"], "srun --export=ALL,HF_TOKEN=***,DTYPE=x"),
        (["serve", "--enable-api-key", "--dtype", "x"], "serve --enable-api-key --dtype x"),
        (["serve", "--password=a;b&c"], "serve --password=***"),
        # Lists, arguments of functions, URLs and headers.
        (["pretrained=g,token=abc,dtype=x"], "pretrained=g,token=***,dtype=x"),
        (["python", "-c", "serve(token='a b', n=1)"], "python -c serve(token=***, n=1)"),
        (["env", "PROXY=https://user:abc@h/x", "A=1", "serve"], "env PROXY=https://***@h/x A=1 serve"),
        (["--command=env PROXY=https://user:abc@h/x A=1"], "--command=env PROXY=https://***@h/x A=1"),
        (["-H", "X-Api-Key: abc"], "-H X-Api-Key: ***"),
        (
            ["--command=curl -H 'Authorization: Bearer abc' h"],
            "--command=curl -H 'Authorization: Bearer ***' h",
        ),
        *(
            ([word], word)
            for word in (
                "serve --max-num-batched-tokens 64 --num-speculative-tokens=3",
                "serve --tokenizer t --skip-tokenizer-init",
                "--token-limit 5",
                "--ssl-keyfile key.pem",
                '{"eos_token": "</s>", "key": 1, "max_tokens": 5}',
                "test_x.py::test_it[key=1-token=2]",
                "test_x.py::test_it[n=1-hf_token=2]",
                "-k=monkey",
            )
        ),
    ],
)
def test_values_of_secrets_are_redacted(words: list[str], shown: str) -> None:
    assert " ".join(redact_secrets(words)) == shown


def test_a_command_in_a_message_keeps_what_follows_an_assignment() -> None:
    assert redact_text("HF_TOKEN=abc serve --dtype x") == "HF_TOKEN=*** serve --dtype x"
    assert redact_text("PASSWORD='a b' serve --dtype x") == "PASSWORD=*** serve --dtype x"


SECRETS = """
token hf_token HF_TOKEN use_auth_token auth_token access_token accessToken session_token TOKEN MY_TOKEN
api_key api-key apiKey api_keys admin_api_key WANDB_API_KEY secret_key AWS_SECRET_ACCESS_KEY OPENAI_KEY KEY
password PASSWORD ssl_keyfile_password PGPASSWORD passphrase client_secret engine.token
Authorization headers.Authorization credentials auth github_pat GH_PAT ngc_key openaiApiKey db_pass MYSQL_PWD
"""

PLAIN = """
eos_token image_token image_start_token use_sep_token num_experts_per_token tokens max_tokens max_new_tokens
tokenizer token_limit pad_token_id key keys cache_key relative_key num_key_value_heads ssl_keyfile monkey
MONKEY PWD OLDPWD compat single_pass num_forward_pass author
"""


@pytest.mark.parametrize(("names", "secret"), [(SECRETS, True), (PLAIN, False)])
def test_one_definition_decides_what_a_secret_is_called(names: str, secret: bool) -> None:
    for name in names.split():
        assert is_secret(name) is secret, name
        assert hide_secrets({name: "x"}) == {name: "***" if secret else "x"}
        assert (
            redact_text(f'{{"{name}": "x"}}')
            == f'{{"{name}": {"***" if secret else chr(34) + "x" + chr(34)}}}'
        )
        assert redact_secrets(["serve", f"--{name}", "x"]) == ["serve", f"--{name}", "***" if secret else "x"]


class Pair(NamedTuple):
    """A tuple that is not made of an iterable."""

    first: object
    second: object


def test_values_without_secrets_stay_the_same_objects() -> None:
    for value in ({"a": [{"n": 1}, "b"], 2: None}, ("a", "b"), "it's \"a\" \\ 'text", 5, [["--n", 1]]):
        assert hide_secrets(value) is value
    assert hide_secrets(("serve", "--api-key", "abc")) == ("serve", "--api-key", "***")
    assert hide_secrets(Pair("--api-key", "abc")) == ("--api-key", "***")
    assert hide_secrets(Pair({"token": 1}, 2)) == ({"token": "***"}, 2)
    assert hide_secrets([{"a": ["HF_TOKEN=abc serve"]}, 1]) == [{"a": ["HF_TOKEN=*** serve"]}, 1]


@pytest.mark.parametrize("opening", ["[", "{"])
def test_a_list_that_is_not_closed_is_hidden_to_the_end(opening: str) -> None:
    """The time grows with the length alone: this text took a minute."""
    assert redact_text(f'x "token": {opening} ' + f'"token": {opening} ' * 20_000) == 'x "token": ***'
