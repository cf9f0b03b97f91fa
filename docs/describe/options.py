# SPDX-License-Identifier: Apache-2.0
"""The table in options.md, of ``pytest_llenergy.options``."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.options import OPTIONS, Option

from .text import help_text, table

BEGIN = "<!-- Begin of what `python docs/reference.py` has generated; do not edit. -->"
END = "<!-- End of what `python docs/reference.py` has generated. -->"

#: Where more is told of options.
SEE = {
    ("rounds", "warmup", "gap", "target", "budget"): "[measuring](numbers.md#how-a-test-is-measured)",
    ("html",): "[pages](html.md)",
    ("python",): "[environments](backends.md#engines-in-environments-of-their-own)",
    ("model", "backend"): "[backends](backends.md)",
    ("gpus",): "[which GPUs](#which-gpus)",
    ("busy", "busy_timeout"): "[busy GPUs](#busy-gpus)",
    ("meter", "require"): "[meters](meters.md)",
    ("start_method", "isolation", "rank_logs", "timeout"): "[ranks](workers.md)",
    ("lease_timeout",): "[leases](devices.md#leases)",
    ("save", "compare", "fail_on", "inconclusive"): "[comparing](comparing.md)",
    ("floor",): "[gating](gating.md)",
    ("columns", "sort", "group_by"): "[the summary](output.md#the-summary)",
    ("server_command", "server_url", "server_health", "server_model"): "[serving](serving.md)",
    ("flops",): "[operations](numbers.md#floating-point-operations)",
    ("report",): "[the report](report.md)",
}


def row(option: Option) -> Sequence[str]:
    """The cells of one option."""
    value = f"[={option.metavar}]" if option.bare else f"={option.metavar}"
    text = option.help.replace(f"(default: {option.default})", "")
    text = help_text(text.replace("(repeatable)", "(repeatable; one a line in an ini file)"))
    seen = [see for names, see in SEE.items() if option.name in names]
    default = f"`{option.default}`" if option.default else "none"
    return f"`{option.flag}{value}`", f"`{option.ini}`", default, text, ", ".join(seen)


def options_page(text: str) -> str:
    """The page with the table as the code is now. Raises ``ValueError`` where it has no place for it."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("options.md does not say where the table begins and ends")
    head = ["command line", "ini key", "default", "", "see"]
    return "\n".join([before + BEGIN, "", *table(head, [row(each) for each in OPTIONS]), "", END + after])
