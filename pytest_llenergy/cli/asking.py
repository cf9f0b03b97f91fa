# SPDX-License-Identifier: Apache-2.0
"""What is asked of a comparison: metrics, thresholds, and what to do where neither can be told."""

from __future__ import annotations

import argparse


def add_questions(parser: argparse.ArgumentParser) -> None:
    """The options of every command that compares."""
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC",
        help="compare this metric (default: energy_per_output_token_j, or energy_j of tests without tokens; "
        "repeatable)",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="METRIC:EXPR",
        help="compare this metric with a threshold of its own, such as energy_j:3%% or energy_j:3%%+2J "
        "(repeatable)",
    )
    parser.add_argument(
        "--floor",
        metavar="PERCENT",
        help="what two runs of the same code differ by here; what may be less is no change (default: 1%%)",
    )
    parser.add_argument(
        "--inconclusive",
        choices=("warn", "fail", "pass"),
        default="warn",
        help="what to do where neither can be told (default: warn)",
    )
