# SPDX-License-Identifier: Apache-2.0
"""Parse server-sent events into text, token counts and arrival times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llenergy.backends.server.client import MAX_ERROR_CHARACTERS, Dialect, Stream
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.record.secrets import hide_keys
from pytest_llenergy.record.timeline import RequestTimeline

if TYPE_CHECKING:
    from typing import TypeGuard

#: How a test names a model that the server does not list.
NAME_IT = 'name it with @pytest.mark.backend_options(model="NAME")'

END_OF_STREAM = b"[DONE]"

#: Client errors of a server that has too much to do: a request that took too long, and too many requests.
BUSY_STATUSES = (408, 429)


class FailedRequestError(BackendError):
    """A request was refused, broke off or gave nothing, while others may succeed.

    Attributes:
        status: Status of its answer or of an error within the stream; 0 if the server gave none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_rejected(self) -> bool:
        """Whether the server found fault with the request itself: at no load would it have answered."""
        return 400 <= self.status < 500 and self.status not in BUSY_STATUSES


@dataclass(frozen=True)
class StreamedAnswer:
    """The parsed answer of one request.

    Attributes:
        token_ids: Empty if the server does not return them.
        exact: Whether each token arrived in its own chunk.
        cached_tokens: Prompt tokens that were not computed; None if unknown.
    """

    text: str
    token_ids: list[int]
    request: RequestTimeline
    exact: bool
    cached_tokens: int | None


def answer_text(stream: Stream) -> str:
    """Return the text of an answer as far as it can be read; faults of the stream are for ``read_answer``."""
    texts = []
    for _, data in _iterate_events(stream):
        with suppress(msgspec.DecodeError, AttributeError, IndexError, KeyError, TypeError):
            texts.append(_said(msgspec.json.decode(data)["choices"][0]))
    return "".join(texts)


def has_tokens_after(stream: Stream, time_ns: int) -> bool:
    """Return whether a stream, which may go on, has text or reasoning that arrived after a time."""
    late = list(takewhile(lambda read: read[0] > time_ns, reversed(stream.reads)))
    # Begins in the middle of an event perhaps, which is left out.
    for _, data in _iterate_events(Stream(reads=late[::-1])):
        with suppress(msgspec.DecodeError, AttributeError, IndexError, KeyError, TypeError):
            choice = msgspec.json.decode(data)["choices"][0]
            if _said(choice) or _thought(choice):
                return True
    return False


def _said(choice: Mapping[str, Any]) -> str:
    """Return the text of a chunk, from either endpoint."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _thought(choice: Mapping[str, Any]) -> str:
    """Return the reasoning in a chunk of the chat endpoint, whose tokens are output tokens too."""
    delta = choice.get("delta") or {}
    return delta.get("reasoning_content") or delta.get("reasoning") or ""


@dataclass(frozen=True)
class _Event:
    """A chunk. ``text`` is part of the answer; ``has_text`` is also set by reasoning."""

    time_ns: int
    text: str
    has_text: bool
    ids: list[int]
    so_far: int | None
    ends: bool


def read_answer(stream: Stream, dialect: Dialect, name: str) -> StreamedAnswer:
    """Parse the stream of one request.

    Args:
        stream: The recorded stream.
        dialect: The kind of server.
        name: Name of the request, for messages.

    Raises:
        ModelError: The server does not know the model.
        FailedRequestError: This request failed.
        BackendError: The server does not follow the API.
    """
    _check_status(stream, name)
    try:
        return _read_events(stream, dialect, name)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BackendError(
            f"server: {name}: its stream does not follow the OpenAI API ({type(error).__name__}: {error})"
        ) from error


def _read_events(stream: Stream, dialect: Dialect, name: str) -> StreamedAnswer:
    events: list[_Event] = []
    usage: Mapping[str, Any] | None = None
    ended = False
    for time_ns, data in _iterate_events(stream):
        if data == END_OF_STREAM:
            ended = True
            break
        event = _decode_event(data, name)
        usage = event.get("usage") or usage
        for choice in (event.get("choices") or ())[:1]:
            reason = choice.get("finish_reason")
            ids = choice.get("token_ids") or []
            text = _said(choice)
            has_text = bool(text or _thought(choice))
            events.append(_Event(time_ns, text, has_text, ids, dialect.so_far(event), reason is not None))
    if stream.broke or not ended:
        why = stream.broke or "no [DONE]"
        chunks = f"{len(events)} chunk{'s' if len(events) != 1 else ''}"
        raise FailedRequestError(f"server: {name}: the stream broke off after {chunks} ({why})")
    return _build_answer(stream, events, usage, name)


def _build_answer(
    stream: Stream, events: list[_Event], usage: Mapping[str, Any] | None, name: str
) -> StreamedAnswer:
    produced, prompt_tokens = (usage or {}).get("completion_tokens"), (usage or {}).get("prompt_tokens")
    if not (_is_count(produced) and _is_count(prompt_tokens)):
        raise BackendError(
            f"server: {name}: no usage in the stream, so tokens cannot be counted; the server must support "
            "stream_options.include_usage"
        )
    if produced < 1:
        raise FailedRequestError(f"server: {name}: no tokens were produced")
    counts = _chunk_token_counts(events, produced)
    stamps = [event.time_ns for event in events if event.has_text]
    if counts is None and not stamps:
        raise BackendError(f"server: {name}: {produced} tokens but no text")
    token_ns: tuple[int, ...] = ()
    chunk_ns: tuple[int, ...] = ()
    if counts is not None:
        pairs = list(zip(events, counts, strict=True))
        token_ns = tuple(event.time_ns for event, count in pairs for _ in range(count))
        if max(counts) > 1:
            chunk_ns = tuple(event.time_ns for event, count in pairs if count)
    first_ns, last_ns = (token_ns[0], token_ns[-1]) if token_ns else (stamps[0], stamps[-1])
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if not (cached is None or _is_count(cached)):
        raise ValueError(f"cached_tokens is {cached!r}")
    ids = [token for event in events for token in event.ids]
    return StreamedAnswer(
        text="".join(event.text for event in events),
        token_ids=ids if len(ids) == produced else [],
        request=RequestTimeline(
            input_tokens=prompt_tokens,
            output_tokens=produced,
            start_ns=stream.sent_ns,
            first_token_ns=first_ns,
            last_token_ns=last_ns,
            token_ns=token_ns,
            chunk_ns=chunk_ns,
            cached_tokens=cached,
        ),
        exact=counts is not None and all(count <= 1 for count in counts),
        cached_tokens=cached,
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _chunk_token_counts(events: list[_Event], produced: int) -> list[int] | None:
    """Return the number of tokens in each chunk; None if unknown, or if the server's numbers are
    inconsistent.

    A token without text, such as the one that ends the sequence, counts in the last chunk.
    """
    if events and all(event.so_far is not None for event in events if event.has_text):
        counts, before = [], 0
        for event in events:
            now = before if event.so_far is None else event.so_far
            if not before <= now <= produced:
                return None
            counts.append(now - before)
            before = now
        if produced - before > 1:
            return None
        counts[-1] += produced - before
        return counts
    counts = [int(event.has_text) for event in events]
    if sum(counts) == produced:
        return counts
    if sum(counts) == produced - 1 and events and events[-1].ends and not events[-1].has_text:
        return [*counts[:-1], 1]
    return None


def _check_status(stream: Stream, name: str) -> None:
    if stream.status == 200 or (stream.status == 0 and stream.broke):
        if stream.status == 0:
            raise FailedRequestError(f"server: {name}: no answer ({stream.broke})")
        return
    message = error_text(stream.body())
    if stream.status == 404:
        raise ModelError(f"server: {name}: 404 from {stream.path}: {message}; {NAME_IT}")
    raise FailedRequestError(f"server: {name}: {stream.status} from {stream.path}: {message}", stream.status)


def error_text(body: str) -> str:
    """Return an error's message in one line; the body itself if it is not in the API's format."""
    body = hide_keys(body)
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return " ".join(body.split())[:MAX_ERROR_CHARACTERS] or "no message"
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_ERROR_CHARACTERS]


def _iterate_events(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Yield the data of each event with the time at which its line was complete."""
    rest = b""
    for time_ns, data in stream.reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_ns, line.removeprefix(b"data:").strip()


def _decode_event(data: bytes, name: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BackendError(f"server: {name}: a chunk cannot be parsed ({error})") from None
    if isinstance(event, dict) and "error" not in event:
        return event
    what = event["error"] if isinstance(event, dict) else None
    # vLLM and llama.cpp give the status, others a word.
    code = what.get("code") if isinstance(what, dict) else None
    raise FailedRequestError(
        f"server: {name}: {error_text(data.decode(errors='replace'))}", code if _is_count(code) else 0
    )
