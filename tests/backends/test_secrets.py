# SPDX-License-Identifier: Apache-2.0
"""Keys in what a server prints."""

from __future__ import annotations

from pytest_llenergy.backends.secrets import hide_keys, remember_key, remember_keys


def test_given_keys_and_those_of_a_command_are_hidden() -> None:
    remember_key("sk-given")
    remember_keys(["env", "API_KEY=third-key", "serve", "--api-key=first-key", "--api-key", "second-key"])
    remember_keys(["sh", "-c", "serve --token='fourth-key' --max-tokens 12345678"])
    text = "keys sk-given first-key second-key third-key fourth-key, 12345678 tokens"
    assert hide_keys(text) == "keys *** *** *** *** ***, 12345678 tokens"
