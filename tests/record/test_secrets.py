# SPDX-License-Identifier: Apache-2.0
"""Names of secrets, and commands without them."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_llenergy.record.secrets import (
    hide_secrets,
    is_secret,
    redact_arguments,
    redact_secrets,
    redact_text,
)


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
            '--kv-transfer-config {"api_key": "***", "Password": "***", "role": 1}',
        ),
        (["/bin/env", "-i", "PASSWORD=a b", "A=1", "SECRET=a b"], "/bin/env -i PASSWORD=*** A=1 SECRET=***"),
        (["serve.py", "api_key=abc", '{"token":5,"n":1}'], 'serve.py api_key=*** {"token": "***", "n": 1}'),
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
        (
            ['serve --kv "{\\"api_key\\": \\"a b\\", \\"n\\": 1}"'],
            'serve --kv \'{"api_key": "***", "n": 1}\'',
        ),
        (["--note=don't --api-key abc", "PASSWORD='a b"], "--note='don t --api-key ***' PASSWORD=***"),
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
        (["sh", "-c", "(serve --api-key abc)"], "sh -c (serve --api-key ***)"),
        (["sh", "-c", "(TOKEN=abc)|x"], "sh -c (TOKEN=***)|x"),
        (["sh", "-c", "serve --api-key=abc>log"], "sh -c serve --api-key=***>log"),
        (["sh", "-c", "serve --api-key \\\n abc -q"], "sh -c serve --api-key \\\n *** -q"),
        (["sh", "-c", "x --token; serve -q"], "sh -c x --token; serve -q"),
        (["bash", "-lc", "TOKEN=abc;serve"], "bash -lc TOKEN=***;serve"),
        (["serve", "--api-key", "-tp", "2"], "serve --api-key -tp 2"),
        (["token=abc;dtype=x"], "token=***;dtype=x"),
        (["n=1;token=abc"], "n=1;token=***"),
        (["pretrained=g,HF_TOKEN=abc,dtype=x"], "pretrained=g,HF_TOKEN=***,dtype=x"),
        (
            ["x", "--export=HF_TOKEN=abc,WANDB_KEY=abc,DTYPE=x"],
            "x --export=HF_TOKEN=***,WANDB_KEY=***,DTYPE=x",
        ),
        # A value that is no list has no end within its word.
        (["env", "PASSWORD=abc,x=abc", "serve"], "env PASSWORD=*** serve"),
        (["docker", "-e", "auth=abc,x=abc", "--env=KEY=abc,x=abc"], "docker -e auth=*** --env=KEY=***"),
        (["sh", "-c", "cd d && TOKEN=abc,x=abc serve"], "sh -c cd d && TOKEN=*** serve"),
        (["sh", "-c", "ssh h PASSWORD='a b' serve"], "sh -c ssh h PASSWORD=*** serve"),
        (["sh", "-c", "(TOKEN=abc,x=abc serve)"], "sh -c (TOKEN=*** serve)"),
        (["ssh", "h", "TOKEN=abc,x=abc"], "ssh h TOKEN=***"),
        (["x", "--API_KEY=a b", "password=a b"], "x --API_KEY=*** password=***"),
        (["x", "--api-keys=alice=abc,bob=abc"], "x --api-keys=***"),
        (["x", "--set", "password=abc,x=abc"], "x --set password=***"),
        (["--args=pretrained=g,password=abc,x=abc"], "--args=pretrained=g,password=***"),
        (["-eTOKEN=a b", "-etoken=abc,x=abc"], "-eTOKEN=*** -etoken=***"),
        # A value may have names and options of its own.
        (["x", "--args='--api-key abc' -q"], "x --args='--api-key ***' -q"),
        (["sh", "-c", "x ARGS=--api-key abc"], "sh -c x ARGS=--api-key ***"),
        (["-o", "addopts=--token abc -q"], "-o addopts=--token *** -q"),
        (["--args=token=abc,pretrained=g"], "--args=token=***,pretrained=g"),
        (["A=--args=api_key=abc,n=1"], "A=--args=api_key=***,n=1"),
        (["m=Model(a=1,m=M(token=abc,dtype=x))"], "m=Model(a=1,m=M(token=***,dtype=x))"),
        (['C={"token": {"a": {"b": 1}, "c": "abc"}, "n": 1}'], 'C={"token": "***", "n": 1}'),
        (['C={"a":"n=1,token=abc","b":1}'], 'C={"a": "n=1,token=***", "b": 1}'),
        (['C=["--api-key", "abc", 1]'], 'C=["--api-key", "***", 1]'),
        (['{"a": "serve\\n--api-key abc"}'], '{"a": "serve\\n--api-key ***"}'),
        (["{'token': {'a': {'b': ']'}, 'c': 'abc'}, 'n': 1}"], "{'token': ***, 'n': 1}"),
        (["['--api-key', 'abc']"], "['--api-key', ***"),
        (["['--token', '--n']"], "['--token', '--n']"),
        ([r"is {\"token\": \"abc\""], r"is {\"token\": ***"),
        # Lists, arguments of functions, URLs and headers.
        (["pretrained=g,token=abc,dtype=x"], "pretrained=g,token=***,dtype=x"),
        (["python", "-c", "serve(token='a b', n=1)"], "python -c serve(token=***, n=1)"),
        (["env", "PROXY=https://user:abc@h/x", "A=1", "serve"], "env PROXY=https://***@h/x A=1 serve"),
        (["--command=env PROXY=https://user:abc@h/x A=1"], "--command=env PROXY=https://***@h/x A=1"),
        (["https://user:a@b:c@h/x"], "https://***@h/x"),
        (["--command=x https://user:a;b@h/x -q"], "--command=x https://***@h/x -q"),
        (["docker://user:abc@h", "git+https://abc@h/x"], "docker://***@h git+https://***@h/x"),
        (["U=https://h/x?n=1&api_key=abc&m=2#token=abc"], "U=https://h/x?n=1&api_key=***&m=2#token=***"),
        (["-H", "X-Api-Key: abc"], "-H X-Api-Key: ***"),
        (["-H", "x-api-key:abc", "-HAuthorization:abc"], "-H x-api-key:*** -HAuthorization:***"),
        (["-H", 'Authorization: Digest user="a", b="c"'], "-H Authorization: ***"),
        (["env", "H=authorization: bearer abc", "serve"], "env H=authorization: *** serve"),
        *(
            (["-H", f"Authorization:{scheme} abc"], f"-H Authorization:{scheme} ***")
            for scheme in ("ApiKey", "Basic", "bearer", "Digest", "Negotiate", "Token")
        ),
        (["x", "Bearer", "abc"], "x Bearer ***"),
        (["A=bearer abc"], "A=bearer ***"),
        (['Y=a: 1\napi_key: "abc" # c\nb: 2'], "Y=a: 1\napi_key: ***\nb: 2"),
        (["api_key: 'abc'"], "api_key: ***"),
        (["password: |\n  abc\nb: 2"], "password: |\n  ***\nb: 2"),
        (
            ["--command=curl -H 'Authorization: Bearer abc' h"],
            "--command=curl -H 'Authorization: ***' h",
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
                "docker -v /secret:/x -v d/token:/y x.py::token::z auth::x secret://x",
                "docker://vllm@sha256:1 hf://gpt2@main ssh://git@h",
                "a 'b  c' \"d\\\"e\" f\\ g {h: 'i'} (j) > k; l",
                '{"a":  [1.0, "b"] }',
                "the token: ",
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
Authorization headers.Authorization credentials auth pat github_pat GH_PAT ngc_key
openaiApiKey db_pass MYSQL_PWD
"""

PLAIN = """
eos_token image_token image_start_token use_sep_token num_experts_per_token tokens max_tokens max_new_tokens
tokenizer token_limit pad_token_id key keys cache_key relative_key num_key_value_heads ssl_keyfile monkey
MONKEY PWD OLDPWD compat single_pass num_forward_pass author IMAGE_TOKEN
"""


@pytest.mark.parametrize(("names", "secret"), [(SECRETS, True), (PLAIN, False)])
def test_one_definition_decides_what_a_secret_is_called(names: str, secret: bool) -> None:
    for name in names.split():
        assert is_secret(name) is secret, name
        assert hide_secrets({name: "x"}) == {name: "***" if secret else "x"}
        assert redact_text(f'{{"{name}": "x"}}') == f'{{"{name}": "{"***" if secret else "x"}"}}'
        assert redact_secrets(["serve", f"--{name}", "x"]) == ["serve", f"--{name}", "***" if secret else "x"]


class Pair(NamedTuple):
    """A tuple that is not made of an iterable."""

    first: object
    second: object


def test_values_without_secrets_stay_the_same_objects() -> None:
    for value in ({"a": [{"n": 1}, "b"], 2: None}, ("a", "b"), "it's \"a\" \\ 'text", 5, [["--n", 1]]):
        assert hide_secrets(value) is value
    assert hide_secrets(["--api-key", "abc", 80]) == ["--api-key", "***", 80]
    assert hide_secrets(["--api-key", 80]) == ["--api-key", "***"]
    assert hide_secrets(("--api-key", "abc", None)) == ("--api-key", "***", None)
    assert hide_secrets({"--token": "abc"}) == {"--token": "***"}
    assert hide_secrets(("serve", "--api-key", "abc")) == ("serve", "--api-key", "***")
    assert hide_secrets(Pair("--api-key", "abc")) == ("--api-key", "***")
    assert hide_secrets(Pair({"token": 1}, 2)) == ({"token": "***"}, 2)
    assert hide_secrets([{"a": ["HF_TOKEN=abc serve"]}, 1]) == [{"a": ["HF_TOKEN=*** serve"]}, 1]


@pytest.mark.parametrize("opening", ["[", "{"])
def test_a_list_that_is_not_closed_is_hidden_to_the_end(opening: str) -> None:
    """The time grows with the length alone: this text took a minute."""
    assert redact_text(f'x "token": {opening} ' + f'"token": {opening} ' * 20_000) == 'x "token": ***'


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--url=https://x/base.json?X-Amz-Signature=secret", "--url=https://x/base.json"),
        ("https://user:pass@word@x/a@b.json#f", "https://x/a@b.json"),
        ("s3://bucket/base.json", "s3://bucket/base.json"),
        ("http://bob:hu#nter2@h/x.json", "http://h/x.json"),
        ("-o=a http://bob:hu?nter2@h/x.json -q", "-o=a http://h/x.json -q"),
    ],
)
def test_user_password_and_query_of_a_url_are_hidden(word: str, shown: str) -> None:
    assert redact_arguments([word]) == [shown]
