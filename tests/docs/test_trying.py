# SPDX-License-Identifier: Apache-2.0
"""What is wrong on a page is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import blocks
from .project import set_up
from .trying import failures_of

#: What stands on a page, and what is said of it.
WRONG = {
    "an option that nobody has": (
        "```sh\npytest --energy-raport\n```",
        "unrecognized arguments: --energy-raport",
    ),
    "a value that is none": ("```sh\npytest --energy-rounds=few\n```", "needs a whole number"),
    "a baseline that is not there": ("```sh\npytest --energy-compare=mian\n```", "mian"),
    "a path": ("```sh\npytest benchmark\n```", "there is no benchmark"),
    "a sub-command": ("```sh\nllenergy compair a b\n```", "ends with 2"),
    "an option of a sub-command": ("```sh\nllenergy ab --bass HEAD -- pytest\n```", "--bass"),
    "the command that ab runs": (
        "```sh\nllenergy ab -- pytest --energy-raport\n```",
        "unrecognized arguments",
    ),
    "a file that is not there": ("```sh\nllenergy report nothing.json\n```", "llenergy report nothing.json"),
    "an environment of tox": ("```sh\npip install tox && tox run -e bunch\n```", "tox has no bunch"),
    "an extra": ("```sh\npip install 'pytest-llenergy[everything]'\n```", "there is no extra everything"),
    "an extra in the setup of ab": (
        "```sh\nllenergy ab --setup 'pip install -e .[nope]' -- pytest\n```",
        "there is no extra nope",
    ),
    "pairs": ("```sh\nllenergy ab --pairs nonsense -- pytest\n```", "nonsense"),
    "a word that is in no name": ("```sh\npytest benchmarks -k nothing\n```", "-k selects none"),
    "what runs where a command fails": ("```sh\npytest || llenergy compair a b\n```", "ends with 2"),
    "a file for pip": ("```sh\npip install -c constrains.txt -e '.[dev]'\n```", "there is no constrains.txt"),
    "a program": ("```sh\nnvidia-smi\n```", "nvidia-smi: nothing is known of it"),
    "a program by its path": ("```sh\nbin/pytest\n```", "bash says 127"),
    "a quote that stays open": ("```sh\npytest -k 'a\n```", "bash says 2"),
    "a session without commands": ("```console\npytest\n```", "no command in it"),
    "a key of an ini file": ("```ini\n[pytest]\nenergy_raport = a.json\n```", "energy_raport"),
    "a key of a toml file": (
        '```toml\n[tool.pytest.ini_options]\nenergy_rounds = "few"\n```',
        "whole number",
    ),
    "a workflow": ("```yaml\non: push\njobs: {a: {steps: []}}\n```", "jobs.a"),
    "a step": ("```yaml\n- runs: pytest\n```", "runs"),
    "a command of a step": ("```yaml\n- run: pytest --energy-raport\n```", "unrecognized arguments"),
    "a job of GitLab": ("```yaml\na:\n  scripts: [pytest]\n```", "a"),
    "JSON": ("```json\n{'a': 1}\n```", "JSONDecodeError"),
    "a script that fails": ("```python\n1 / 0\n```", "ZeroDivisionError"),
    "Python": ("```python\ndef\n```", "SyntaxError"),
    "a test that fails": ("```python\ndef test_it():\n    assert 1 == 2\n```", "assert 1 == 2"),
    "a test that is skipped": ("```python\ndef test_it():\n    pytest.skip('why')\n```", "1 skipped"),
    "a mark": ("```python\n@pytest.mark.gpus(many=1)\ndef test_it(energy): ...\n```", "many"),
    "a mark of a test that is not run": (
        "<!-- not run: why -->\n```python\n@pytest.mark.gpus(many=1)\ndef test_it(energy): ...\n```",
        "many",
    ),
    "an exit code": ("<!-- run -->\n```sh\npytest --co -q nothing\n```", "ended with 4"),
    "an exit code that was told": ("<!-- run: exit 1 -->\n```sh\nllenergy --version\n```", "ended with 0"),
}

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

- in a list

  <!-- file: test_words.py -->
  ```python
  from words import WORDS


  def test_words(energy):
      energy(sorted, WORDS)
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

#: Comments above a block, and what is said of them.
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


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG)
def test_it_is_found(page: Path, pytester: pytest.Pytester, text: str, told: str) -> None:
    page.write_text(f"# A page\n\n{text}\n")
    (found,) = failures_of(page, pytester)
    assert told in found


def test_what_is_right_passes(page: Path, pytester: pytest.Pytester) -> None:
    page.write_text(RIGHT)
    assert failures_of(page, pytester) == []


@pytest.mark.parametrize(("note", "told"), NOTES.items())
def test_a_comment_that_says_nothing_known_is_found(tmp_path: Path, note: str, told: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{note}\n\n```sh\npytest\n```\n")
    with pytest.raises(ValueError, match="line 1") as caught:
        blocks(page)
    assert told in str(caught.value)
