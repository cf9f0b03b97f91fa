# SPDX-License-Identifier: Apache-2.0
"""Characters of the tables that an encoding lacks become ASCII of the same width."""

from __future__ import annotations

import pytest

from pytest_llenergy.record.text import encodable


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("ascii", "1.0+/-0.1 +3.1%...+6.0% ---- a~b 41 C \\u0142"),
        ("latin-1", "1.0 ± 0.1 +3.1%...+6.0% ---- a~b 41°C \\u0142"),
        ("utf-8", "1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł"),
    ],
)
def test_only_characters_that_the_encoding_lacks_are_replaced(encoding: str, message: str) -> None:
    assert encodable("1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł", encoding) == message


def test_microjoules_are_readable_in_ascii() -> None:
    assert encodable("40 ± 23 µJ", "ascii") == "40+/-23 uJ"
