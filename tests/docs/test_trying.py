# SPDX-License-Identifier: Apache-2.0
"""Mistakes on a page are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import blocks
from .project import set_up
from .trying import find_failures

#: A mistake on a page, and a part of the message about it.
WRONG = {
    "unknown option": (
        "```sh\npytest --energy-raport\n```",
        "unrecognized arguments: --energy-raport",
    ),
    "invalid value": ("```sh\npytest --energy-rounds=few\n```", "needs a whole number"),
    "missing baseline": ("```sh\npytest --energy-compare=mian\n```", "mian"),
    "missing path": ("```sh\npytest benchmark\n```", "there is no benchmark"),
    "unknown sub-command": ("```sh\nllenergy compair a b\n```", "ends with 2"),
    "unknown option of a sub-command": ("```sh\nllenergy ab --bass HEAD -- pytest\n```", "--bass"),
    "wrong command for ab": (
        "```sh\nllenergy ab -- pytest --energy-raport\n```",
        "unrecognized arguments",
    ),
    "missing file": ("```sh\nllenergy report nothing.json\n```", "llenergy report nothing.json"),
    "unknown tox environment": ("```sh\npip install tox && tox run -e bunch\n```", "tox has no bunch"),
    "unknown extra": (
        "```sh\npip install 'pytest-llenergy[everything]'\n```",
        "there is no extra everything",
    ),
    "unknown extra in the setup of ab": (
        "```sh\nllenergy ab --setup 'pip install -e .[nope]' -- pytest\n```",
        "there is no extra nope",
    ),
    "invalid pairs": ("```sh\nllenergy ab --pairs nonsense -- pytest\n```", "nonsense"),
    "-k without a match": ("```sh\npytest benchmarks -k nothing\n```", "-k selects none"),
    "command behind ||": ("```sh\npytest || llenergy compair a b\n```", "ends with 2"),
    "missing file for pip": (
        "```sh\npip install -c constrains.txt -e '.[dev]'\n```",
        "there is no constrains.txt",
    ),
    "unknown program": ("```sh\nnvidia-smi\n```", "nvidia-smi: unknown program"),
    "program by its path": ("```sh\nbin/pytest\n```", "bash says 127"),
    "open quote": ("```sh\npytest -k 'a\n```", "bash says 2"),
    "session without commands": ("```console\npytest\n```", "no command in it"),
    "unknown ini key": ("```ini\n[pytest]\nenergy_raport = a.json\n```", "energy_raport"),
    "invalid toml value": (
        '```toml\n[tool.pytest.ini_options]\nenergy_rounds = "few"\n```',
        "whole number",
    ),
    "invalid workflow": ("```yaml\non: push\njobs: {a: {steps: []}}\n```", "jobs.a"),
    "invalid step": ("```yaml\n- runs: pytest\n```", "runs"),
    "wrong command of a step": ("```yaml\n- run: pytest --energy-raport\n```", "unrecognized arguments"),
    "invalid GitLab job": ("```yaml\na:\n  scripts: [pytest]\n```", "a"),
    "invalid JSON": ("```json\n{'a': 1}\n```", "JSONDecodeError"),
    "failing script": ("```python\n1 / 0\n```", "ZeroDivisionError"),
    "invalid Python": ("```python\ndef\n```", "SyntaxError"),
    "failing test": ("```python\ndef test_it():\n    assert 1 == 2\n```", "assert 1 == 2"),
    "skipped test": ("```python\ndef test_it():\n    pytest.skip('why')\n```", "1 skipped"),
    "invalid mark": ("```python\n@pytest.mark.gpus(many=1)\ndef test_it(energy): ...\n```", "many"),
    "invalid mark of a test that is not run": (
        "<!-- not run: why -->\n```python\n@pytest.mark.gpus(many=1)\ndef test_it(energy): ...\n```",
        "many",
    ),
    "unexpected failure": ("<!-- run -->\n```sh\npytest --co -q nothing\n```", "ended with 4"),
    "wrong exit code": ("<!-- run: exit 1 -->\n```sh\nllenergy --version\n```", "ended with 0"),
}

#: Mistakes that the default run tries together, on one page.
QUICK = (
    "unknown option",
    "missing baseline",
    "missing path",
    "unknown sub-command",
    "wrong command for ab",
    "unknown tox environment",
    "unknown extra",
    "command behind ||",
    "unknown program",
    "unknown ini key",
    "invalid workflow",
    "wrong command of a step",
    "invalid JSON",
    "failing script",
    "invalid Python",
)

RIGHT = """
<!-- file: words.py
WORDS = ["a", "b"]
-->
<!-- before:
from words import WORDS
def use(words): return words
-->
```python
print(use(WORDS))
```

<!-- append: words.py -->
```python
MORE = [*WORDS, "c"]
```

- in a list

  <!-- file: test_words.py -->
  ```python
  from words import MORE


  def test_words(energy):
      energy(sorted, MORE)
  ```

<!-- run -->
```console
$ pytest -q test_words.py --energy-report=mine.json
1 passed
$ mkdir kept && cp mine.json kept && llenergy report kept/mine.json
```

```sh
llenergy ab --base HEAD --output both.json -- pytest benchmarks -k 'a or b'
llenergy compare both.json --format markdown > comment.md || status=$?
```
"""

#: Wrong comments above a block, and a part of the message about each.
NOTES = {
    "<!-- not run: -->": "not run says nothing",
    "<!-- not run -->": "not run says nothing",
    "<!-- notrun: why -->": "'notrun' above a block",
    "<!-- file: -->": "file says nothing",
    "<!-- before: x = 1 -->": "the lines of before stand below it",
    "<!-- run: twice -->": "it may say: exit N",
    "<!-- with: -q\nmore\n-->": "with has one line",
    "<p>words</p>": "HTML directly above a block",
}


@pytest.fixture
def page(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    set_up(pytester, monkeypatch)
    return tmp_path / "page.md"


def test_each_mistake_is_found_with_its_line(page: Path, pytester: pytest.Pytester) -> None:
    page.write_text("# A page\n\n" + "\n\n".join(WRONG[name][0] for name in QUICK))
    found = find_failures(page, pytester)
    assert len(found) == len(QUICK)
    assert [name for name, message in zip(QUICK, found, strict=True) if WRONG[name][1] not in message] == []


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_found(page: Path, pytester: pytest.Pytester, text: str, message: str) -> None:
    page.write_text(f"# A page\n\n{text}\n")
    (found,) = find_failures(page, pytester)
    assert message in found


def test_a_correct_page_passes(page: Path, pytester: pytest.Pytester) -> None:
    page.write_text(RIGHT)
    assert find_failures(page, pytester) == []


@pytest.mark.parametrize(("note", "message"), NOTES.items())
def test_a_wrong_comment_is_found(tmp_path: Path, note: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{note}\n\n```sh\npytest\n```\n")
    with pytest.raises(ValueError, match="line 1") as caught:
        blocks(page)
    assert message in str(caught.value)
