# SPDX-License-Identifier: Apache-2.0
"""``llenergy comment``: a comparison as the one comment of a pull or merge request."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.forges import Thread


def add_parser(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "comment",
        help="show a comparison on the pull or merge request that a CI job is of",
        description="Leave one comment, and replace it in later runs. On GitHub it takes GITHUB_TOKEN, on "
        "GitLab LLENERGY_GITLAB_TOKEN, and finds the request in what the job has in its environment.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what llenergy ab has written")
    parser.add_argument("--number", type=int, metavar="N", help="which request, where the job does not say")
    parser.add_argument("--dry-run", action="store_true", help="print the comment, ask nobody")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Comment. Returns 0."""
    from pytest_llenergy.forges import post
    from pytest_llenergy.report.pr_comment import render_comment
    from pytest_llenergy.report.store import read_paired_report

    body = render_comment(read_paired_report(args.file).compared)
    if args.dry_run:
        print(body, end="")
        return 0
    done, address = post(_thread(args.number), body)
    print(f"{done} {address}")
    return 0


def _thread(number: int | None) -> Thread:
    from pytest_llenergy.forges import merge_request, pull_request

    return (
        merge_request(os.environ, number) if "GITLAB_CI" in os.environ else pull_request(os.environ, number)
    )
