# SPDX-License-Identifier: Apache-2.0
"""Whether two sides produced the same outputs: a saving whose outputs changed is no improvement.

Scores decide if both sides have them; otherwise the share of greedy tokens that are equal. A token counts as
equal if all before it are: after the first that differs, a model continues another text.
"""

from __future__ import annotations

import msgspec

from pytest_llenergy.record.comparison import OUTPUTS_DIFFER, Comparison
from pytest_llenergy.record.custom_metrics import ACCURACY
from pytest_llenergy.record.defaults import AGREEMENT
from pytest_llenergy.record.outputs import agreement_of
from pytest_llenergy.record.record import Record


def check_outputs(comparison: Comparison, base: Record, head: Record, *, judge: bool) -> Comparison:
    """Return the comparison with a note on outputs that differ.

    To ``judge`` them makes an improvement not comparable.
    """
    improved, difference, note = comparison.verdict == "improved", None, None
    unchecked = _explain_unchecked(base, head)
    before, after = base.value_of(ACCURACY), head.value_of(ACCURACY)
    if before is not None and after is not None:
        if after < AGREEMENT * before:
            difference = f"{OUTPUTS_DIFFER}{ACCURACY} {after:.3g} < {AGREEMENT:g} × {before:.3g}"
    elif unchecked is None:
        difference = _compare_tokens(base, head)
    elif before is not None:
        # Otherwise a head that no longer scores its outputs would pass as a saving.
        difference = f"outputs not compared: only base has {ACCURACY}"
    elif improved and head.backend and head.backend.generation:
        note = unchecked
    if difference is not None and improved and judge:
        reason = f"{difference}, so it is no improvement ({comparison.reason}); a new baseline accepts it"
        return msgspec.structs.replace(
            comparison, verdict="not comparable", reason=reason, differences=[difference]
        )
    note = difference or note
    return (
        comparison if note is None else msgspec.structs.replace(comparison, notes=[*comparison.notes, note])
    )


def _compare_tokens(base: Record, head: Record) -> str | None:
    """Return by how much the tokens differ, or None if they agree."""
    agreement = agreement_of(base.outputs, head.outputs)
    if agreement >= AGREEMENT:
        return None
    # It must not look like the limit that it is below.
    text = f"{agreement:.2f}" if round(agreement, 2) < AGREEMENT else f"{agreement:.4f}"
    return f"{OUTPUTS_DIFFER}agreement {text} < {AGREEMENT:g}"


def _explain_unchecked(base: Record, head: Record) -> str | None:
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
