# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, as the HTML standard parses them, with the times at which they arrived.

Parsers of packages read a response as it comes and keep no times; here bytes are recorded and parsed later.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

#: Bytes with the time at which they arrived (monotonic nanoseconds).
Reads = Sequence[tuple[int, bytes]]


def iterate_events(reads: Reads, *, ended: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield the data of each event with the time at which its last line was complete.

    Comments, other fields and events without data are left out. Of a stream that has ``ended``, the last
    event needs no empty line after it.
    """
    data: list[bytes] = []
    at_ns = 0
    for time_ns, line in _iterate_lines(reads, ended=ended):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
            at_ns = time_ns
        elif not line:
            if joined := b"\n".join(data).strip():
                yield at_ns, joined
            data = []


def _iterate_lines(reads: Reads, *, ended: bool) -> Iterator[tuple[int, bytes]]:
    """Yield lines, which end with CR, LF or both, even if the two arrive one after the other."""
    rest, after_cr, is_first = b"", False, True
    for time_ns, data in (*reads, *([(reads[-1][0], b"\n\n")] if ended and reads else [])):
        whole = data[1:] if after_cr and data.startswith(b"\n") else data
        after_cr = data.endswith(b"\r") or (after_cr and not data)
        *lines, rest = re.split(rb"\r\n|\r|\n", rest + whole)
        for line in lines:
            yield time_ns, line.removeprefix(codecs.BOM_UTF8) if is_first else line
            is_first = False


def parse_json(data: bytes | str) -> Any:
    """Parse JSON as servers write it: with NaN, lone surrogates, and bytes that are no UTF-8."""
    try:
        return json.loads(data if isinstance(data, str) else data.decode(errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def join_texts(texts: Sequence[str]) -> str:
    """Return texts as one that can be encoded: surrogates become pairs, and lone ones are replaced."""
    joined = "".join(texts)
    return joined.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
