# SPDX-License-Identifier: Apache-2.0
"""What is asked of a comparison: metrics, thresholds, and what to do where neither can be told."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.compare.comparison import Asked


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
        "--inconclusive",
        choices=("warn", "fail", "pass"),
        default="warn",
        help="what to do where neither can be told (default: warn)",
    )


def asked(args: argparse.Namespace) -> list[Asked]:
    """What they come to. Raises ``PlanError`` for a metric or a threshold that there is not."""
    from pytest_llenergy.compare.comparison import Asked
    from pytest_llenergy.compare.gate import known_metric, read_fail_on

    thresholds = [read_fail_on(text) for text in args.fail_on]
    metrics = [known_metric(name) for name in args.metric]
    found = {each.metric: Asked(each.metric, each.rule(), gated=True) for each in thresholds}
    found.update({name: Asked(name, gated=True) for name in metrics if name not in found})
    return list(found.values()) or [Asked(gated=True)]
