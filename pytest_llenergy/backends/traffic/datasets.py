# SPDX-License-Identifier: Apache-2.0
"""Data sets of requests: JSON lines, JSON lists, CSV traces, and those of the Hugging Face hub by name."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pytest_llenergy.backends.traffic.requests import (
    Count,
    Request,
    Requests,
    Seconds,
    check_whole,
    is_number,
    shorten,
)
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.files import read_limited

HUB = "hf:"

#: Tokens of a block in the traces of Mooncake.
MOONCAKE_BLOCK_TOKENS = 512

#: Columns of Azure's traces of LLM inference, with the keys of the same meaning.
AZURE = {"TIMESTAMP": "timestamp", "ContextTokens": "input_length", "GeneratedTokens": "output_length"}

#: Who wrote a message that is sent, by the names of OpenAI and of ShareGPT; other roles answer.
SENDERS = {"user": "user", "human": "user", "system": "system", "developer": "system"}

Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class Message(msgspec.Struct):
    """A message of a conversation, with the keys of OpenAI or of ShareGPT."""

    role: str | None = None
    content: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    value: str | None = None


class Row(msgspec.Struct):
    """What is read of a row; ``timestamp`` is in milliseconds."""

    prompt: Text | None = None
    messages: list[Message] | None = None
    conversations: list[Message] | None = None
    turns: Annotated[list[Row], msgspec.Meta(min_length=1)] | None = None
    input_length: Count | None = None
    input_tokens: Count | None = None
    hash_ids: list[int] | None = None
    output_length: Count | None = None
    output_tokens: Count | None = None
    timestamp: Seconds | None = None
    think_s: Seconds = 0.0


def dataset(
    source: str | os.PathLike[str],
    *,
    column: str | None = None,
    output_tokens: int | None = None,
    limit: int | None = None,
    time_scale: float = 1.0,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    name: str | None = None,
    split: str = "train",
) -> Requests:
    """Read requests from a file or a data set of the Hugging Face hub.

    Args:
        source: A ``.jsonl`` file, a ``.json`` file with a list, a ``.csv`` file with the columns of Azure's
            traces, or ``hf:`` and a name or directory for ``datasets.load_dataset``.
        column: Key of the prompt's text if it is not ``prompt``.
        output_tokens: Tokens to generate where a row names none and has no answer.
        limit: Number of requests to take, from the start; None for all.
        time_scale: Factor for all times: 0.5 sends twice as fast.
        block_tokens: Tokens of each of a row's ``hash_ids``.
        name: Configuration of a data set of the hub.
        split: Split of a data set of the hub.

    Raises:
        LLEnergyError: The source or one of its rows cannot be used; the message names the line.
    """
    label = f"data set {source}"
    if limit is not None:
        check_whole(label, "limit", limit)
    if not is_number(time_scale) or not time_scale:
        raise LLEnergyError(f"{label}: time_scale is {shorten(time_scale)}, needs a number, more than 0")
    text = str(source)
    if text.startswith(HUB):
        rows = _hub_rows(label, text.removeprefix(HUB), name, split)
    else:
        rows = _file_rows(label, Path(source))
    reader = _Reader(label, output_tokens, block_tokens)
    requests = [reader.read(where, _convert(where, row, column)) for where, row in islice(rows, limit)]
    if not requests:
        raise LLEnergyError(f"{label} holds no requests")
    shown = Path(text).name if not text.startswith(HUB) else text
    parts = (f"{len(requests)} requests of {shown}", f"times x {time_scale:g}" if time_scale != 1 else "")
    return Requests(_scheduled(label, requests, time_scale), ", ".join(filter(None, parts)))


def _scheduled(label: str, requests: list[Request], time_scale: float) -> list[Request]:
    """Return the requests with times from the first one on."""
    times = [request.at_s for request in requests]
    timed = [at_s for at_s in times if at_s is not None]
    if not timed:
        return requests
    if len(timed) < len(times):
        raise LLEnergyError(f"{label}: request {times.index(None) + 1} has no timestamp, and others have one")
    for number, (before, at_s) in enumerate(pairwise(timed), 2):
        if at_s < before:
            raise LLEnergyError(
                f"{label}: request {number} is earlier than the one before; sort by timestamp"
            )
    return [
        msgspec.structs.replace(request, at_s=(at_s - timed[0]) * time_scale)
        for request, at_s in zip(requests, timed, strict=True)
    ]


def _convert(where: str, row: Any, column: str | None) -> Row:
    if isinstance(row, dict) and column is not None:
        row = {**row, "prompt": row.get(column)}
    try:
        # Numbers of CSV files are texts.
        found = msgspec.convert(row, Row, strict=not isinstance(row, _CsvRow))
    except msgspec.ValidationError as error:
        raise LLEnergyError(f"{where}: {str(error).replace('$.', '')}") from None
    kinds = (found.prompt, found.messages, found.conversations, found.turns)
    if all(each is None for each in (*kinds, found.input_length, found.input_tokens)):
        has = ", ".join(map(str, row)) or "nothing"
        raise LLEnergyError(
            f"{where}: no {column or 'prompt, messages, conversations, turns or input_length'}; it has: "
            f"{has}; column= names the key of the prompt"
        )
    return found


@dataclass(frozen=True)
class _Reader:
    """Makes a request of a row. ``where`` names the row in messages."""

    label: str
    output_tokens: int | None
    block_tokens: int

    def read(self, where: str, row: Row) -> Request:
        messages = row.messages or row.conversations
        if row.turns is not None:
            first, *others = (self._turn(f"{where}, turn {n}", turn) for n, turn in enumerate(row.turns, 1))
            request = msgspec.structs.replace(first, follow_ups=tuple(others))
        elif row.prompt is None and messages is not None:
            request = self._dialogue(where, messages, row)
        else:
            request = self._turn(where, row)
        return msgspec.structs.replace(request, at_s=None if row.timestamp is None else row.timestamp / 1000)

    def _turn(self, where: str, row: Row) -> Request:
        tokens, length = row.input_length or row.input_tokens, self._output_tokens(row)
        if row.prompt is not None:
            return Request(prompt=row.prompt, output_tokens=length, think_s=row.think_s)
        if tokens is None:
            raise LLEnergyError(f"{where}: no prompt and no input_tokens")
        # As in traces of Mooncake: equal ids are equal blocks, and the rest is this prompt's own.
        size, ids = self.block_tokens, row.hash_ids or []
        if (len(ids) - 1) * size >= tokens:
            raise LLEnergyError(
                f"{where}: {len(ids)} hash_ids of {size} tokens are more than the prompt's {tokens}; see "
                "block_tokens"
            )
        blocks = [(f"hash/{each}", min(size, tokens - n * size)) for n, each in enumerate(ids)]
        rest = tokens - sum(length for _, length in blocks)
        # Without the path: the digest of a data set must not depend on where it is.
        blocks += [(where.removeprefix(self.label), rest)] if rest else []
        return Request(blocks=tuple(blocks), output_tokens=length, think_s=row.think_s)

    def _output_tokens(self, row: Row) -> int | None:
        return row.output_tokens or row.output_length or self.output_tokens

    def _dialogue(self, where: str, messages: list[Message], row: Row) -> Request:
        """Return a conversation in the form of OpenAI or ShareGPT; its answers only give output lengths."""
        length = self._output_tokens(row)
        system, turns = [], list[Request]()
        for message in messages:
            sender = SENDERS.get(message.role or message.from_ or "", "answer")
            text = message.content or message.value or ""
            if sender != "answer" and not text.strip():
                raise LLEnergyError(f"{where}: a message of {sender} has no text")
            if sender == "system":
                system.append(text)
            elif sender == "user":
                turns.append(Request(prompt=text, output_tokens=length))
            elif turns and text and not turns[-1].answer and length in (None, self.output_tokens):
                turns[-1] = msgspec.structs.replace(turns[-1], answer=text, output_tokens=None)
        if not turns:
            raise LLEnergyError(f"{where}: no message of a user")
        return msgspec.structs.replace(turns[0], system="\n\n".join(system), follow_ups=tuple(turns[1:]))


class _CsvRow(dict[str, Any]):
    """A row whose numbers are texts."""


def _file_rows(label: str, path: Path) -> Iterator[tuple[str, Any]]:
    kinds = (".jsonl", ".json", ".csv")
    kind = path.suffix.lower()
    if kind not in kinds:
        raise LLEnergyError(f"{label}: needs a file that ends in {', '.join(kinds)}, or {HUB}NAME")
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise LLEnergyError(f"{label} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LLEnergyError(f"{label} is not UTF-8 text ({error}); convert it") from None
    if kind == ".csv":
        yield from _csv_rows(label, text)
    elif kind == ".json":
        rows = _decode(label, text)
        if not isinstance(rows, list):
            raise LLEnergyError(f"{label} is not a JSON list of objects; use .jsonl for one object a line")
        yield from ((f"{label}, item {number}", row) for number, row in enumerate(rows, 1))
    else:
        # Not ``splitlines``: JSON texts may hold other line ends than this one.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{label}, line {number}", _decode(f"{label}, line {number}", line)


def _decode(where: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise LLEnergyError(f"{where} is not JSON: {error}") from None


def _csv_rows(label: str, text: str) -> Iterator[tuple[str, Any]]:
    table = csv.DictReader(text.splitlines())
    missing = [column for column in AZURE if column not in (table.fieldnames or ())]
    if missing:
        raise LLEnergyError(
            f"{label}, line 1: no column {', '.join(missing)}; needs the columns {', '.join(AZURE)}"
        )
    for line in table:
        where = f"{label}, line {table.line_num}"
        row = {AZURE[column]: line[column] or "" for column in AZURE}
        yield where, _CsvRow({**row, "timestamp": _milliseconds(where, row["timestamp"])})


def _milliseconds(where: str, text: str) -> float:
    # Azure writes seven digits of a second; Python 3.10 reads three or six.
    fitting = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text.strip())
    try:
        at = datetime.fromisoformat(fitting)
    except ValueError:
        raise LLEnergyError(
            f"{where}: TIMESTAMP is {text!r}, needs a form like 2023-11-16 18:15:46.68"
        ) from None
    return (at - datetime(2000, 1, 1, tzinfo=at.tzinfo)).total_seconds() * 1000


def _hub_rows(label: str, path: str, name: str | None, split: str) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        raise LLEnergyError(f"{label} needs the package datasets: pip install datasets")
    try:
        rows = importlib.import_module("datasets").load_dataset(path, name, split=split)
    except Exception as error:
        # Whatever the library, its file formats and its network raise.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LLEnergyError(f"{label}: datasets cannot load it: {reason}") from error
    for number, row in enumerate(rows, 1):
        yield f"{label}, row {number}", row
