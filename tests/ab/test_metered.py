# SPDX-License-Identifier: Apache-2.0
"""Sessions with a real measurement: a meter whose power differs between the commits."""

from __future__ import annotations

import pytest

from ..conftest import TEN_WATTS
from .project import Project

CONFTEST = TEN_WATTS.replace("10 * time", "work.WATTS * time").replace("import time", "import time, work")

TESTS = """
import time

def test_a(energy):
    energy(time.sleep, 0.2)
"""

OPTIONS = ["-p", "no:cacheprovider", "--energy-meter=ten-watts", "--energy-warmup=0"]


@pytest.mark.clock
@pytest.mark.slow
def test_higher_power_of_a_commit_is_found(project: Project) -> None:
    project.write("conftest.py", CONFTEST)
    project.write("work.py", "WATTS = 10\n")
    project.write("test_some.py", TESTS)
    project.commit()
    project.edit("work.py", "10", "13")
    project.commit()
    done = project.ab(
        *("--base=HEAD~1", "--pairs=4", "--rounds-per-session=2", "--metric=mean_power_w"),
        *("--", "pytest", *OPTIONS),
    )
    assert done.status == 1, done.err
    paired = project.paired()
    assert [session.side for session in paired.sessions] == ["base", "head", "head", "base"]
    (found,) = paired.compared.comparisons
    assert (found.verdict, found.kind) == ("regressed", "measured")
    # Power, because a busy machine stretches the rounds; and it may take more of them than were asked for.
    assert min(found.n_base, found.n_head) >= 4
    assert found.ratio == pytest.approx(1.3, rel=0.02)
    for report, watts in ((paired.base, 10), (paired.head, 13)):
        (record,) = report.records
        for round_ in record.rounds:
            assert round_.energy_j == pytest.approx(watts * round_.duration_s, rel=0.02)
