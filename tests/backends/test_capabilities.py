# SPDX-License-Identifier: Apache-2.0
"""Capability rows as users read them: in the terminal, as JSON, in the documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.registry import BUILTIN, load_backends
from pytest_llenergy.cli import main
from pytest_llenergy.cli.doctor.capabilities import UNKNOWN, list_facts, list_lines


def test_everything_that_a_test_can_require_is_shown() -> None:
    hidden = {"framework", "process_group", "preload", "exact", "clock", "reasons", "sources"}
    hidden |= {"changed_by", "off", "opaque"}
    shown = {fact.name for fact in list_facts(Capabilities())} - {"managed_by"}
    assert shown == {field.name for field in fields(Capabilities)} - hidden


def test_a_fact_is_shown_with_its_reason_and_source() -> None:
    row = Capabilities(
        timestamps="token",
        exact=True,
        clock="its own",
        reasons={"gpu": "not yet", "options_lora": "unsafe"},
        sources={"gpu": "tested"},
    )
    lines = {each.text for each in list_lines(BackendSpec("mine", "m:M", (), "pip install mine", row))}
    shown = {" ".join(line.split()) for line in lines}
    assert "mine: installed" in shown
    assert "NVIDIA GPUs no: not yet [tested]" in shown
    assert "timestamps each token, exact; its own [not stated]" in shown
    assert "option lora no: unsafe [not stated]" in shown


@pytest.mark.parametrize("spec", BUILTIN, ids=lambda spec: spec.name)
def test_each_fact_and_refused_option_of_a_backend_has_a_source(spec: BackendSpec) -> None:
    row = spec.capabilities
    facts = {fact.name: fact for fact in list_facts(row)}
    assert [name for name, fact in facts.items() if fact.source == UNKNOWN] == []
    refused = {name: reason for name, reason in row.reasons.items() if name.startswith("options_")}
    assert {name: facts[name].reason for name in refused} == refused


def test_a_missing_backend_is_shown_with_its_install_command() -> None:
    spec = BackendSpec("mine", "m:M", ("no_such_module",), "pip install mine", Capabilities())
    assert next(list_lines(spec)).text == "mine: not available: no module no_such_module; pip install mine"


def test_the_doctor_shows_the_row_of_every_backend_and_nothing_else() -> None:
    args = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", "--backends"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=True)
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [head.split(":")[0].split()[1] for head in heads] == list(load_backends())
    assert all(head.startswith("backend  ") for head in heads)


def test_json_output_holds_whole_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backends", "--format=json"]) == 0
    actual = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert list(actual) == list(load_backends())
    openvino = actual["openvino"]
    assert openvino["install"] == "pip install 'pytest-llenergy[openvino]'"
    assert openvino["managed_by"] == "plugin"
    assert openvino["capabilities"]["prefix_cache"] == "switched off"
    assert openvino["capabilities"]["sources"]["prefix_cache"] == "tested"
