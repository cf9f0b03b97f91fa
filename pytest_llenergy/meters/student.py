# SPDX-License-Identifier: Apache-2.0
"""By how much a standard deviation of few values is too small."""

from __future__ import annotations

#: Student's t for one standard deviation (p = 68.27 %) by degrees of freedom: GUM (JCGM 100:2008),
#: table G.2.
STUDENT = {1: 1.84, 2: 1.32, 3: 1.20, 4: 1.14, 5: 1.11, 6: 1.09, 7: 1.08, 8: 1.07, 9: 1.06, 10: 1.05}


def student(degrees: float) -> float:
    """By how much a standard uncertainty from few values is too small. Above the table 1 + 1/(2ν)."""
    return STUDENT.get(int(degrees), 1 + 0.5 / degrees) if degrees >= 1 else STUDENT[1]
