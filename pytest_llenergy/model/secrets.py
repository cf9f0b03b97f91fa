# SPDX-License-Identifier: Apache-2.0
"""What a secret is called, and commands, texts and values without secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

#: Stands for a secret.
HIDDEN = "***"

#: Names of secrets: ``hf_token``, ``--api-key``, ``WANDB_KEY``, ``engine.token``. Models have many tokens of
#: their own, such as ``eos_token`` and ``image_token``, and a ``key`` can be anything: in small letters, the
#: word before them decides.
_SECRET = (
    r"(?:(?i:[\w.-]*(?:pass(?:word|wd|phrase)|secret|credential|authorization|db_pass|_pwd)s?"
    r"|(?:[\w.-]*\.)?(?:token|auth|pat)|(?:[\w.-]*[_.-]|(?-i:[\w.-]*[a-z\d](?=[A-Z])))?"
    r"(?:access|account|admin|api|auth|bearer|client|deploy|encryption|github|gitlab|hf|hub|master|ngc|oauth|"
    r"openai|private|refresh|secret|security|service|session|signing|wandb)[_-]?(?:keys?|token|pat))"
    r"|(?:[A-Z\d_]*_)?(?:KEY|TOKEN|PAT))"
)
_NAME = re.compile(_SECRET)
_OPTION = re.compile(f"--?{_SECRET}")

#: An option with its value in the same word, or an assignment to an environment variable.
_ASSIGNED = re.compile(rf"(?:^(?:-e|--env=)?|(?<=[,(])|(?<![\w.-])(?:--?|(?=[A-Z\d_]+=))){_SECRET}=")

#: Values of these: in a word, and in a text. Both end where the next assignment of a list begins.
_NEXT = r",(?:[\w.-]+=|$)"
_VALUE = re.compile(rf"({_ASSIGNED.pattern})(?:(?!{_NEXT}).)*", re.DOTALL)
_QUOTED_VALUE = re.compile(
    rf"({_ASSIGNED.pattern})(?:\"(?:\\.|[^\"\\])*(?:\"|$)|'[^']*(?:'|$)|\\.|(?!{_NEXT})[^\"'\\])*", re.DOTALL
)

#: A member of JSON, or of a dictionary in Python.
_MEMBER = re.compile(
    rf"([\"']{_SECRET}[\"']\s*:\s*)"
    r"(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[\[{][^\]}]*[\]}]?|[^\s,}]+)"
)

#: A header of HTTP, and the user and password of a URL.
_HEADER = re.compile(rf"((?<![\w./-])(?:{_SECRET}:\s+(?:Bearer\s+|Basic\s+)?|Bearer\s+))[^\s\"'\\]+")
_URL_USER = re.compile(r"(://)[^/\s\"']*(?=@)")

#: A word of a shell, which ends at an operator. A quote that is not closed ends with the text.
_WORD = re.compile(r"((?:\"(?:\\.|[^\"\\])*(?:\"|$)|'[^']*(?:'|$)|\\.|[^\s\"'\\;&|)])+)", re.DOTALL)

#: A word after which an assignment is one word, and no command that begins with it.
_ENVIRONMENT = re.compile(r"(?:.*[/=])?(?:env|export|sudo)|-e|--env|-i|\w+=.*", re.DOTALL)

#: An option whose value is a command.
_SHELL = re.compile("-[a-z]*c")


def is_secret(name: str) -> bool:
    """Whether an option, a member or an environment variable of this name is a secret."""
    return _NAME.fullmatch(name) is not None


def redact_secrets(words: Iterable[str]) -> list[str]:
    """Replace secrets in the words of a command, given as options, variables, JSON or in URLs, by ``***``.

    A word may itself be a command.
    """
    redacted: list[str] = []
    words = [*words]
    previous = "env" if len(words) > 1 else ""  # a command may begin with assignments
    for word in words:
        # An option before another one is a switch.
        hide = _OPTION.fullmatch(previous) is not None and not word.startswith("--")
        redacted.append(HIDDEN if hide else _redact_word(word, previous))
        previous = "" if hide else word
    return redacted


def _redact_word(word: str, previous: str) -> str:
    is_text = re.search(r"[\s\"']", word) is not None or _SHELL.fullmatch(previous) is not None
    found = _ASSIGNED.search(word)
    # The value of an option or a variable may have spaces, but a shell's command may begin with a variable.
    if found and (
        not is_text or (found.start() == 0 and (word[0] == "-" or _ENVIRONMENT.fullmatch(previous)))
    ):
        word, is_text = _VALUE.sub(rf"\1{HIDDEN}", word), False
    return redact_text(word) if is_text else _URL_USER.sub(rf"\1{HIDDEN}", word)


def redact_text(text: str) -> str:
    """Replace secrets in a text that may be a command, or contain one."""
    for pattern in (_MEMBER, _HEADER, _URL_USER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    parts = _WORD.split(text)
    words = [_unquote(raw) for raw in parts[1::2]]
    for place, word, shown in zip(range(1, len(parts), 2), words, redact_secrets(words), strict=True):
        head = re.split("[\"']", parts[place], maxsplit=1)[0]
        if _ASSIGNED.search(head):
            parts[place] = _QUOTED_VALUE.sub(rf"\1{HIDDEN}", parts[place])
        elif shown != word:
            parts[place] = shlex.quote(shown) if re.search(r"[\s;&|]", shown) else shown
    return "".join(parts)


def _unquote(raw: str) -> str:
    try:
        return "".join(shlex.split(raw))
    except ValueError:
        # A quote that is not closed, such as an apostrophe.
        return re.sub("[\"'\\\\]", " ", raw)


def hide_secrets(value: Any) -> Any:
    """Replace the secrets in a value of an option. Returns the value itself if it has none."""
    hidden: object
    if isinstance(value, str):
        hidden = redact_text(value)
    elif isinstance(value, Mapping):
        hidden = {
            name: HIDDEN if isinstance(name, str) and is_secret(name) else hide_secrets(each)
            for name, each in value.items()
        }
    elif isinstance(value, list | tuple):
        texts = all(isinstance(each, str) for each in value)
        several = redact_secrets(value) if texts else [hide_secrets(each) for each in value]
        hidden = tuple(several) if isinstance(value, tuple) else several
    else:
        return value
    return value if hidden == value else hidden
