# SPDX-License-Identifier: Apache-2.0
"""Data sets of requests: JSON lines, JSON lists, CSV traces, and those of the Hugging Face hub by name."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.traffic.requests import Request, Requests, check_whole, is_number, shorten
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.files import read_limited

HUB = "hf:"

#: Tokens of a block in the traces of Mooncake.
MOONCAKE_BLOCK_TOKENS = 512

#: Columns of Azure's traces of LLM inference, with the keys of the same meaning.
AZURE = {"TIMESTAMP": "timestamp", "ContextTokens": "input_length", "GeneratedTokens": "output_length"}

KEYS = "prompt, messages, conversations, turns or input_length"

#: Who wrote a message that is sent, by the names of OpenAI and of ShareGPT; other roles answer.
SENDERS = {"user": "user", "human": "user", "system": "system", "developer": "system"}

Row = tuple[str, Mapping[str, Any]]


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
    if not isinstance(source, (str, os.PathLike)):
        raise LLEnergyError(f"data set: source is {shorten(source)}, needs a path or {HUB}NAME")
    label = f"data set {source}"
    for key, value in {"column": column, "name": name, "split": split}.items():
        if not isinstance(value, str) and (value is not None or key == "split"):
            raise LLEnergyError(f"{label}: {key} is {shorten(value)}, needs text")
    if limit is not None:
        check_whole(label, "limit", limit)
    check_whole(label, "block_tokens", block_tokens)
    if output_tokens is not None:
        check_whole(label, "output_tokens", output_tokens)
    if not is_number(time_scale) or not time_scale:
        raise LLEnergyError(f"{label}: time_scale is {shorten(time_scale)}, needs a number, more than 0")
    text = str(source)
    rows: Iterable[Row]
    if text.startswith(HUB):
        rows = _hub_rows(label, text.removeprefix(HUB), name, split)
    else:
        rows = _file_rows(label, Path(source))
    reader = _Reader(label, column, output_tokens, block_tokens)
    requests = [reader.read(*row) for row in islice(rows, limit)]
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


@dataclass(frozen=True)
class _Reader:
    """Makes a request of a row. ``where`` names the row in messages."""

    label: str
    column: str | None
    output_tokens: int | None
    block_tokens: int

    def read(self, where: str, row: Mapping[str, Any]) -> Request:
        request = self._conversation(where, row)
        at_s = row.get("timestamp")
        if at_s is None:
            return request
        if not is_number(at_s):
            raise LLEnergyError(f"{where}: timestamp is {shorten(at_s)}, needs milliseconds of 0 or more")
        return msgspec.structs.replace(request, at_s=at_s / 1000)

    def _conversation(self, where: str, row: Mapping[str, Any]) -> Request:
        turns = row.get("turns")
        if turns is None:
            found = next((row[key] for key in ("messages", "conversations") if key in row), None)
            return self._turn(where, row) if found is None else self._dialogue(where, found, row)
        if not isinstance(turns, list) or not turns or not all(isinstance(each, dict) for each in turns):
            raise LLEnergyError(f"{where}: turns is {shorten(turns)}, needs a list of objects")
        first, *others = (self._turn(f"{where}, turn {number}", turn) for number, turn in enumerate(turns, 1))
        return msgspec.structs.replace(first, follow_ups=tuple(others))

    def _turn(self, where: str, row: Mapping[str, Any]) -> Request:
        think_s = row.get("think_s", 0.0)
        if not is_number(think_s):
            raise LLEnergyError(f"{where}: think_s is {shorten(think_s)}, needs seconds of 0 or more")
        output_tokens = self._output_tokens(where, row)
        key = self.column or "prompt"
        if key in row:
            return Request(
                prompt=_text(where, key, row[key]), output_tokens=output_tokens, think_s=float(think_s)
            )
        length = next((name for name in ("input_length", "input_tokens") if name in row), None)
        if length is None or self.column is not None:
            text = next((name for name, value in row.items() if isinstance(value, str)), None)
            hint = f'; use column="{text}" if that is the prompt' if text and self.column is None else ""
            has = ", ".join(map(str, row)) or "nothing"
            raise LLEnergyError(f"{where}: no {self.column or KEYS}; it has: {has}{hint}")
        if row.get("input_tokens", row[length]) != row[length]:
            raise LLEnergyError(f"{where}: input_length and input_tokens differ; keep one of them")
        tokens = check_whole(where, length, row[length])
        blocks = self._blocks(where, tokens, row.get("hash_ids"))
        return Request(blocks=blocks, output_tokens=output_tokens, think_s=float(think_s))

    def _blocks(self, where: str, tokens: int, ids: Any) -> tuple[tuple[str, int], ...]:
        """Return the blocks of a prompt: those of its hash ids, then one of its own."""
        size, blocks = self.block_tokens, []
        if ids is not None:
            if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
                raise LLEnergyError(f"{where}: hash_ids is {shorten(ids)}, needs a list of whole numbers")
            if (len(ids) - 1) * size >= tokens:
                raise LLEnergyError(
                    f"{where}: {len(ids)} hash_ids of {size} tokens are more than the prompt's {tokens}; "
                    "see block_tokens"
                )
            blocks = [(f"hash/{each}", min(size, tokens - n * size)) for n, each in enumerate(ids)]
        rest = tokens - sum(length for _, length in blocks)
        # Without the path: the digest of a data set must not depend on where it is.
        return (*blocks, (where.removeprefix(self.label), rest)) if rest else tuple(blocks)

    def _output_tokens(self, where: str, row: Mapping[str, Any]) -> int | None:
        for name in ("output_tokens", "output_length"):
            if row.get(name) is not None:
                return check_whole(where, name, row[name])
        return self.output_tokens

    def _dialogue(self, where: str, messages: Any, row: Mapping[str, Any]) -> Request:
        """Return a conversation in the form of OpenAI or ShareGPT; its answers only give output lengths."""
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise LLEnergyError(f"{where}: messages is {shorten(messages)}, needs a list of objects")
        length = self._output_tokens(where, row)
        system, turns = "", list[Request]()
        for message in messages:
            role, text = (
                message.get("role", message.get("from")),
                message.get("content", message.get("value")),
            )
            sender = SENDERS.get(str(role), "answer")
            text = _text(where, "the text of a message", text) if sender != "answer" else str(text or "")
            if sender == "system":
                system = f"{system}\n\n{text}" if system else text
            elif sender == "user":
                turns.append(Request(prompt=text, output_tokens=length))
            elif turns and text and not turns[-1].answer and (length is None or length == self.output_tokens):
                turns[-1] = msgspec.structs.replace(turns[-1], answer=text, output_tokens=None)
        if not turns:
            raise LLEnergyError(f"{where}: no message of a user")
        return msgspec.structs.replace(turns[0], system=system, follow_ups=tuple(turns[1:]))


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise LLEnergyError(f"{where}: {name} is {shorten(value)}, needs text")
    return value


def _file_rows(label: str, path: Path) -> Iterable[Row]:
    kinds = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}
    read = kinds.get(path.suffix.lower())
    if read is None:
        raise LLEnergyError(f"{label}: needs a file that ends in {', '.join(kinds)}, or {HUB}NAME")
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise LLEnergyError(f"{label} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LLEnergyError(f"{label} is not UTF-8 text ({error}); convert it") from None
    return read(label, text)


def _jsonl_rows(label: str, text: str) -> Iterator[Row]:
    # Not ``splitlines``: JSON texts may hold other line ends than this one.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{label}, line {number}"
            yield where, _object(where, _decode(where, line))


def _json_rows(label: str, text: str) -> Iterator[Row]:
    rows = _decode(label, text)
    if not isinstance(rows, list):
        raise LLEnergyError(f"{label} is not a JSON list of objects; use .jsonl for one object a line")
    for number, row in enumerate(rows, 1):
        where = f"{label}, item {number}"
        yield where, _object(where, row)


def _decode(where: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise LLEnergyError(f"{where} is not JSON: {error}") from None


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise LLEnergyError(f"{where} is {shorten(row)}, needs a JSON object")
    return row


def _csv_rows(label: str, text: str) -> Iterator[Row]:
    table = csv.DictReader(text.splitlines())
    missing = [column for column in AZURE if column not in (table.fieldnames or ())]
    if missing:
        raise LLEnergyError(
            f"{label}, line 1: no column {', '.join(missing)}; needs the columns {', '.join(AZURE)}"
        )
    for line in table:
        where = f"{label}, line {table.line_num}"
        row: dict[str, Any] = {"timestamp": _milliseconds(where, line["TIMESTAMP"] or "")}
        for column in ("ContextTokens", "GeneratedTokens"):
            try:
                tokens: int | str | None = int(line[column] or "")
            except ValueError:
                tokens = line[column]
            row[AZURE[column]] = check_whole(where, column, tokens)
        yield where, row


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


def _hub_rows(label: str, path: str, name: str | None, split: str) -> Iterator[Row]:
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
