# SPDX-License-Identifier: Apache-2.0
"""Checks of tokens, timestamps, degrees, memory and error messages: each fails the test with one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.conformance.ranks import BatchResult, LoadCycles, LoadedBackend, Refusal
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

#: How much of the memory of each model may stay after ``close``. A leak keeps all of it.
MAX_KEPT_SHARE = 0.5


def require(condition: object, message: str) -> None:
    """Fail with a message unless a condition holds, without a traceback through this suite."""
    if not condition:
        pytest.fail(message, pytrace=False)


def check_prompt_counts(batch: BatchResult, counted: Mapping[str, int]) -> None:
    """Check ``input_tokens`` against ``counted``: the prompts of the batch in order, with their tokens."""
    for request, (prompt, tokens) in zip(batch.timeline.requests, counted.items(), strict=True):
        found = request.input_tokens
        what = f"prompt {prompt!r} has {tokens} tokens, and input_tokens is {found}"
        require(found == tokens, f"{what}; count the tokens of the prompt itself, without padding")


def check_output_counts(batch: BatchResult, max_new_tokens: int) -> None:
    """Check that each sequence is ``max_new_tokens`` long, as it is with ``ignore_eos``."""
    for number, request in enumerate(batch.generation.requests):
        made = len(batch.token_ids[number]) if batch.has_token_ids else request.output_tokens
        what = f"max_new_tokens={max_new_tokens} with ignore_eos made {made} tokens of prompt {number}"
        require(
            made == max_new_tokens, f"{what}; outputs are without prompt and padding, and end nowhere else"
        )
    _check_counts(batch)


def _check_counts(batch: BatchResult) -> None:
    for number, request in enumerate(batch.generation.requests):
        made = len(batch.token_ids[number]) if batch.has_token_ids else request.output_tokens
        what = f"output_tokens of prompt {number} is {request.output_tokens}, and token_ids has {made}"
        require(request.output_tokens == made, f"{what}; tokens after the end are padding, not output")


def choose_stop_token(unlimited: Tokens) -> int | None:
    """Return a token that ends one sequence early and another one later or never; ``None`` if none does."""
    found = {token: [_length(ids, token) for ids in unlimited] for ids in unlimited for token in ids}
    useful = [token for token, lengths in found.items() if 1 < min(lengths) < max(lengths)]
    return min(useful, key=lambda token: (min(found[token]), token), default=None)


def check_stop_token(batch: BatchResult, unlimited: Tokens, stop: int) -> None:
    """Check a batch with a stop token: equal to ``unlimited``, the batch without one, until it ends."""
    for number, (ids, free) in enumerate(zip(batch.token_ids, unlimited, strict=True)):
        # Rounding may differ in a batch of other lengths, but not before the first sequence has ended.
        is_first = _length(free, stop) == min(_length(each, stop) for each in unlimited)
        expected = list(free[: _length(free, stop)])
        ends = stop not in ids[:-1] and (len(ids) == len(free) or ids[-1:] == [stop])
        require(
            list(ids) == expected if is_first else ends,
            f"stop_token_ids=[{stop}] made {_show(ids)} of prompt {number}, needs {_show(expected)}: a "
            "sequence ends with the stop token as its last output token, even with ignore_eos",
        )
    _check_counts(batch)


def check_equal_tokens(
    found: Tokens, expected: Tokens, prompts: Sequence[str], names: tuple[str, str]
) -> None:
    """Check that two ways of generating, described by ``names``, give the same tokens."""
    for prompt, ids, others in zip(prompts, found, expected, strict=True):
        pairs = enumerate(zip(ids, others, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))
        both = f"{names[0]}: {_show(ids)}, {names[1]}: {_show(others)}"
        require(list(ids) == list(others), f"prompt {prompt!r}: token {place} differs; {both}")


def check_distinct_outputs(found: Tokens) -> None:
    """Check that the prompts have different outputs."""
    distinct = len({tuple(ids) for ids in found}) == len(found)
    require(distinct, f"two prompts have equal outputs, which proves nothing: {_show(found[0])}; give others")


def _length(ids: Sequence[int], stop: int) -> int:
    """Return the length of a sequence that ends with its first stop token."""
    return ids.index(stop) + 1 if stop in ids else len(ids)


def _show(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}{', …' if len(ids) > 16 else ''}] ({len(ids)} tokens)"


def check_timestamps(batch: BatchResult, row: Capabilities) -> None:
    """Check the timestamps of a batch with several tokens a sequence against the declared capabilities."""
    for number, request in enumerate(batch.timeline.requests):
        wrong = _find_fault(request, row, batch.timeline.start_ns, batch.timeline.end_ns)
        require(wrong is None, f"prompt {number}: {wrong}")


def _find_fault(request: RequestTimeline, row: Capabilities, start_ns: int, end_ns: int) -> str | None:
    first_ns, last_ns = request.first_token_ns, request.last_token_ns
    declared = f"the capabilities declare timestamps={row.timestamps!r}, but"
    if row.timestamps == "none":
        some = first_ns is not None or last_ns is not None or request.token_ns
        return f"{declared} some are reported; declare them" if some else None
    if first_ns is None or last_ns is None:
        return f"{declared} first_token_ns or last_token_ns is None; give both, or declare 'none'"
    if row.timestamps == "token" and len(request.token_ns) != request.output_tokens:
        return f"{declared} token_ns has {len(request.token_ns)} stamps for {request.output_tokens} tokens"
    stamps = [start_ns, request.start_ns, first_ns, *request.token_ns, last_ns, end_ns]
    known = [stamp for stamp in stamps if stamp is not None]
    if any(later < earlier - ROUNDING_NS for earlier, later in pairwise(known)):
        return "its stamps are not time.monotonic_ns() in order, from the start of the work to its end"
    # Tokens of a server may arrive together.
    if first_ns == last_ns and not row.opaque:
        return "its first and last token have the same stamp, and a step made each"
    return None


def check_parts(
    loaded: LoadedBackend, ranks: Sequence[RankInfo], batch: BatchResult, degrees: Parallel
) -> None:
    """Check the processes that hold the model, by pid, and that each data-parallel rank has prompts."""
    launch = loaded.spec.capabilities.launch
    wanted = degrees.data * degrees.tensor * degrees.pipeline
    pids = {pid for rank in ranks for pid in (rank.workers if launch == "backend" else [rank.pid])}
    living = sum(map(psutil.pid_exists, pids))
    require(
        living == wanted, f"{wanted} processes should hold the model, and {living} do (pid {sorted(pids)})"
    )
    counts = [len(rank.requests) for rank in batch.timeline.ranks if not rank.repeats_others]
    have_some = launch == "backend" or (len(counts) >= degrees.data and 0 not in counts)
    require(have_some, f"data={degrees.data}: the ranks processed {counts} prompts; each must have some")


def check_shards_depend(loaded: LoadedBackend, degrees: Parallel, prompt: str) -> None:
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
        return
    kind = "tensor" if degrees.tensor > 1 else "pipeline"
    pytest.fail(
        f"{kind}={max(degrees.tensor, degrees.pipeline)}: rank 0 generates while the others do nothing, so "
        f"it holds a whole copy of the model; shard it, or remove {kind} from the capabilities",
        pytrace=False,
    )


def check_memory_freed(cycles: LoadCycles) -> None:
    """Check that ``close`` frees memory. The first cycle, which imports the library, is ignored."""
    taken = median(loaded - closed for loaded, closed in zip(cycles.loaded[1:], cycles.closed, strict=False))
    kept = (cycles.closed[-1] - cycles.closed[0]) / (len(cycles.closed) - 1)
    by_cycle = ", ".join(f"{each / 2**20:.1f}" for each in cycles.closed)
    require(
        kept <= MAX_KEPT_SHARE * taken,
        f"loading takes {taken / 2**20:.1f} MiB and {kept / 2**20:.1f} MiB more stay after each close() (MiB "
        f"after each: {by_cycle}); release the model, its caches and jobs in close()",
    )


def bad_models(directory: Path) -> list[ModelSource]:
    """Make models that can be found but not loaded: a directory and a file, each in the right format."""
    broken, file = directory / "broken-model", directory / "broken-model.gguf"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    file.write_bytes(b"GGUF is how it begins, and nothing else is right")
    return [ModelSource("directory", str(broken)), ModelSource("gguf", str(file))]


def check_refusal(refusal: Refusal | None, what: str, named: str) -> None:
    """Check the error for loading ``what``: a declared class, and one line that contains ``named``."""
    if refusal is None:
        pytest.fail(f"{what} was loaded without an error; raise ModelError or BackendError", pytrace=False)
    message = refusal.message.strip()
    first = (message.splitlines() or ["no text"])[0]
    wrong = f"{what}: load() raised {refusal.kind} ({first}); raise ModelError or BackendError instead"
    require(refusal.declared, wrong)
    is_line = message and "\n" not in message
    require(is_line, f"{what}: the message of {refusal.kind} is not a single line: {refusal.message!r}")
    require(named in message, f"{what}: the message does not name {named!r}: {refusal.message}")
