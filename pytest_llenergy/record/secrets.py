# SPDX-License-Identifier: Apache-2.0
"""What a secret is called, and commands, texts and values without secrets.

A text is split into the words of a shell, and a word into names and a value, which may be a text again. Where
the end of a secret is in doubt, more is hidden.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

#: Stands for a secret.
HIDDEN = "***"

#: Names of passwords, which may have any character: ``ssl_keyfile_password``, ``AWS_SECRET``.
_PASSWORD = r"(?i:[\w.-]*(?:pass(?:word|wd|phrase)|secret|credential|authorization|db_pass|_pwd)s?)"

#: Names of keys: ``hf_token``, ``api-key``, ``WANDB_KEY``, ``engine.token``. Models have many tokens of their
#: own, such as ``eos_token`` and ``IMAGE_TOKEN``, and a ``key`` can be anything: in small letters, the word
#: before them decides.
_KEY = (
    r"(?:(?i:(?:[\w.-]*\.)?(?:token|auth|pat)|(?:[\w.-]*[_.-]|(?-i:[\w.-]*[a-z\d](?=[A-Z])))?"
    r"(?:access|account|admin|api|auth|bearer|client|deploy|encryption|github|gitlab|hf|hub|master|ngc|oauth|"
    r"openai|private|refresh|secret|security|service|session|signing|wandb)[_-]?(?:keys?|token|pat))"
    r"|(?:(?!(?:AUDIO|BOS|EOS|IMAGE|PAD|VIDEO)_TOKEN)[A-Z\d_]*_)?(?:KEY|TOKEN|PAT))"
)
_SECRET = f"(?:{_PASSWORD}|{_KEY})"
_NAME = re.compile(_SECRET)
_IS_PASSWORD = re.compile(_PASSWORD)

#: Quoted text, which may lack its end, and a word of a shell.
_QUOTED = r"\"(?:\\.|[^\"\\])*(?:\"|$)|'[^']*(?:'|$)"
_WORD = re.compile(rf"(?:{_QUOTED}|\\[^\n]|[^\s\"'\\;&|()<>])+", re.DOTALL)

#: A word without a value.
_BARE = re.compile(r"[\w.-]*")

#: What ends a command.
_OPERATOR = re.compile("[;&|]")

#: An option at the end of a word, and what is an option and no value.
_OPTION = re.compile(r"(?<![\w.-])--?([\w.-]+)[\"']?,?$")
_SWITCH = re.compile("--.*|-[a-z]{1,3}", re.DOTALL)

#: A secret with its value in the same word, and names in front of a value: ``--model_args=pretrained=``.
_ITEM = re.compile(rf"(--?|-[A-Za-z]|)({_SECRET})=")
_HEADS = re.compile(rf"(?:(?!{_ITEM.pattern})-{{0,2}}[\w.-]+=)*")

#: A secret in a list or a call, and its value there, which ends at the next name.
_NEXT_ITEM = re.compile(rf"(?<=[,;(]){_ITEM.pattern}")
_VALUE = re.compile(rf"(?:{_QUOTED}|\\.|(?![,;](?:[\w.-]+=|$))[^\"'\\])*", re.DOTALL)

#: Words after which an assignment is one word, and no command that begins with it.
_ENVIRONMENT = re.compile(r"(?:.*[/=])?(?:env|export|sudo)|-e|--env|-i|\w+=.*", re.DOTALL)

#: What stands for the word before a command, which may begin with assignments.
_BEGINS = "env"

#: An option whose value is a command of a shell.
_SHELL = re.compile("-[a-z]*c")

#: A header of HTTP, or a line of YAML, and the rest of it.
_SCHEME = "(?i:apikey|basic|bearer|digest|negotiate|token)"
_HEADER = re.compile(rf"(?<![\w./:-]){_SECRET}(?:\\[\"'])?:(?!:|//)(?:{_SCHEME}$)?")
_LINE = re.compile(r"(\s*(?:[|>][+-]?\s+)?)(?=\S)[^\n]+")

#: A member of JSON or of a dictionary in Python, an option in a list of them, and what its value consists of.
_MEMBER = re.compile(rf"[\"'](?:{_SECRET}[\"']\s*:|--?{_SECRET}[\"']\s*,(?!\s*[\"']-))\s*(?=\S)")
_PART = re.compile(r"\"(?:\\.|[^\"\\])*(?:\"|$)|'(?:\\.|[^'\\])*(?:'|$)|[\[{(]|[\]})]|,", re.DOTALL)

#: User and password of a URL, and values of its query. A name without a password can be a key with HTTP; with
#: other schemes it is a user, an image or a model.
_URL_USER = re.compile(r"(https?://|://(?=[^/\s\"'@]*:))[^/\s\"']+(?=@)")
_URL_QUERY = re.compile(rf"([?&#]{_SECRET}=)[^&#\s\"']+")


def is_secret(name: str) -> bool:
    """Whether an option, a member or an environment variable of this name is a secret."""
    return _NAME.fullmatch(name.lstrip("-")) is not None


def redact_secrets(words: Iterable[str]) -> list[str]:
    """Replace secrets in the words of a command, given as options, variables, JSON or in URLs, by ``***``.

    A word may itself be a command.
    """
    return [str(word) for word in _redact_words([*words])]


def redact_text(text: str) -> str:
    """Replace secrets in a text that may be a command, or contain one."""
    if (shown := _redact_json(text)) is not None:
        return shown
    text = _redact_urls(_redact_members(text))
    redacted, end, previous = [], 0, _begin(text.split())
    while found := _WORD.search(text, end):
        between, raw = text[end : found.start()], found[0]
        end = found.end()
        if _OPERATOR.search(between):
            previous = _BEGINS
        # Quotes tell where the value of a secret ends.
        word = raw if "=" in raw and _find_item(raw, _find_end(_HEADS, raw)) else _unquote(raw)
        shown = _redact_word(word, previous)
        if shown == word:
            shown = raw
        elif word != raw and re.search(r"[\s;&|()<>]", shown):
            shown = shlex.quote(shown)
        redacted += [between, shown]
        previous = "" if shown == HIDDEN else word
        header = _HEADER.search(raw)
        if header and header.end() == len(raw) and (line := _LINE.match(text, end)):
            redacted += [line[1], HIDDEN]
            end = line.end()
    return "".join([*redacted, text[end:]])


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
        several = _redact_words([*value])
        hidden = tuple(several) if isinstance(value, tuple) else several
    else:
        return value
    return value if hidden == value else hidden


def _redact_words(words: list[Any]) -> list[Any]:
    redacted: list[Any] = []
    previous = _begin(words)
    for word in words:
        is_word = isinstance(word, str)
        if is_word:
            shown = _redact_word(word, previous)
        else:
            shown = HIDDEN if _awaits_secret(previous) else hide_secrets(word)
        redacted.append(shown)
        previous = word if is_word and shown != HIDDEN else ""
    return redacted


def _begin(words: list[Any]) -> str:
    return _BEGINS if len(words) > 1 else ""


def _redact_word(word: str, previous: str) -> str:
    """Hide what is secret in a word, given the word before it. It may still have quotes of its own."""
    if _awaits_secret(previous) and not _SWITCH.fullmatch(word):
        return HIDDEN
    if _BARE.fullmatch(word):
        return word
    if _SHELL.fullmatch(previous):
        return redact_text(word)
    start = _find_end(_HEADS, word)
    if (shown := _redact_json(word[start:])) is not None:
        return word[:start] + shown
    before = word[:start].rstrip("=").rpartition("=")[2] or previous
    item = _find_item(word, start)
    is_text = re.search(r"[\s\"']", word) is not None
    is_value = not is_text or _WORD.fullmatch(word)
    if item and (is_value or (item.start() == start and not _begins_command(item, before))):
        return _redact_urls(_redact_items(word, item, before))
    if is_text:
        return word[:start] + redact_text(word[start:])
    word = _redact_urls(word)
    header = _HEADER.search(word)
    return word[: header.end()] + HIDDEN if header and header.end() < len(word) else word


def _awaits_secret(word: str) -> bool:
    option = _OPTION.search(word)
    return is_secret(option[1]) if option else word.rpartition("=")[2].lower() == "bearer"


def _find_end(pattern: re.Pattern[str], text: str, start: int = 0) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start


def _find_item(word: str, start: int) -> re.Match[str] | None:
    return _ITEM.match(word, start) or _NEXT_ITEM.search(word, start)


def _begins_command(item: re.Match[str], before: str) -> bool:
    """Whether a word with spaces is a command that begins with this variable, not a value with spaces."""
    return not item[1] and item[2].isupper() and not _ENVIRONMENT.fullmatch(before)


def _redact_items(word: str, item: re.Match[str] | None, before: str) -> str:
    """Hide the rest of an option, a variable or a password, and of a list the values of secrets."""
    redacted, end = [], 0
    while item:
        in_list = item.start() > 0 and word[item.start() - 1] != "="
        is_variable = item[2].isupper() and not before.startswith("-")
        whole = item[1] or _IS_PASSWORD.fullmatch(item[2])
        redacted += [word[end : item.end()], HIDDEN]
        if whole or (not in_list and (is_variable or _ENVIRONMENT.fullmatch(before))):
            return "".join(redacted)
        end = _find_end(_VALUE, word, item.end())
        item = _NEXT_ITEM.search(word, end)
    return "".join([*redacted, word[end:]])


def _redact_json(text: str) -> str | None:
    """Return JSON without secrets; None for other texts."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
        hidden = hide_secrets(value)
        return text if hidden is value else json.dumps(hidden)
    except (ValueError, RecursionError):
        return None


def _redact_members(text: str) -> str:
    """Hide members in what is not quite JSON: a dictionary of Python, a part of a text, or JSON cut short."""
    redacted, end = [], 0
    while found := _MEMBER.search(text, end):
        redacted += [text[end : found.end()], HIDDEN]
        depth, end = 0, len(text)
        for part in _PART.finditer(text, found.end()):
            if depth == 0 and part[0] in ("]", "}", ")", ","):
                end = part.start()
                break
            depth += (part[0] in ("[", "{", "(")) - (part[0] in ("]", "}", ")"))
    return "".join([*redacted, text[end:]])


def _redact_urls(text: str) -> str:
    return _URL_QUERY.sub(rf"\1{HIDDEN}", _URL_USER.sub(rf"\1{HIDDEN}", text))


def _unquote(raw: str) -> str:
    if not re.search("[\"'\\\\]", raw):
        return raw
    try:
        return "".join(shlex.split(raw))
    except ValueError:
        # A quote that is not closed, such as an apostrophe.
        return re.sub("[\"'\\\\]", " ", raw)


def redact_arguments(words: Iterable[str]) -> list[str]:
    """Redact the arguments of a command line: every secret, and user, password and query of every URL."""
    return redact_secrets(re.sub(r"://\S*", lambda found: _redact_url(found[0]), word) for word in words)


def _redact_url(url: str) -> str:
    # The user comes first, since a password may contain any character.
    url = re.sub("://[^/]*@", "://", url)
    return re.split("[?#]", url, maxsplit=1)[0]
