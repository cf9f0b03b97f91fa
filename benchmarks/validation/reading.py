# SPDX-License-Identifier: Apache-2.0
"""Read all energies and powers of a board as fast as possible, in a separate process.

``python -m benchmarks.validation.reading UUID FILE.npy`` reads until its standard input ends. A separate
process does not slow down the one that keeps the board busy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llenergy.devices.nvml import Quantity, Session
from pytest_llenergy.energy.meters.nvml import COUNTERS, POWER_USAGE
from pytest_llenergy.energy.selfcheck import Reading

from .machine import AVERAGE, INSTANT
from .part import module_command

#: Columns of a table of readings: monotonic ns before and after, mJ, mW, mW, mW. -1: not available.
COLUMNS = ("begin_ns", "end_ns", "counter_mj", "average_mw", "instant_mw", "usage_mw")

#: Sleep between two readings (seconds); it takes a bit longer in practice.
PAUSE_S = 0.0003


class Readings(NamedTuple):
    """Columns of readings. Times are the middle of each reading (monotonic ns).

    ``wide_ns`` is the duration of each reading. Energies are J, powers W; ``nan`` if not available.
    """

    time_ns: Any
    wide_ns: Any
    counter_j: Any
    average_w: Any
    instant_w: Any
    usage_w: Any

    def between(self, start_ns: int, end_ns: int) -> Readings:
        """Return the readings between two times."""
        inside = (self.time_ns >= start_ns) & (self.time_ns < end_ns)
        return Readings(*(column[inside] for column in self))

    def for_judge(self) -> list[Reading]:
        """Return the readings in the form that the plugin's self-check takes."""
        half = self.wide_ns // 2
        columns = (self.time_ns - half, self.time_ns + half, self.counter_j, self.instant_w)
        return [
            Reading(int(begin), int(end), _none(energy), _none(watts))
            for begin, end, energy, watts in zip(*columns, strict=True)
        ]

    @property
    def pause_s(self) -> float:
        """Return the median time between readings."""
        import numpy as np

        return float(np.median(np.diff(self.time_ns))) / 1e9 if len(self.time_ns) > 1 else float("nan")


def _none(value: float) -> float | None:
    return None if value != value else float(value)


def build_readings(rows: Any) -> Readings:
    """Build columns from rows of ``COLUMNS``."""
    import numpy as np

    rows = np.asarray(rows, dtype=np.int64)
    values = np.where(rows[:, 2:] < 0, np.nan, rows[:, 2:] / 1000)
    return Readings((rows[:, 0] + rows[:, 1]) // 2, rows[:, 1] - rows[:, 0], *values.T)


@contextmanager
def read_all(uuid: str, file: Path) -> Iterator[None]:
    """Read during the block; call ``load_readings(file)`` afterwards.

    Raises:
        RuntimeError: The reader process fails.
    """
    reader = subprocess.Popen(
        module_command("reading", uuid, str(file)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        if reader.stdout.readline() != "reading\n":
            raise RuntimeError("the process that reads the board did not start; see its error above")
        yield
        reader.stdin.close()
        if reader.wait(timeout=20) != 0:
            raise RuntimeError("the process that reads the board failed; see its error above")
    finally:
        reader.kill()
        reader.wait()
        reader.stdin.close()
        reader.stdout.close()


def load_readings(file: Path) -> Readings:
    """Load the readings that ``read_all`` wrote."""
    import numpy as np

    return build_readings(np.load(file))


def _answering(session: Session, handle: Any, quantities: Sequence[Quantity]) -> Quantity | None:
    return next((one for one in quantities if not isinstance(session.read(handle, (one,))[0], str)), None)


def set_at_end_of_input(over: threading.Event) -> None:
    """Set ``over`` when standard input ends, which is how the parent process stops this one."""
    sys.stdin.read()
    over.set()


def main(argv: Sequence[str]) -> None:
    """Read until standard input ends, then write the table."""
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uuid")
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    session = Session()
    handle = session.open_board(args.uuid).handle
    wanted = (COUNTERS, (AVERAGE,), (INSTANT,), (POWER_USAGE,))
    known = [(place, one) for place, some in enumerate(wanted) if (one := _answering(session, handle, some))]
    places, quantities = [place for place, _ in known], [one for _, one in known]
    over = threading.Event()
    threading.Thread(target=set_at_end_of_input, args=(over,), daemon=True).start()
    rows: list[tuple[int, ...]] = []
    print("reading", flush=True)
    while not over.is_set():
        begin_ns = time.monotonic_ns()
        values = session.read(handle, quantities)
        end_ns = time.monotonic_ns()
        cells = [-1, -1, -1, -1]
        for place, value in zip(places, values, strict=True):
            if not isinstance(value, str):
                cells[place] = round(value * 1000)
        rows.append((begin_ns, end_ns, *cells))
        time.sleep(PAUSE_S)
    np.save(args.file, np.array(rows, dtype=np.int64))


if __name__ == "__main__":
    main(sys.argv[1:])
