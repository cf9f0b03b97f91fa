# SPDX-License-Identifier: Apache-2.0
"""``llenergy comment``: post comparisons on a pull or merge request."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import print_data, print_message
from pytest_llenergy.errors import ForgeError, OutdatedRunError, ReportError

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.report.forges import CiRun
    from pytest_llenergy.report.pr_comment import CommentContext

#: Name of the comparison in the folder of a job.
FILE = "energy.json"

#: Most jobs that comment on one pull request.
MAX_JOBS = 20


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "comment",
        help="post comparisons on a pull or merge request",
        description="Post a comment with the comparison of each job; later runs replace it. The token is "
        "read from GITHUB_TOKEN, or LLENERGY_GITLAB_TOKEN on GitLab, and the pull request's number from the "
        "CI variables.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a file of llenergy ab or llenergy compare --format=json, a saved name, or a folder with one "
        f"JOB/{FILE} for each job; the comments of jobs without one say that there is no comparison",
    )
    parser.add_argument(
        "--key",
        metavar="JOB",
        help="name of the job, of which each has its own comment (default: this job's; in a folder, the "
        "folders' names)",
    )
    parser.add_argument(
        "--number",
        type=int,
        metavar="N",
        help="number of the pull or merge request, if the job does not name it",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the comments and post nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Post or print the comments. Returns 0, also if the pull request has a newer commit."""
    from pytest_llenergy.report.forges import find_run, post_comments
    from pytest_llenergy.report.pr_comment import marker_of

    if args.number is not None and args.number < 1:
        raise ForgeError(f"--number={args.number}: needs the number of a pull or merge request")
    folder = Path(args.file)
    of_jobs = folder.is_dir()
    if of_jobs and args.key is not None:
        raise ForgeError(
            f"--key={args.key}: the folders in {folder} name the jobs; name a file, or omit --key"
        )
    ci = find_run(os.environ, other_job=of_jobs)
    bodies = _render_folder(folder, ci) if of_jobs else [_render_file(args.file, args.key or ci.job, ci)]
    if args.dry_run:
        print_data("\n".join(bodies), end="")
        return 0

    def outdated(marker: str) -> str | None:
        start = marker_of(ci.workflow)
        if not of_jobs or not marker.startswith(start):
            return None
        return _render_missing(marker.removeprefix(start).removesuffix(" -->"), ci)

    try:
        for done, url in post_comments(os.environ, bodies, args.number, outdated):
            print(f"{done} {url}")
    except OutdatedRunError as error:
        print_message("comment", f"no comment: {error}")
    return 0


def _render_folder(folder: Path, ci: CiRun) -> list[str]:
    """Render the comment of each job; without a readable file it says that there is no comparison."""
    paths = sorted(each / FILE for each in folder.iterdir() if each.is_dir())
    if len(paths) > MAX_JOBS:
        raise ForgeError(
            f"{folder}: {len(paths)} jobs, and at most {MAX_JOBS} may comment; merge some of them"
        )
    bodies = []
    for path in paths:
        try:
            bodies.append(_render_file(str(path), path.parent.name, ci))
        except ReportError as error:
            print_message("comment", error)
            bodies.append(_render_missing(path.parent.name, ci))
    return bodies


def _render_missing(job: str, ci: CiRun) -> str:
    from pytest_llenergy.report.pr_comment import render_missing

    return render_missing(_context(ci, job), ci.commit)


def _render_file(name: str, job: str, ci: CiRun) -> str:
    from pytest_llenergy.cli.compare import ComparisonResult
    from pytest_llenergy.record.comparison import ComparedReports
    from pytest_llenergy.report.pr_comment import render_comment
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import read_comparison

    found = read_comparison(locate(name))
    if isinstance(found, ComparedReports):
        return render_comment(found, _context(ci, job))
    result = ComparisonResult.from_paired(found)
    context = replace(_context(ci, job), pairs=result.pairs)
    return render_comment(result.compared, context)


def _context(ci: CiRun, job: str) -> CommentContext:
    from pytest_llenergy.report.pr_comment import MARKER, CommentContext, marker_of

    marker = marker_of(ci.workflow, job) if job else MARKER
    return CommentContext(run_url=ci.url, report_url=ci.artifacts_url, job=job, marker=marker)
