# SPDX-License-Identifier: Apache-2.0
"""Measure the work with CodeCarbon's process mode: ``carbon.py WORK SIZE ROUNDS PACKAGES``. Prints kWh."""

from __future__ import annotations

import os
import sys


def main() -> None:
    name, size, rounds, packages = sys.argv[1:]
    # For the work alone; the pinned packages of this environment come first.
    sys.path.append(packages)
    from busy_work import WORKS
    from codecarbon import OfflineEmissionsTracker

    work = WORKS[name]
    work(0.1)
    # Its messages go to standard output.
    printed = os.dup(1)
    os.dup2(2, 1)
    tracker = OfflineEmissionsTracker(
        country_iso_code="USA", tracking_mode="process", measure_power_secs=1, save_to_file=False
    )
    tracker.start()
    for _ in range(int(rounds)):
        work(float(size))
    tracker.stop()
    os.write(printed, f"{tracker.final_emissions_data.energy_consumed!r}\n".encode())


if __name__ == "__main__":
    main()
