# SPDX-License-Identifier: Apache-2.0
"""Did both runs execute the same thing?

Everything that decides what is executed is a fact. Versions of engines and libraries are recorded and are
none: they are what is under test. Output tokens are a result.
"""

from __future__ import annotations

from pytest_llenergy.compare.identity import differing, key_of
from pytest_llenergy.model.record import Record, Round


def workload_facts(record: Record) -> dict[str, str]:
    """What a test executes, for people to read."""
    facts = {"id": record.id}
    facts |= {f"params.{name}": repr(value) for name, value in sorted(record.params.items())}
    backend = record.backend
    if backend is not None:
        facts["backend"] = backend.name
        facts["model"] = backend.model
        facts["model.revision"] = str(backend.model_revision)
        facts["dtype"] = str(backend.dtype)
        facts |= {f"options.{name}": repr(value) for name, value in sorted(backend.options.items())}
        facts["task"] = str(backend.task)
        facts |= {f"generation.{name}": repr(value) for name, value in sorted(backend.generation.items())}
        facts["prompts"] = str(backend.prompts_digest)
    degrees = record.parallel
    facts["parallel"] = ", ".join(f"{name} {getattr(degrees, name)}" for name in degrees.__struct_fields__)
    facts["devices"] = str(len(record.devices))
    facts["fallback"] = str(record.fallback)
    facts["launch"] = str(record.launch)
    facts["start_method"] = str(record.start_method)
    facts["ranks"] = str(len(record.ranks))
    facts["threads"] = ", ".join(sorted({str(rank.threads) for rank in record.ranks})) or "None"
    requests, tokens = _batch(record)
    facts["requests"] = requests
    facts["input tokens"] = tokens
    return facts


def workload_key(record: Record) -> str:
    """Equal for two tests that execute the same."""
    return key_of(workload_facts(record))


def workload_differences(base: Record, head: Record) -> list[str]:
    """What of the workload is not the same on both sides; empty where all is."""
    if _told(base) == _told(head) and _batch(base) == _batch(head):
        return []
    return differing(workload_facts(base), workload_facts(head))


def _told(record: Record) -> tuple[object, ...]:
    """The same facts unformatted, which is quicker to compare."""
    backend = record.backend
    engine = backend and (
        backend.name,
        backend.model,
        backend.model_revision,
        backend.dtype,
        backend.options,
        backend.task,
        backend.generation,
        backend.prompts_digest,
    )
    return (
        record.id,
        record.params,
        engine,
        record.parallel,
        len(record.devices),
        record.fallback,
        record.launch,
        record.start_method,
        [rank.threads for rank in record.ranks],
    )


def _batch(record: Record) -> tuple[str, str]:
    """Requests and input tokens of an iteration."""
    if not record.rounds:
        return "None", "None"
    first = record.rounds[0]
    return _each(first.requests, first), _each(first.tokens.input if first.tokens else None, first)


def _each(count: int | None, round_: Round) -> str:
    return "None" if count is None else f"{count / round_.iterations:g}"
