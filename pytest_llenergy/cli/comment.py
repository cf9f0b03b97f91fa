# SPDX-License-Identifier: Apache-2.0
"""``llenergy comment``: post a comparison on a pull or merge request."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import add_report
from pytest_llenergy.errors import ForgeError

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "comment",
        help="post a comparison on a pull or merge request",
        description="Post one comment with the comparison; later runs replace it. The token is read from "
        "GITHUB_TOKEN, or LLENERGY_GITLAB_TOKEN on GitLab, and the pull request's number from the CI "
        "variables.",
    )
    add_report(parser, "file", "a file written by llenergy ab, or its saved name")
    parser.add_argument(
        "--number",
        type=int,
        metavar="N",
        help="number of the pull or merge request, if the job does not name it",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the comment and post nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Post or print the comment. Returns 0."""
    from pytest_llenergy.forges import post_comment
    from pytest_llenergy.report.pr_comment import render_comment
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import read_paired_report

    if args.number is not None and args.number < 1:
        raise ForgeError(f"--number={args.number}: needs the number of a pull or merge request")
    body = render_comment(read_paired_report(locate(args.file)).compared)
    if args.dry_run:
        print(body, end="")
        return 0
    done, url = post_comment(os.environ, body, args.number)
    print(f"{done} {url}")
    return 0
