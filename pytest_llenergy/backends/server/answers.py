# SPDX-License-Identifier: Apache-2.0
"""Read an answer from a recorded stream: its text, its tokens and their times, or why it failed.

The chunks, their text and the server's ``usage`` are checked against each other. Where they contradict, the
request has failed, or the times of its tokens are unknown; nothing that was guessed is called exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from pytest_llenergy.backends.secrets import hide_keys
from pytest_llenergy.backends.server.client import MAX_ERROR_CHARACTERS, Stream
from pytest_llenergy.backends.server.events import iterate_events, join_texts, parse_json
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.timeline import RequestTimeline

END_OF_STREAM = b"[DONE]"

#: Client errors of a server that has too much to do: a request that took too long, and too many requests.
BUSY_STATUSES = (408, 429)

#: How a test names a model that the server does not list.
NAME_IT = 'name it with @pytest.mark.backend_options(model="NAME")'

#: What the client does about an answer with one of these statuses, by the first or all digits.
REMEDIES = {
    "3": "redirections are not followed, because nobody would know whose energy it is; give the URL of the "
    "server itself",
    "401": "the server needs an API key: set OPENAI_API_KEY, or name another variable by "
    "--energy-server-key-env",
    "403": "does the API key allow it? OPENAI_API_KEY, or the variable that --energy-server-key-env names",
    "404": NAME_IT,
}

CACHE_UNKNOWN = "the server does not report prefix cache hits; switch its prefix cache off when starting it"

#: From this many tokens on, a stream takes longer than one reading of the connection.
STREAMED_TOKENS = 8

PAGE = "answered with an HTML page; is this a server with the OpenAI API?"

#: More is a negative number that became an unsigned one, and records would not take it.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class _Part(msgspec.Struct):
    text: str | None = None


class _Delta(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[Count] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    predicted_n: Count | None = None


class _Event(msgspec.Struct):
    """What is read of a chunk of the OpenAI API, with the counts of llama.cpp in ``timings``."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None


class FailedRequestError(BackendError):
    """A request without a usable answer, while others may succeed.

    Attributes:
        status: Status of its answer or of an error within the stream; 0 if the server gave none.
        is_rejected: Whether the server would have answered no better at any load.
    """

    def __init__(self, message: str, status: int = 0, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_rejected = is_wrong or (300 <= status < 500 and status not in BUSY_STATUSES)


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        token_ids: Empty if the server does not return them.
        exact: Whether each token arrived in its own chunk.
        finish: Why it ended, as the server says.
        doubt: Which of the server's numbers contradict each other; None if none do.
    """

    text: str
    token_ids: list[int]
    request: RequestTimeline
    exact: bool
    finish: str | None = None
    doubt: str | None = None


@dataclass(frozen=True)
class _Chunk:
    """A chunk of an answer. ``so_far`` are the tokens up to here, if the server reports them."""

    time_ns: int
    text: str
    thought: str
    ids: Sequence[int]
    so_far: int | None
    finish: str | None

    @property
    def has_text(self) -> bool:
        return bool(self.text or self.thought)


def _read_chunk(time_ns: int, event: _Event) -> _Chunk | None:
    """Return what the first choice of an event holds; None if it has none."""
    if not event.choices:
        return None
    choice = event.choices[0]
    delta = choice.delta or _Delta()
    content = delta.content or ""
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content)
    tokens = event.timings.predicted_n if event.timings else None
    if tokens is None and event.usage:
        tokens = event.usage.completion_tokens
    return _Chunk(
        time_ns=time_ns,
        text=choice.text or content,
        thought=delta.reasoning_content or delta.reasoning or ("tool" if delta.tool_calls else ""),
        ids=choice.token_ids or (),
        # Some report 0 until the end.
        so_far=tokens or None,
        finish=choice.finish_reason,
    )


def read_answer(stream: Stream, name: str) -> Answer:
    """Read the answer of one request, whose name is for messages.

    Raises:
        FailedRequestError: This request failed, or its answer cannot be used.
    """
    if stream.status == 0:
        raise FailedRequestError(f"server: {name}: no answer ({stream.broke})")
    if stream.status != 200:
        raise FailedRequestError(f"server: {name}: {explain_status(stream)}", stream.status)
    chunks: list[_Chunk] = []
    usage: _Usage | None = None
    # Chunks before the usage.
    counted = 0
    is_whole = False
    for time_ns, data in iterate_events(stream.reads, ended=stream.broke is None):
        if data == END_OF_STREAM:
            is_whole = True
            break
        event = _read_event(data, name)
        chunk = _read_chunk(time_ns, event)
        if chunk is not None:
            chunks.append(chunk)
        if event.usage is not None and event.usage.completion_tokens is not None:
            before, now = usage and usage.prompt_tokens, event.usage.prompt_tokens
            if before and now and before != now:
                raise FailedRequestError(
                    f"server: {name}: usage counts {before} tokens in the prompt, and later {now}"
                )
            usage, counted = event.usage, len(chunks)
    finish = next((chunk.finish for chunk in reversed(chunks) if chunk.finish), None)
    if stream.broke or not (is_whole or (finish and usage)):
        if not chunks and not stream.broke:
            raise FailedRequestError(f"server: {name}: {_no_stream(stream)}")
        number = f"{len(chunks)} chunk{'s' if len(chunks) != 1 else ''}"
        why = stream.broke or "no [DONE]"
        raise FailedRequestError(f"server: {name}: the stream broke off after {number} ({why})")
    produced = usage.completion_tokens if usage else None
    if usage is None or produced is None or usage.prompt_tokens is None:
        raise FailedRequestError(
            f"server: {name}: no usage in the stream, so tokens cannot be counted; the server must support "
            "stream_options.include_usage",
            is_wrong=True,
        )
    if usage.prompt_tokens < 1:
        raise FailedRequestError(f"server: {name}: usage counts no tokens in the prompt", is_wrong=True)
    _check_usage(chunks, produced, sum(chunk.has_text for chunk in chunks[counted:]), name)
    counts, doubt = _count_tokens(chunks, produced, finish)
    ids = [token for chunk in chunks for token in chunk.ids]
    # The one that ends a sequence may be left out.
    if ids and len(ids) not in (produced - 1, produced):
        counts, doubt = None, f"the chunks have {len(ids)} token ids, and usage counts {produced} tokens"
    with_text = [chunk for chunk in chunks if chunk.has_text]
    token_ns: tuple[int, ...] = ()
    chunk_ns: tuple[int, ...] = ()
    if counts is not None:
        pairs = list(zip(chunks, counts, strict=True))
        token_ns = tuple(chunk.time_ns for chunk, count in pairs for _ in range(count))
        if max(counts) > 1:
            chunk_ns = tuple(chunk.time_ns for chunk, count in pairs if count)
    details = usage.prompt_tokens_details
    return Answer(
        text=join_texts([chunk.text for chunk in chunks]),
        token_ids=ids if len(ids) == produced else [],
        request=RequestTimeline(
            input_tokens=usage.prompt_tokens,
            output_tokens=produced,
            start_ns=stream.sent_ns,
            first_token_ns=token_ns[0] if token_ns else with_text[0].time_ns,
            last_token_ns=token_ns[-1] if token_ns else with_text[-1].time_ns,
            token_ns=token_ns,
            chunk_ns=chunk_ns,
            cached_tokens=details.cached_tokens if details else None,
        ),
        exact=counts is not None and max(counts) <= 1,
        finish=finish,
        doubt=doubt,
    )


def _read_event(data: bytes, name: str) -> _Event:
    """Return an event of the API. Raises ``FailedRequestError`` for anything else, and for an error."""
    text = data.decode(errors="replace")
    try:
        event = parse_json(text)
    except ValueError as error:
        shown = show_line(text)[:80]
        raise FailedRequestError(f"server: {name}: a chunk is not JSON ({error}): {shown}") from None
    fault = event.get("error") if isinstance(event, dict) else None
    if isinstance(event, dict) and event.get("object") == "error":
        fault = event
    # A null error is none.
    if fault:
        # vLLM and llama.cpp give the status, others a word.
        code = fault.get("code") if isinstance(fault, dict) else None
        said = error_text(text)
        raise FailedRequestError(f"server: {name}: {said}", code if type(code) is int else 0)
    try:
        return msgspec.convert(event, _Event)
    except msgspec.ValidationError as error:
        raise FailedRequestError(
            f"server: {name}: its stream does not follow the OpenAI API ({error})"
        ) from None


def _check_usage(chunks: Sequence[_Chunk], produced: int, later: int, name: str) -> None:
    """Check that the usage is that of the whole answer; ``later`` chunks with text came after it."""
    with_text = sum(chunk.has_text for chunk in chunks)
    fault = None
    if later:
        fault = f"usage counts {produced} tokens, and {later} chunks with text come after it"
    elif produced < 1:
        raise FailedRequestError(f"server: {name}: no tokens were produced")
    elif not with_text:
        raise FailedRequestError(f"server: {name}: {produced} tokens but no text", is_wrong=True)
    elif _count_own(chunks) > produced:
        fault = f"usage counts {produced} tokens, but {with_text} chunks have text"
    if fault is not None:
        raise FailedRequestError(
            f"server: {name}: {fault}; the usage must be that of the whole answer", is_wrong=True
        )


def _count_own(chunks: Sequence[_Chunk]) -> int:
    """Return how many chunks have a token of their own."""
    with_text = [chunk for chunk in chunks if chunk.has_text]
    # One token may end the reasoning and begin the answer, in a chunk each.
    return len(with_text) - sum(bool(a.text) != bool(b.text) for a, b in pairwise(with_text))


def _count_tokens(
    chunks: Sequence[_Chunk], produced: int, finish: str | None
) -> tuple[list[int] | None, str | None]:
    """Return the number of tokens in each chunk, None if unknown, and what contradicts.

    A token without text, such as the one that ends the sequence, counts in the last chunk.
    """
    if all(chunk.so_far is not None for chunk in chunks if chunk.has_text):
        counts, before = [], 0
        for chunk in chunks:
            now = before if chunk.so_far is None else chunk.so_far
            if not before <= now <= produced:
                return None, f"a chunk counts {now} tokens so far, after {before} and of {produced}"
            counts.append(now - before)
            before = now
        if (texts := _count_own(chunks)) > before:
            return None, f"{texts} chunks have text, and the last one counts {before} tokens so far"
        if produced - before > 1:
            # Nothing tells when tokens without text came.
            return None, None
        counts[-1] += produced - before
        return counts, None
    counts = [int(chunk.has_text) for chunk in chunks]
    if sum(counts) == produced:
        return counts, None
    if sum(counts) == produced - 1 and finish == "stop" and not chunks[-1].has_text:
        return [*counts[:-1], 1], None
    return None, None


def _no_stream(stream: Stream) -> str:
    """Return what came in place of a stream of events."""
    body = stream.body().lstrip()
    if stream.media == "text/html" or body[:1] == "<":
        return f"{stream.path} {PAGE}"
    if stream.media == "application/json" or body[:1] == "{":
        said = f": {error_text(body)}" if '"error"' in body else ""
        return f"{stream.path} answered with JSON and no stream; the server must support stream=true{said}"
    return (
        f"{stream.path} answered with no event ({stream.media or 'no content type'}: {show_line(body)[:80]})"
    )


def check_lengths(
    answer: Answer, name: str, *, asked: int, input_tokens: int | None, is_full_length: bool
) -> None:
    """Check that a prompt and an answer have the length that was asked for.

    ``input_tokens`` is None for a text. An answer may be shorter unless ``is_full_length``.
    """
    produced, counted = answer.request.output_tokens, answer.request.input_tokens
    fault = None
    if produced > asked:
        fault = f"{produced} tokens instead of {asked}; the server ignores max_tokens"
    elif produced < asked and answer.finish == "length":
        fault = (
            f"{produced} tokens instead of {asked}, and finish_reason is 'length': the context is full, with "
            f"{counted} tokens in the prompt, or the server has a limit of its own"
        )
    elif produced < asked and is_full_length:
        fault = f"{produced} tokens instead of {asked}; the server ignores ignore_eos"
    elif input_tokens not in (None, counted):
        fault = f"the server counts {counted} tokens in a prompt written to have {input_tokens}"
    if fault is not None:
        raise FailedRequestError(f"server: {name}: {fault}", is_wrong=True)


def explain_status(stream: Stream) -> str:
    """Return status, place and message of a refusal, and what to do about it."""
    where = f" to {show_line(stream.location)}" if stream.location else ""
    said = error_text(stream.body())
    remedy = REMEDIES.get(str(stream.status)) or REMEDIES.get(str(stream.status)[:1])
    return f"{stream.status} from {stream.path}{where}: {said}" + (f"; {remedy}" if remedy else "")


def error_text(body: str) -> str:
    """Return an error's message in one line; the body itself if it is not in the API's format."""
    try:
        decoded = parse_json(body)
    except ValueError:
        return show_line(body) or "no message"
    error = (decoded.get("error") or decoded) if isinstance(decoded, dict) else decoded
    message = (error.get("message") or error) if isinstance(error, dict) else error
    return show_line(str(message))


def show_line(text: str) -> str:
    """Return a text of a server in one line of limited length, without keys."""
    return " ".join(join_texts([hide_keys(text)]).split())[:MAX_ERROR_CHARACTERS]


def answer_flags(answers: Sequence[Answer], *, may_hit: bool = False) -> list[Flag]:
    """Return flags about numbers that contradict each other, and about prefix cache hits if none may be."""
    doubts = [answer.doubt for answer in answers if answer.doubt]
    flags = []
    if doubts:
        detail = (
            f"{len(doubts)} answers have no token times, because the server's counts contradict each other: "
            f"{doubts[0]}"
        )
        flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    several = [each.request for each in answers if each.request.output_tokens >= STREAMED_TOKENS]
    if several and 2 * sum(each.first_token_ns == each.last_token_ns for each in several) > len(several):
        detail = (
            "answers came whole, since the server or a proxy does not stream: times of tokens are those of "
            "answers"
        )
        flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    if may_hit:
        return flags
    cached = [answer.request.cached_tokens for answer in answers]
    hits = [tokens for tokens in cached if tokens]
    if hits:
        detail = (
            f"prefix cache hit: {sum(hits)} prompt tokens of {len(hits)} requests were not computed; "
            "switch the cache off when starting the server, or allow hits (prefix_cache=True)"
        )
        flags.append(Flag(name="prefix-cache", severity="invalid", detail=detail))
    elif None in cached:
        flags.append(Flag(name="prefix-cache", severity="warning", detail=CACHE_UNKNOWN))
    return flags
