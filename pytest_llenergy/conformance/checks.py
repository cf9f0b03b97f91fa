# SPDX-License-Identifier: Apache-2.0
"""Checks of tokens, timestamps, degrees, prefix caches, memory and error messages.

Each ``check_`` function returns what is wrong, or ``None``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.conformance.harness import BatchResult, LoadedBackend
from pytest_llenergy.conformance.in_rank import LoadCycles, Refusal
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.workload import task_workload
from pytest_llenergy.record.record import Parallel, RankInfo
from pytest_llenergy.record.timeline import RequestTimeline

Tokens = Sequence[Sequence[int]]

#: A rank that works alone: this multiple of the time that all ranks took together, and at least this many
#: seconds. A rank that needs the others waits for ever.
ALONE_FACTOR, MIN_ALONE_TIMEOUT_S = 10.0, 5.0

#: How much backends may round their timestamps (nanoseconds).
ROUNDING_NS = 1000

#: Prefix caches work in blocks, of which a prompt of 512 random letters has several (measured: vLLM on the
#: CPU caches nothing of a prompt below 128 tokens).
FIRST_LENGTH = 512
SHORT_LENGTH = 8

#: Number of timings of a new and of a repeated prompt in turn, before each look at them. Prompts that take
#: longer than ``SLOW_S`` (seconds) are disturbed less and timed less often.
REPEATS, REPEATS_OF_SLOW, SLOW_S = 6, 3, 0.2

#: Most looks. More follow while the share is this close to ``MIN_REPEATED_SHARE``, or while it says that
#: there is a cache for the first time: a disturbance that looks like one passes.
LOOKS, UNSURE = 4, 0.1

#: A long prompt must take at least this many times as long as a short one for the check to be meaningful, and
#: if possible at least ``MIN_LONG_S`` (seconds), which is long beside a switch to another process.
MIN_LONG_RATIO, MIN_LONG_S = 4.0, 0.02

#: Least time of a repeated prompt as a share of that of a new one, both less the time of a short one. Without
#: a cache the share is 1, with one of half of each prompt a half; with those of vLLM, OpenVINO and llama.cpp
#: it was an eighth to a fiftieth (measured on a CPU).
MIN_REPEATED_SHARE = 0.75

#: How much of the memory of each model may stay after ``close``. A leak keeps all of it.
MAX_KEPT_SHARE = 0.5

#: A value that options refuse.
NO_VALUE = "no such value"


def check_prompt_counts(batch: BatchResult, counted: Mapping[str, int]) -> str | None:
    """Check ``input_tokens`` against ``counted``: the prompts of the batch in order, with their tokens."""
    for request, (prompt, tokens) in zip(batch.requests, counted.items(), strict=True):
        if request.input_tokens != tokens:
            padded = max(counted.values()) == request.input_tokens
            why = ", the length of the padded batch: sum the attention mask" if padded else ""
            return (
                f"prompt {prompt!r} has {tokens} tokens, and input_tokens is {request.input_tokens}{why}; "
                "count the tokens of the prompt itself"
            )
    return None


def check_output_counts(batch: BatchResult, max_new_tokens: int) -> str | None:
    """Check that each sequence is ``max_new_tokens`` long, as it is with ``ignore_eos``."""
    for number, (request, ids) in enumerate(zip(batch.requests, batch.token_ids, strict=True)):
        if not batch.has_token_ids:
            if request.output_tokens != max_new_tokens:
                return (
                    f"max_new_tokens={max_new_tokens} with ignore_eos made {request.output_tokens} tokens of "
                    f"prompt {number}; nothing may end it earlier"
                )
            continue
        if len(ids) != max_new_tokens:
            return (
                f"max_new_tokens={max_new_tokens} with ignore_eos made {len(ids)} tokens of prompt {number}; "
                "token_ids are the output without prompt and padding, and nothing may end it earlier"
            )
        if request.output_tokens != len(ids):
            return (
                f"output_tokens of prompt {number} is {request.output_tokens}, and token_ids has {len(ids)}; "
                "count what was produced"
            )
    return None


def choose_stop_token(unlimited: Tokens) -> int | None:
    """Return a token that ends one sequence early and another one later or never; ``None`` if none does."""
    found = {token: [_length(ids, token) for ids in unlimited] for ids in unlimited for token in ids}
    useful = [token for token, lengths in found.items() if 1 < min(lengths) < max(lengths)]
    return min(useful, key=lambda token: (min(found[token]), token), default=None)


def check_stop_token(batch: BatchResult, unlimited: Tokens, stop: int) -> str | None:
    """Check a batch with a stop token: equal to ``unlimited``, the batch without one, until it ends.

    Args:
        batch: The batch with the stop token.
        unlimited: Tokens of the same prompts without it.
        stop: The stop token.
    """
    first = min(range(len(unlimited)), key=lambda number: _length(unlimited[number], stop))
    expected = list(unlimited[first][: _length(unlimited[first], stop)])
    setting = f"stop_token_ids=[{stop}]"
    for number, (request, ids) in enumerate(zip(batch.requests, batch.token_ids, strict=True)):
        if number == first and list(ids) != expected:
            return (
                f"{setting} made {_show(ids)} of prompt {number}, needs {_show(expected)}: a sequence ends "
                "with the stop token as its last output token, even with ignore_eos"
            )
        if stop in ids[:-1] or (len(ids) < len(unlimited[number]) and ids[-1] != stop):
            return (
                f"{setting} made {_show(ids)} of prompt {number}: a sequence ends at the stop token and "
                "nowhere else"
            )
        if request.output_tokens != len(ids):
            return (
                f"with {setting} output_tokens of prompt {number} is {request.output_tokens}, and token_ids "
                f"has {len(ids)}; tokens after the end are padding, not output"
            )
    return None


def check_equal_tokens(
    found: Tokens, expected: Tokens, prompts: Sequence[str], names: tuple[str, str]
) -> str | None:
    """Check that two ways of generating give the same tokens; ``names`` describe the two ways.

    Args:
        found: Tokens of each prompt, generated one way.
        expected: Tokens of each prompt, generated the other way.
        prompts: The prompts.
        names: Descriptions of both ways, for messages.
    """
    for prompt, ids, others in zip(prompts, found, expected, strict=True):
        if list(ids) != list(others):
            place = next(
                (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other),
                min(len(ids), len(others)),
            )
            return (
                f"prompt {prompt!r}: token {place} differs; {names[0]}: {_show(ids)}, "
                f"{names[1]}: {_show(others)}"
            )
    return None


def check_distinct_outputs(found: Tokens) -> str | None:
    """Check that the prompts have different outputs: equal ones would prove nothing."""
    if len({tuple(ids) for ids in found}) < len(found):
        return f"two prompts have equal outputs, which proves nothing: {_show(found[0])}; give other prompts"
    return None


def _length(ids: Sequence[int], stop: int) -> int:
    """Return the length of a sequence that ends with its first stop token."""
    return ids.index(stop) + 1 if stop in ids else len(ids)


def _show(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}{', …' if len(ids) > 16 else ''}] ({len(ids)} tokens)"


def check_timestamps(batch: BatchResult, capabilities: Capabilities) -> str | None:
    """Check the timestamps of a batch with several tokens a sequence against the declared capabilities."""
    start_ns, end_ns = batch.timeline.start_ns, batch.timeline.end_ns
    for number, request in enumerate(batch.requests):
        wrong = _check_declared(request, capabilities) or _check_order(request, start_ns, end_ns)
        if wrong is None and capabilities.exact and request.first_token_ns == request.last_token_ns:
            wrong = "its first and last token have the same stamp, but the capabilities declare exact=True"
        if wrong is not None:
            return f"prompt {number}: {wrong}"
    return None


def _check_declared(request: RequestTimeline, capabilities: Capabilities) -> str | None:
    given = request.first_token_ns is not None and request.last_token_ns is not None
    if capabilities.timestamps == "none":
        some = given or request.first_token_ns is not None or bool(request.token_ns)
        return (
            "the capabilities declare timestamps='none', but some are reported; declare them"
            if some
            else None
        )
    if not given:
        return (
            f"the capabilities declare timestamps={capabilities.timestamps!r}, but "
            "first_token_ns or last_token_ns is None; give both, or declare 'none'"
        )
    if capabilities.timestamps == "token" and len(request.token_ns) != request.output_tokens:
        return (
            "the capabilities declare timestamps='token', but token_ns has "
            f"{len(request.token_ns)} stamps for "
            f"{request.output_tokens} tokens"
        )
    return None


def _check_order(request: RequestTimeline, start_ns: int, end_ns: int) -> str | None:
    """Check that timestamps, which are ``time.monotonic_ns()``, are in order and within the window."""
    stamps = [start_ns, request.start_ns, request.first_token_ns, *request.token_ns, request.last_token_ns]
    known = [stamp for stamp in stamps if stamp is not None]
    if any(later < earlier - ROUNDING_NS for earlier, later in pairwise(known)):
        return (
            "its stamps are not in order, or lie before the work began: start of the work, start_ns, "
            "first_token_ns, token_ns, last_token_ns; they are time.monotonic_ns()"
        )
    if known[-1] > end_ns + ROUNDING_NS:
        return f"its last stamp is {(known[-1] - end_ns) / 1e6:g} ms after the end of the work"
    return None


def check_process_count(loaded: LoadedBackend, ranks: Sequence[RankInfo], degrees: Parallel) -> str | None:
    """Check the number of living processes that hold the model, counted by pid, against the degrees."""
    capabilities = loaded.spec.capabilities
    wanted = degrees.data * degrees.tensor * degrees.pipeline
    pids = [
        pid for rank in ranks for pid in (rank.workers if capabilities.launch == "backend" else [rank.pid])
    ]
    living = {pid for pid in pids if psutil.pid_exists(pid)}
    if len(living) == wanted:
        return None
    return f"{wanted} processes should hold the model, and {len(living)} do (pid {pids})"


def check_prompts_split(loaded: LoadedBackend, batch: BatchResult, degrees: Parallel) -> str | None:
    """Check that each data-parallel rank processed a part of the prompts."""
    counts = [len(rank.requests) for rank in batch.timeline.ranks if not rank.repeats_others]
    if loaded.spec.capabilities.launch == "ranks" and (len(counts) < degrees.data or 0 in counts):
        return f"data={degrees.data}: the ranks processed {counts} prompts; each must have some"
    return None


def check_shards_depend(loaded: LoadedBackend, degrees: Parallel, prompt: str) -> str | None:
    """Check that a shard cannot work without the others; if it can, it is a whole copy of the model.

    Kills the ranks if the check passes.
    """
    group, _ = loaded.load(degrees)
    params = GenerationParams.parse({"max_new_tokens": 4, "ignore_eos": True})
    together = task_workload(group, [prompt], params, loaded.timeout_s).run_round()
    alone = [1, *[0] * (len(group.ranks) - 1)]
    try:
        group.request("work", alone, max(MIN_ALONE_TIMEOUT_S, ALONE_FACTOR * together.duration_s))
    except WorkerError:
        return None
    kind = "tensor" if degrees.tensor > 1 else "pipeline"
    return (
        f"{kind}={max(degrees.tensor, degrees.pipeline)}: rank 0 generates while the others do nothing, so "
        f"it holds a whole copy of the model; shard it, or remove {kind} from the capabilities"
    )


@dataclass(frozen=True)
class PrefillTimes:
    """Times of prompts (seconds), and the length of the long ones (characters).

    ``new_s`` and ``seen_s`` were measured in turn, so that each pair had much the same disturbances.
    """

    short_s: float
    new_s: Sequence[float]
    seen_s: Sequence[float]
    length: int

    @property
    def share(self) -> float:
        """Time of a repeated prompt as a share of that of a new one, both less the time of a short one.

        The median of the pairs.
        """
        return median(
            (seen_s - self.short_s) / max(new_s - self.short_s, 1e-9)
            for new_s, seen_s in zip(self.new_s, self.seen_s, strict=True)
        )

    @property
    def wrong(self) -> str | None:
        """What is wrong, or ``None``."""
        if self.share >= MIN_REPEATED_SHARE:
            return None
        fastest = (min(self.seen_s), min(self.new_s), self.short_s)
        seen, new, short = (f"{each * 1e3:.3g} ms" for each in fastest)
        return (
            f"a prompt of {self.length} characters that was seen before takes {seen}, a new one {new}, and "
            f"one of {SHORT_LENGTH} characters {short}: "
            "prefixes are cached, and all rounds but the first would be nearly free; switch that off in "
            "load(), and say so in prefix_cache of the capabilities"
        )


def time_repeated_prompts(loaded: LoadedBackend, longest: int) -> PrefillTimes | None:
    """Time new and repeated prompts; ``None`` if none up to ``longest`` characters takes long enough."""
    numbers = random.Random(0)
    loaded.work_s(_text(numbers, SHORT_LENGTH))
    short_s = min(loaded.work_s(_text(numbers, SHORT_LENGTH)) for _ in range(REPEATS))
    length = min(FIRST_LENGTH, longest)
    while True:
        long_s = min(loaded.work_s(_text(numbers, length)) for _ in range(2))
        if length == longest or long_s >= max(MIN_LONG_RATIO * short_s, MIN_LONG_S):
            break
        length = min(2 * length, longest)
    if long_s < MIN_LONG_RATIO * short_s:
        return None
    seen = _text(numbers, length)
    loaded.work_s(seen)
    new_s: list[float] = []
    seen_s: list[float] = []
    for look in range(LOOKS):
        for _ in range(REPEATS_OF_SLOW if long_s > SLOW_S else REPEATS):
            new_s.append(loaded.work_s(_text(numbers, length)))
            seen_s.append(loaded.work_s(seen))
        found = PrefillTimes(short_s, new_s, seen_s, length)
        is_clear = abs(found.share - MIN_REPEATED_SHARE) > UNSURE
        if is_clear and (found.wrong is None or look > 0):
            break
    return found


def _text(numbers: random.Random, length: int) -> str:
    """Return random words, a prefix that no other text shares."""
    return "".join(numbers.choice("abcdefghij klmnopqrstuvwxyz ") for _ in range(length))


def check_memory_freed(cycles: LoadCycles) -> str | None:
    """Check that ``close`` frees memory. The first cycle, which imports the library, is ignored."""
    taken = median(
        loaded - closed for loaded, closed in zip(cycles.loaded[1:], cycles.closed[:-1], strict=True)
    )
    kept = (cycles.closed[-1] - cycles.closed[0]) / (len(cycles.closed) - 1)
    if kept <= MAX_KEPT_SHARE * taken:
        return None
    by_cycle = ", ".join(_mib(each) for each in cycles.closed)
    return (
        f"loading takes {_mib(taken)} MiB and {_mib(kept)} MiB more stay after each close() (MiB after each: "
        f"{by_cycle}); release the model, its caches and jobs in close()"
    )


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f}"


def bad_models(directory: Path) -> list[ModelSource]:
    """Make models that can be found but not loaded: a directory and a file, each in the right format."""
    broken = directory / "broken-model"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    file = directory / "broken-model.gguf"
    file.write_bytes(b"GGUF is how it begins, and nothing else is right")
    return [ModelSource("directory", str(broken)), ModelSource("gguf", str(file))]


def check_refusal(refusal: Refusal | None, what: str, named: str) -> str | None:
    """Check the error for ``what``: a declared class, and one line that contains ``named``.

    Args:
        refusal: The error; None if loading succeeded.
        what: What was loaded, for messages.
        named: Text that the error must contain.
    """
    if refusal is None:
        return f"{what} was loaded without an error; raise ModelError or BackendError with one clear line"
    if not refusal.declared:
        return (
            f"{what}: load() raised {refusal.kind} ({_first_line(refusal.message)}); raise ModelError or "
            "BackendError with one clear line instead"
        )
    if not refusal.message.strip() or "\n" in refusal.message.strip():
        return f"{what}: the message of {refusal.kind} is not a single line: {refusal.message!r}"
    if named not in refusal.message:
        return f"{what}: the message does not name {named!r}: {refusal.message}"
    return None


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["no text"])[0]
