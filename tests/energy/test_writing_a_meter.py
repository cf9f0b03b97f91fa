# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/writing-a-meter.md work."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clock

PAGE = Path(__file__).parents[2] / "docs/writing-a-meter.md"
METER, HOOK, WATTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
WATT = 40.0

MEASURED = """
import time
from collections.abc import Iterator

def test_it(energy):
    run = energy(time.sleep, 0.5)
    assert abs(run.mean_power_w - 40) < 1, run.metrics
    assert {domain.kind for round in run.rounds for domain in round.by_domain.values()} == {"measured"}
"""


@pytest.fixture
def joules(tmp_path: Path) -> Iterator[Path]:
    """Write the energy file of a plug that draws a constant 40 W, every 20 ms."""
    file, stop = tmp_path / "joules", threading.Event()
    start_s = time.monotonic()

    def write() -> None:
        while not stop.is_set():
            fresh = file.with_suffix(".new")
            fresh.write_text(str(WATT * (time.monotonic() - start_s)))
            fresh.replace(file)
            time.sleep(0.02)

    service = threading.Thread(target=write)
    service.start()
    while not file.exists():
        time.sleep(0.01)
    try:
        yield file
    finally:
        stop.set()
        service.join()


def test_the_plug_meter_measures(pytester: pytest.Pytester, joules: Path) -> None:
    pytester.makepyfile(plug_meter=METER)
    pytester.makeconftest(HOOK)
    pytester.makepyfile(MEASURED)
    options = (f"--energy-meter=plug:{joules}", "--energy-rounds=4", "--energy-warmup=1")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=1)


def test_a_plug_without_its_service_fails_with_the_remedy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(plug_meter=METER)
    pytester.makeconftest(HOOK)
    pytester.makepyfile(MEASURED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--energy-meter=plug:nowhere")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*plug: nowhere is not a file; start the service of the plug*"])


def test_the_power_meter_of_the_page_integrates_watts() -> None:
    names: dict[str, Any] = {}
    exec(WATTS, names)
    meter = names["WattMeter"](lambda: WATT)
    (first,) = meter.read()
    start_s = time.monotonic()
    while time.monotonic() < start_s + 0.5:
        (last,) = meter.read()
        end_s = time.monotonic()
        time.sleep(0.005)
    assert last - first == pytest.approx(WATT * (end_s - start_s), rel=0.25)
    assert meter.domains[0].integrated
