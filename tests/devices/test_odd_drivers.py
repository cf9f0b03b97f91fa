# SPDX-License-Identifier: Apache-2.0
"""Names and modules that no driver of today has, as black boxes."""

from __future__ import annotations

import json

import pytest

from tests.contract.conftest import GiveBoards, give_boards, project, shared
from tests.contract.project import Project
from tests.nvml_sim import Board, World

__all__ = ["give_boards", "project", "shared"]

VISIBLE = """
import pytest

@pytest.mark.gpus(1)
def test_one(gpus):
    print("leased", gpus.indices)

@pytest.mark.gpus(2)
def test_two(gpus):
    print("leased", gpus.indices)
"""


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    return give_boards(project, [Board(name="NVIDIA H200"), Board(name="NVIDIA L40S")])


def test_the_name_of_a_board_may_have_any_bytes(project: Project, world: World) -> None:
    content = bytearray(world.path.read_bytes())
    place = content.find(b"NVIDIA H200")
    with world.path.open("r+b") as file:
        file.seek(place)
        file.write(b"NVIDIA H\xff00")
    project.write("test_v.py", VISIBLE + "def test_cpu(energy): energy(sum, range(1000))\n")
    report = ("--energy-report=n.json", project.meter())
    ended = project.pytest("test_v.py", "-rsP", "-k", "two or cpu", *report, CUDA_VISIBLE_DEVICES="0,1")
    assert "leased (0, 1)" in ended.out
    assert json.loads(project.text("n.json"))["environment"]["gpus"][0]["name"] == "NVIDIA H\ufffd00"


def test_another_package_named_pynvml_leaves_tests_of_the_cpu(project: Project, world: World) -> None:
    project.write("other/pynvml.py", "__version__ = '0'\n")
    project.env["PYTHONPATH"] = f"{project.path / 'other'}:{project.env.get('PYTHONPATH', '')}"
    project.write("test_e.py", "def test_it(energy): energy(sum, range(1000))\n")
    ended = project.pytest("test_e.py", "--energy-report", project.meter())
    assert "INTERNALERROR" not in ended.out
    ended.check(passed=1)
    project.write("test_v.py", VISIBLE)
    ended = project.pytest("test_v.py", "-k", "one")
    ended.check(error=1)
    assert "pynvml.py is not that of nvidia-ml-py; remove it, then pip install" in ended.text
