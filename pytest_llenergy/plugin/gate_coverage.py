# SPDX-License-Identifier: Apache-2.0
"""What the gates of a run did not cover: lines for the end of the run, so that silence is no pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from pytest_llenergy.compare.comparison import incomplete_run_note
from pytest_llenergy.compare.gate import list_void_gates, suggest_remedy
from pytest_llenergy.compare.pairing import describe_changing_ids
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.baseline import ABSENT, NO_BASELINE, StoredBaseline
from pytest_llenergy.plugin.collected import collected_by
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests

#: Most names of tests in one line.
MAX_NAMES = 5


def describe_ungated(
    stored: StoredBaseline | None, records: Sequence[Record], config: pytest.Config, *, with_lost: bool = True
) -> list[str]:
    """Return a line for each reason why gates did not cover, or could not decide on, some tests.

    Args:
        stored: The baseline; None without one.
        records: The last attempt of each test of the run.
        config: Configuration of the run.
        with_lost: Whether to name the tests that were lost: an error may do so.
    """
    settings = settings_of(config)
    comparisons = [each for record in records for each in record.comparisons if each.verdict != "no value"]
    waiting = {each.id for each in comparisons if each.gated and each.reason == NO_BASELINE}
    lines = [f"not gated: {count_tests(len(waiting))}, {NO_BASELINE}"] if waiting else []
    if stored is None:
        return lines
    if not stored.report.run.complete:
        lines.append(incomplete_run_note(stored.origin))
    unsure = [each for each in comparisons if each.gated and each.verdict == "inconclusive"]
    if unsure and settings.inconclusive == "warn":
        lines.append(
            f"inconclusive: {len(unsure)} of {len(comparisons)}; "
            f"{suggest_remedy(unsure, 'more rounds (--energy-rounds)')}, "
            "--energy-inconclusive=fail fails such tests"
        )
    windows = sum(not record.rounds and bool(record.windows) for record in records if record.counts)
    if windows:
        lines.append(f"not compared: {count_tests(windows)} with windows of energy_meter only")
    lost = stored.list_lost(records, partial(_explain_absent, config))
    if lost and with_lost:
        lines.append(f"in {stored.origin} but not compared: {_name_lost(lost)}")
    lines += describe_changing_ids(lost, [each.id for each in comparisons if each.verdict == "new"])
    if comparisons and all(each.verdict == "new" for each in comparisons) and not stored.records:
        lines.append(f"no baseline: {count_tests(len({each.id for each in comparisons}), 'new ')}")
    return lines


def _explain_absent(config: pytest.Config, record: Record) -> str:
    state = state_of(config)
    if collected_by(config).is_broken(record.id):
        return "its file was skipped"
    available = {spec.name for spec in state.selected_backends}
    backend = record.params.get("backend") if record.backend is not None else None
    # One that --energy-backend leaves out is not selected.
    if backend is not None and not state.settings.backend and backend not in available:
        return "its backend is not installed"
    return ABSENT


def _name_lost(lost: Mapping[str, str]) -> str:
    named = [f"{_function_name(name)} ({why})" for name, why in lost.items()]
    return ", ".join(named[:MAX_NAMES]) + (
        f" and {len(lost) - MAX_NAMES} more" if len(lost) > MAX_NAMES else ""
    )


def list_gate_errors(
    stored: StoredBaseline | None,
    records: Sequence[Record],
    config: pytest.Config,
    *,
    on_command_line: bool,
    stopped: bool,
) -> list[str]:
    """Return a line for each gate that was requested and not checked, although no test failed by it.

    Args:
        stored: The baseline; None without one.
        records: The last attempt of each test of the run.
        config: Configuration of the run.
        on_command_line: Whether ``--energy-fail-on`` or ``--energy-compare`` is on the command line. Then a
            run without measurements is an error; an ini file may apply to other runs.
        stopped: Whether the run ended before its last test.
    """
    if stored is None:
        return []
    lines, settings = [], settings_of(config)
    lost = stored.list_lost(records, partial(_explain_absent, config)) if records or on_command_line else {}
    if not settings.fail_on:
        # Those that a mark gated.
        lost = {
            name: why
            for name, why in lost.items()
            if any(each.from_mark for each in stored.records[name].comparisons)
        }
    comparisons = [each for record in records for each in record.comparisons]
    why = _explain_error(set(lost.values()), comparisons, settings, stopped=stopped) if lost else None
    if why is not None:
        lines.append(f"{count_tests(len(lost))} of {stored.origin} not compared: {_name_lost(lost)}; {why}")
    named = {each.metric for each in settings.fail_on}
    void = list_void_gates(each for each in comparisons if each.gated or each.metric in named)
    nothing = _explain_nothing_gated(records, stored, settings, on_command_line=on_command_line)
    return [*lines, *(void or filter(None, [nothing]))]


def _explain_error(
    reasons: set[str], comparisons: Sequence[Comparison], settings: Settings, *, stopped: bool
) -> str | None:
    """Return why tests that were lost for these reasons fail the run; None if they are only named."""
    if not any(each.gated and each.rule_applied for each in comparisons):
        return "nothing was compared"
    if stopped:
        return "the run ended early"
    if reasons != {ABSENT}:
        return "measure them or deselect them"
    return "--energy-inconclusive=warn accepts this" if settings.inconclusive == "fail" else None


def _explain_nothing_gated(
    records: Sequence[Record], stored: StoredBaseline, settings: Settings, *, on_command_line: bool
) -> str | None:
    """Explain why no gate was checked although some were requested; return None if one was."""
    comparisons = [each for record in records for each in record.comparisons if each.gated]
    if any(each.rule_applied for each in comparisons):
        return None
    if not comparisons and not (on_command_line and settings.fail_on):
        return None
    if not records:
        return "nothing was gated: no test was measured"
    if not stored.records:
        return None
    states = Counter[str](each.verdict for each in comparisons)
    if not comparisons:
        states = Counter(record.status for record in records)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"nothing was gated: {counts}"


def _function_name(name: str) -> str:
    path, bracket, params = name.partition("[")
    return f"{path.rpartition('::')[2]}{bracket}{params}"
