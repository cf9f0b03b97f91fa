# SPDX-License-Identifier: Apache-2.0
"""A meter and a backend of a user, written as the documentation writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .project import Project

DOCS = Path(__file__).parents[2] / "docs"


def documented(page: str, name: str) -> str:
    """Return the source of a file that a page shows, whatever it imports there."""
    found = re.search(
        rf"<!-- file: {re.escape(name)} -->\n```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL
    )
    assert found is not None, f"{page} shows no {name}"
    return found[1]


def test_a_meter_of_a_user(project: Project) -> None:
    """A plug whose service keeps joules in a file: 20 W."""
    project.write("plug_meter.py", documented("writing-a-meter.md", "plug_meter.py"))
    project.write("conftest.py", documented("writing-a-meter.md", "conftest.py"))
    project.write("joules", "0.0")
    project.write(
        "test_it.py",
        "import os, threading, time\n"
        "START = time.monotonic()\n"
        "def count():\n"
        "    while True:\n"
        "        with open('joules.new', 'w') as file:\n"
        "            file.write(str(20 * (time.monotonic() - START)))\n"
        "        os.replace('joules.new', 'joules')\n"
        "        time.sleep(0.02)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "def test_it(energy_meter):\n"
        "    time.sleep(0.5)\n"
        "    with energy_meter('w'): time.sleep(1.0)\n"
        "    time.sleep(0.5)\n",
    )
    project.pytest("--energy-report", "--energy-meter=plug:joules").check(passed=1)
    (record,) = project.records().values()
    (window,) = record["windows"]
    assert window["energy_j"] == pytest.approx(20 * window["duration_s"], abs=4 * window["energy_u_j"] + 0.5)
    assert list(window["by_domain"]) == ["plug:joules"]
    missing = project.pytest("--energy-meter=plug:nowhere")
    assert missing.ret != 0
    assert "nowhere is not a file" in missing.text


def test_a_backend_of_a_user(project: Project) -> None:
    project.write("tiny_backend.py", documented("extending.md", "tiny_backend.py"))
    project.write("conftest.py", documented("extending.md", "conftest.py"))
    project.write(
        "test_it.py",
        "def test_it(energy, backend):\n"
        "    run = energy(backend.generate, ['abc', 'defgh'], max_new_tokens=5)\n"
        "    assert run.result.output_tokens == 10\n",
    )
    options = ["--energy-backend=tiny", "--energy-model=random:llama-tiny", "--energy-report"]
    project.pytest(*options, project.meter()).check(passed=1)
    (record,) = project.records().values()
    assert record["backend"]["name"] == "tiny"
    calls = record["rounds"][0]["iterations"]
    assert record["rounds"][0]["tokens"]["input"] in (8, 8 * calls)
