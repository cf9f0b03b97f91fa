# SPDX-License-Identifier: Apache-2.0
"""Defaults and choices that options share with the modules that use them. Imports nothing, so it is cheap."""

from __future__ import annotations

from typing import Literal

#: Relative difference between two runs of the same code. The lower limit of a regression must exceed it.
FLOOR = 0.01

#: Largest floor. Where the same code differs by more, no gate means anything.
MAX_FLOOR = 0.25

#: Smallest share of equal greedy tokens, or of the baseline's score, with which outputs count as the same.
AGREEMENT = 0.95

#: Smallest number of measured rounds, unless the user gives one: usually, and if the budget is spent.
ROUNDS, FLOOR_ROUNDS = 6, 3

#: Largest numbers that options accept.
MAX_ROUNDS, MAX_GPUS = 1_000_000, 1024

#: Longest wait for other processes to leave the leased GPUs (seconds), and no longer than that for a lease.
BUSY_TIMEOUT_S = 60.0

#: What to do about a test that could not be judged: an inconclusive one, or one that only the baseline has.
Inconclusive = Literal["warn", "fail", "pass"]

#: How the power of a moment is shared among the requests that are active: equally, or by their tokens.
Sharing = Literal["equal", "tokens"]

#: Directory of the history, in the root directory.
HISTORY = ".llenergy/history"

#: Directory for reports of ``--energy-save=NAME``, in the root directory.
SAVED = ".llenergy"

#: The default model on the Hugging Face hub.
MODEL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

#: Columns of the summary that are no metrics.
FACT_COLUMNS = ("backend", "model", "device", "meter", "rounds", "types")
