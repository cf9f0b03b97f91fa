# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code says."""

from __future__ import annotations

from pathlib import Path

from pytest_llenergy.cli.compare import FORMATS
from pytest_llenergy.export import TARGETS

ROOT = Path(__file__).parent.parent


def test_every_form_of_a_comparison_and_of_a_report_is_documented() -> None:
    comparing, exporting = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("comparing", "exporting"))
    # Text is what is printed without an option.
    assert [form for form in FORMATS if f"--format {form}" not in comparing] == ["text"]
    assert [target for target in TARGETS if f"| `{target}` |" not in exporting] == []


def test_the_readme_names_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    tox = (ROOT / "tox.ini").read_text()
    for name in ("bench", "tests"):
        assert f"pip install tox && tox run -e {name}" in readme
        assert f"[testenv:{name}]" in tox
    assert "tox run -e tests" in (ROOT / ".ci" / "run").read_text()
