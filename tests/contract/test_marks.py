# SPDX-License-Identifier: Apache-2.0
"""Marks as users write them, on four simulated boards."""

from __future__ import annotations

import pytest

from tests.nvml_sim import Board, MigInstance, World
from tests.nvml_sim.boards import GIB

from .conftest import GiveBoards
from .project import Ended, Outcome, Project

GOOD = """
import os, time
import pytest

@pytest.mark.gpus
def test_default_is_one(gpus):
    assert len(gpus.uuids) == len(gpus.indices) == len(gpus.names) == 1

@pytest.mark.gpus(3)
def test_three(gpus):
    assert len(set(gpus.uuids)) == 3
    assert gpus.visible_devices == ",".join(gpus.uuids)

@pytest.mark.gpus(1, name="L40S")
def test_name(gpus):
    assert gpus.names == ("NVIDIA L40S",) and gpus.indices == (1,)

@pytest.mark.gpus(1, memory="100 GB")
def test_memory(gpus):
    assert gpus.names == ("NVIDIA H200",)

@pytest.mark.gpus(5)
def test_too_many(gpus):
    raise SystemExit("ran")

@pytest.mark.gpus(1, name="B200")
def test_no_such_name(gpus):
    raise SystemExit("ran")

@pytest.mark.gpus(5, fallback="cpu")
def test_fallback(gpus, energy_meter):
    assert (gpus.uuids, gpus.fallback, gpus.devices) == ((), "cpu", ("cpu",) * 5)
    with energy_meter("w"):
        pass

@pytest.mark.gpus(2, fallback="cpu")
def test_no_fallback_where_there_are_gpus(gpus):
    assert len(gpus.uuids) == 2 and gpus.fallback is None

@pytest.mark.gpus(2)
class TestClass:
    def test_class(self, gpus):
        assert len(gpus.uuids) == 2

    @pytest.mark.gpus(1)
    def test_closest_mark_wins(self, gpus):
        assert len(gpus.uuids) == 1

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
@pytest.mark.gpus(1)
def test_of_a_parameter(gpus, n):
    assert len(gpus.uuids) == n

@pytest.mark.gpus(1)
@pytest.mark.gpu_settings(power_limit_w="watts")
@pytest.mark.parametrize("watts", [300, None])
def test_sweep(energy_meter, gpus, watts):
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpus.uuids[0])
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle) == 1000 * (watts or 700)
    with energy_meter("w"):
        time.sleep(0.05)

@pytest.mark.gpus(1)
@pytest.mark.gpu_settings(power_limit_w=5000)
def test_impossible_setting(gpus):
    raise SystemExit("ran")

@pytest.mark.gpu_settings(power_limit_w=100)
def test_setting_of_the_cpu(gpus):
    raise SystemExit("ran")

@pytest.mark.gpus(1)
def test_plain_test_with_the_mark_alone():
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-"), "sees every board"

@pytest.mark.gpus(1)
def test_fixture_gpus_alone(gpus):
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpus.visible_devices
"""

#: Tests that pass.
GETS = (
    "test_default_is_one",
    "test_three",
    "test_name",
    "test_memory",
    "test_fallback",
    "test_no_fallback_where_there_are_gpus",
    "test_class",
    "test_closest_mark_wins",
    "test_of_a_parameter[1]",
    "test_of_a_parameter[2]",
    "test_sweep[300]",
    "test_sweep[None]",
    "test_plain_test_with_the_mark_alone",
    "test_fixture_gpus_alone",
)

#: Tests that are skipped or an error, with a word of the reason.
CANNOT = {
    "test_too_many": ("skipped", "5"),
    "test_no_such_name": ("skipped", "B200"),
    "test_impossible_setting": ("error", "700 W"),
    "test_setting_of_the_cpu": ("error", "gpu"),
}

#: Marks, and a word of the line about each.
BAD = {
    "gpus_0": ("gpus(0)", "whole number"),
    "gpus_word": ("gpus('two')", "whole number"),
    "gpus_argument": ("gpus(1, colour='red')", "colour"),
    "gpus_fallback": ("gpus(1, fallback='gpu')", "fallback"),
    "gpus_memory": ("gpus(1, memory='much')", "memory"),
    "parallel_0": ("parallel(data=0)", "data"),
    "parallel_argument": ("parallel(experts=2)", "experts"),
    "parallel_product": ("parallel(data=2, tensor=2)\n@pytest.mark.gpus(2)", "4 devices"),
    "options_rounds": ("energy_options(rounds=0)", "rounds"),
    "options_argument": ("energy_options(loops=3)", "loops"),
    "options_target": ("energy_options(target='high')", "target"),
    "backend_options": ("backend_options('float32')", "keyword"),
    "backend_needs": ("backend_needs(task='fly')", "fly"),
    "settings": ("gpu_settings()", "power_limit_w"),
    "gate_unit": ("energy_gate(budget='5 apples')", "5 apples"),
    "gate_metric": ("energy_gate(metric='energy', budget='5 J')", "energy_j"),
    "gate_nothing": ("energy_gate()", "budget"),
}


@pytest.fixture(scope="module")
def world(module_project: Project, give_boards: GiveBoards) -> World:
    mig = tuple(MigInstance(f"MIG-{n}", gpu_instance=n) for n in (1, 2))
    return give_boards(
        module_project,
        [
            Board(name="NVIDIA RTX 4090", memory_total=24 * GIB),
            Board(name="NVIDIA L40S", memory_total=48 * GIB),
            Board(name="NVIDIA H200", memory_total=141 * GIB),
            Board(name="NVIDIA RTX 4090", memory_total=24 * GIB),
            Board(name="NVIDIA H100", mig_enabled=True, mig_instances=mig),
        ],
    )


@pytest.fixture(scope="module")
def tests(module_project: Project, world: World) -> dict[str, Ended]:
    module_project.without_torch()
    module_project.write("test_good.py", GOOD)
    return module_project.suite("test_good.py")


def test_a_test_gets_what_its_mark_asks_for(
    tests: dict[str, Ended], module_project: Project, world: World
) -> None:
    assert {name: tests[name] for name in GETS if tests[name].outcome != "passed"} == {}
    assert module_project.records()["test_fallback"]["fallback"] == "cpu"
    shown = module_project.llenergy("report", "energy.json")
    assert "fallback" in shown.out
    assert "CPU" in shown.out
    # A power limit is recorded and put back.
    (changed,) = module_project.records()["test_sweep[300]"]["gpu_settings"]
    assert (changed["power_limit_w"], changed["power_limit_found_w"]) == (300, 300)
    assert [world.board(index).power_limit_w for index in range(5)] == [700.0] * 5


def test_a_test_that_cannot_have_it_does_not_run_and_says_why(tests: dict[str, Ended]) -> None:
    for name, (outcome, word) in CANNOT.items():
        assert tests[name].outcome == outcome, name
        assert "SystemExit" not in tests[name].why, name
        assert word in tests[name].why, tests[name].why


@pytest.fixture(scope="module")
def bad(module_project: Project) -> Outcome:
    for name, (mark, _) in BAD.items():
        source = f"import pytest\n@pytest.mark.{mark}\ndef test_it(workers): raise SystemExit('ran')\n"
        module_project.write(f"bad/test_{name}.py", source)
    return module_project.pytest("bad")


def test_a_bad_argument_is_one_line_at_collection(bad: Outcome) -> None:
    """The line names the test, the mark, and what was found or is needed."""
    assert bad.ret == pytest.ExitCode.INTERRUPTED
    assert bad.counts == {"error": len(BAD)}
    for name, (mark, word) in BAD.items():
        place = next(n for n, line in enumerate(bad.lines) if f"collecting bad/test_{name}.py" in line)
        message, following = bad.lines[place + 1 : place + 3]
        assert mark.partition("(")[0] in message
        assert word in message
        assert "test_it" in message
        assert following.startswith(("___", "===")), following


OPTIONS = """
import time
import pytest

pytestmark = pytest.mark.energy_options(rounds=3, warmup=0)

def test_module(energy):
    assert len(energy(time.sleep, 0.02).rounds) == 3

@pytest.mark.energy_options(rounds=4, iterations=5)
def test_function(energy):
    calls = []
    run = energy(calls.append, 1)
    assert len(run.rounds) == 4
    assert len(calls) == 4 * 5

@pytest.mark.parametrize("rounds", [pytest.param(5, marks=pytest.mark.energy_options(rounds=5))])
@pytest.mark.energy_options(rounds=4)
def test_parameter(energy, rounds):
    assert len(energy(time.sleep, 0.02).rounds) == 5

@pytest.mark.energy_options(warmup=2, iterations=1)
def test_warmup(energy):
    calls = []
    energy(calls.append, 1)
    assert len(calls) == 2 + 3
"""


def test_energy_options_of_the_closest_mark_win_over_the_command_line(project: Project) -> None:
    project.write("test_it.py", OPTIONS)
    project.pytest(project.meter(), "--energy-rounds=2").check(passed=4)


def test_a_load_option_that_the_backend_does_not_take_is_named(project: Project) -> None:
    project.write(
        "test_it.py",
        "import pytest\n@pytest.mark.backend_options(colour='red')\n"
        "def test_it(energy, backend): energy(backend.generate, ['a'])\n",
    )
    tests = project.suite("--energy-backend=llama-cpp")
    assert "passed" not in {test.outcome for test in tests.values()}
    assert all("colour" in test.why for test in tests.values())
