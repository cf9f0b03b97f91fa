# SPDX-License-Identifier: Apache-2.0
"""Data sets of requests: JSON lines, JSON lists, and CSV traces."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pytest_llenergy.backends.traffic.formats import AZURE, MOONCAKE_BLOCK_TOKENS, read_row
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

KINDS = (".jsonl", ".json", ".csv")

Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class Row(msgspec.Struct):
    """A row in the plugin's own form; see ``formats``. ``timestamp`` is in milliseconds."""

    prompt: Text | None = None
    input_tokens: Count | None = None
    blocks: list[tuple[str, Count]] = []
    history: tuple[tuple[str, str], ...] = ()
    answer: str = ""
    output_tokens: Count | None = None
    timestamp: Seconds | None = None


def dataset(
    source: str | os.PathLike[str],
    *,
    column: str | None = None,
    output_tokens: int | None = None,
    limit: int | None = None,
    time_scale: float = 1.0,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    skip_bad_rows: bool = False,
) -> Requests:
    """Read requests from a file.

    Args:
        source: A ``.jsonl`` file, a ``.json`` file with a list, or a ``.csv`` trace of Azure.
        column: Key of the prompt's text if it is not ``prompt``.
        output_tokens: Tokens to generate where a row names none and has no answer.
        limit: Number of requests to take, from the start; None for all.
        time_scale: Factor for all times: 0.5 sends twice as fast.
        block_tokens: Tokens of each of a row's ``hash_ids``.
        skip_bad_rows: Leave out rows that cannot be used; the record says how many.

    Raises:
        LLEnergyError: The source or one of its rows cannot be used; the message names the line.
    """
    path, label = Path(source), f"data set {source}"
    if limit is not None:
        check_whole(label, "limit", limit)
    if not is_number(time_scale) or not time_scale:
        raise LLEnergyError(f"{label}: time_scale is {shorten(time_scale)}, needs a number, more than 0")
    requests: list[Request] = []
    skipped = 0
    try:
        for where, row in _file_rows(path):
            if len(requests) == limit:
                break
            try:
                decoded = _decode(row) if isinstance(row, bytes) else row
                found = read_row(decoded, column, block_tokens)
                requests.append(_make_request(where, found, output_tokens))
            except LLEnergyError as error:
                if not skip_bad_rows:
                    raise LLEnergyError(f"{where}: {error}") from None
                skipped += 1
        if not requests:
            raise LLEnergyError("holds no requests that can be used")
        requests = _schedule(requests, time_scale)
    except LLEnergyError as error:
        raise LLEnergyError(f"{label}: {error}") from None
    parts = [f"{len(requests)} requests of {path.name}"]
    parts += [f"{skipped} rows skipped"] if skipped else []
    parts += [f"times x {time_scale:g}"] if time_scale != 1 else []
    return Requests(requests, ", ".join(parts))


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows with their places; lines of JSON undecoded, so that each may be skipped."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise LLEnergyError(f"needs a file that ends in {', '.join(KINDS)}")
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise LLEnergyError(f"cannot be read: {error.strerror}") from None
    if kind == ".csv":
        table = csv.DictReader(io.StringIO(data.decode(errors="replace"), newline=""))
        missing = [name for name in ("TIMESTAMP", *AZURE) if name not in (table.fieldnames or ())]
        if missing:
            raise LLEnergyError(f"line 1: no column {', '.join(missing)}, as Azure's traces have")
        yield from ((f"line {table.line_num}", row) for row in table)
    elif kind == ".json":
        rows = _decode(data)
        if not isinstance(rows, list):
            raise LLEnergyError("not a JSON list of objects; use .jsonl for one object a line")
        yield from ((f"item {number}", row) for number, row in enumerate(rows, 1))
    else:
        # Not ``splitlines``: JSON texts may hold other line ends than this one.
        lines = enumerate(data.split(b"\n"), 1)
        yield from ((f"line {number}", line) for number, line in lines if line.strip())


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data.decode())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LLEnergyError(f"not JSON in UTF-8: {error}") from None


def _make_request(where: str, found: Mapping[str, Any], output_tokens: int | None) -> Request:
    """Return the request of a row. ``output_tokens`` is for rows with neither a length nor an answer."""
    try:
        row = msgspec.convert(found, Row)
    except msgspec.ValidationError as error:
        raise LLEnergyError(str(error).replace("$.", "")) from None
    if row.prompt is not None and row.input_tokens is not None:
        raise LLEnergyError("it has a prompt and input_tokens, which say how long to write one")
    blocks = row.blocks
    if row.prompt is None:
        if row.input_tokens is None:
            raise LLEnergyError(
                f"no prompt, messages, conversations or input_tokens; it has: {', '.join(map(str, found))}; "
                "column= names the key of the prompt"
            )
        # Equal names are equal blocks, and the rest is this prompt's own. Its name is that of its place
        # without the path: the digest of a data set must not depend on where it is.
        rest = row.input_tokens - sum(tokens for _, tokens in blocks)
        blocks = [*blocks, *([(f", {where}", rest)] if rest > 0 else [])]
    return Request(
        prompt=row.prompt or "",
        blocks=() if row.prompt is not None else tuple(blocks),
        history=row.history,
        output_tokens=row.output_tokens or (None if row.answer else output_tokens),
        answer="" if row.output_tokens else row.answer,
        at_s=None if row.timestamp is None else row.timestamp / 1000,
    )


def _schedule(requests: list[Request], time_scale: float) -> list[Request]:
    """Return the requests with times from the first one on."""
    times = [request.at_s for request in requests]
    timed = [at_s for at_s in times if at_s is not None]
    if not timed:
        return requests
    if len(timed) < len(times):
        raise LLEnergyError(f"request {times.index(None) + 1} has no timestamp, and others have one")
    for number, (before, at_s) in enumerate(pairwise(timed), 2):
        if at_s < before:
            raise LLEnergyError(f"request {number} is earlier than the one before; sort by timestamp")
    return [
        msgspec.structs.replace(request, at_s=(at_s - timed[0]) * time_scale)
        for request, at_s in zip(requests, timed, strict=True)
    ]
