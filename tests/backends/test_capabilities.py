# SPDX-License-Identifier: Apache-2.0
"""Capability rows as users read them: in the terminal, as JSON, in the documentation."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.registry import load_backends
from pytest_llenergy.cli import main
from pytest_llenergy.cli.doctor.capabilities import list_facts, list_lines


def test_everything_that_a_test_can_require_is_shown() -> None:
    shown = {fact.name for fact in list_facts(Capabilities())}
    hidden = {"framework", "process_group", "preload", "opaque"}
    assert shown == {field.name for field in fields(Capabilities)} - hidden
    row = Capabilities(launch="backend", tensor=True, timestamps="token", options=("dtype",))
    lines = [each.text for each in list_lines(BackendSpec("mine", "m:M", (), "pip install mine", row))]
    assert lines[0] == "mine: installed"
    actual = [" ".join(line.split()) for line in lines[1:]]
    assert {"launch backend", "tensor yes", "timestamps token", "load options dtype"} <= set(actual)


def test_a_missing_backend_is_shown_with_its_install_command() -> None:
    spec = BackendSpec("mine", "m:M", ("no_such_module",), "pip install mine", Capabilities())
    assert next(list_lines(spec)).text == "mine: not available: no module no_such_module; pip install mine"


def test_json_output_holds_whole_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backends", "--format=json"]) == 0
    actual = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert list(actual) == list(load_backends())
    openvino = actual["openvino"]
    assert openvino["install"] == "pip install 'pytest-llenergy[openvino]'"
    assert openvino["capabilities"]["batching"] == ["static"]
