# SPDX-License-Identifier: Apache-2.0
"""Whether two sides produced the same outputs: a saving whose outputs changed is no improvement.

Scores decide if both sides have them; otherwise the share of greedy tokens that are equal. A token counts as
equal if all before it are: after the first that differs, a model continues another text.
"""

from __future__ import annotations

import msgspec

from pytest_llenergy.compare.case import Case
from pytest_llenergy.record.comparison import OUTPUTS_DIFFER, Comparison
from pytest_llenergy.record.defaults import AGREEMENT
from pytest_llenergy.record.outputs import agreement_of
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.scoring import ACCURACY

#: How to accept an improvement with other outputs.
REMEDY = "a new baseline accepts it"


def check_outputs(comparison: Comparison, case: Case) -> Comparison:
    """Return the comparison with notes on outputs; an improvement whose outputs changed is not one."""
    base, head = case.base, case.head
    assert base is not None
    assert head is not None
    difference = explain_difference(base, head)
    improved = comparison.verdict == "improved"
    if difference is not None and improved:
        reason = f"{difference}, so it is no improvement ({comparison.reason}); {REMEDY}"
        return msgspec.structs.replace(
            comparison, verdict="not comparable", reason=reason, differences=[difference]
        )
    note = difference
    if note is None and improved and head.backend and head.backend.generation:
        note = explain_unchecked(base, head)
    sides = [side for side, each in (("base", base), ("head", head)) if each.value_of(ACCURACY) is not None]
    if note is None and len(sides) == 1:
        note = f"only {sides[0]} has {ACCURACY}"
    if note is None and len(sides) == 2 and explain_unchecked(base, head) is None:
        note = _explain_tokens(base, head)
        note = f"{note}, but {ACCURACY} decides" if note is not None else None
    return msgspec.structs.replace(comparison, notes=[*comparison.notes, *filter(None, [note])])


def explain_difference(base: Record, head: Record) -> str | None:
    """Return how the outputs of two records differ, or None if they agree or cannot be compared.

    Args:
        base: The baseline.
        head: The record to compare with it.
    """
    scores = base.value_of(ACCURACY), head.value_of(ACCURACY)
    if scores[0] is not None and scores[1] is not None:
        if scores[1] >= AGREEMENT * scores[0]:
            return None
        return f"{OUTPUTS_DIFFER}{ACCURACY} {scores[1]:.3g} < {AGREEMENT:g} × {scores[0]:.3g}"
    if explain_unchecked(base, head) is not None:
        # Otherwise a head that no longer scores its outputs would pass as a saving.
        lost = scores[0] is not None and scores[1] is None
        return f"outputs not compared: only base has {ACCURACY}" if lost else None
    return _explain_tokens(base, head)


def _explain_tokens(base: Record, head: Record) -> str | None:
    """Return by how much the tokens differ, or None if they agree."""
    agreement = agreement_of(base.outputs, head.outputs)
    if agreement >= AGREEMENT:
        return None
    return f"{OUTPUTS_DIFFER}agreement {_below(agreement)} < {AGREEMENT:g}"


def explain_unchecked(base: Record, head: Record) -> str | None:
    """Return why the tokens of two records cannot be compared, or None if they can."""
    for side, record in (("base", base), ("head", head)):
        if record.backend is not None and record.backend.generation.get("do_sample"):
            return f"outputs not compared: {side} sampled"
        if not record.outputs:
            return f"outputs not compared: {side} has no tokens of outputs"
    if base.backend is None or head.backend is None:
        return "outputs not compared: no backend"
    if base.backend.prompts_digest != head.backend.prompts_digest:
        return "outputs not compared: the prompts differ"
    return None


def _below(agreement: float) -> str:
    """Format an agreement so that it does not look like the limit that it is below."""
    text = f"{agreement:.2f}"
    return f"{agreement:.4f}" if float(text) >= AGREEMENT else text
