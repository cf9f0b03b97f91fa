# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: studies of LLenergyMeasure as test files."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llenergy.cli.console import print_line, print_message, write_output

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands

#: Tests of one file above which a warning is printed: at a minute each, a working day.
MANY_CASES = 500

#: What YAML takes a value for by its form or its tag.
KINDS = {
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:int": "whole number",
    "tag:yaml.org,2002:timestamp": "date",
}


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "import",
        help="write tests that measure what studies of LLenergyMeasure do",
        description="Convert experiments and studies of LLenergyMeasure (YAML) into test files, "
        "test_NAME.py. What has no counterpart is named with its value and the reason, on standard error and "
        "in the file. Exits with 2 if a file could not be converted.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.yaml", help="an experiment or a study")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="directory (default: this one)"
    )
    parser.add_argument(
        "--fallback",
        choices=("cpu",),
        help="run on the CPU where GPUs are missing; otherwise tests are skipped",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert each file. Returns 0, or 2 if one could not be converted."""
    from pytest_llenergy.compare.gate import USAGE
    from pytest_llenergy.errors import PlanError

    status = 0
    for path in args.files:
        try:
            _convert(path, args.output, args.fallback)
        except PlanError as error:
            print_message("import", error)
            status = USAGE
    return status


def _convert(path: Path, directory: Path, fallback: str | None) -> None:
    from pytest_llenergy.errors import PlanError
    from pytest_llenergy.study_import.study import convert_study
    from pytest_llenergy.study_import.template import render_tests

    study = convert_study(_load(path), path.name, fallback)
    target = directory / f"test_{re.sub(r'[^A-Za-z0-9]+', '_', path.stem)}.py"
    if target.exists():
        raise PlanError(f"{target} exists; remove it, or choose another directory with -o")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{directory}: the directory cannot be created ({error.strerror})") from None
    write_output(target, render_tests(study, path.name, fallback))
    for note in study.notes:
        print_message("import", f"{path.name}: {note}")
    if len(study.cases) > MANY_CASES:
        print_message(
            "import",
            f"warning: {path.name} makes {len(study.cases)} tests, each measured by itself; remove axes "
            "of its sweep, or choose tests with pytest -k",
        )
    print_line(f"{target}: {len(study.cases)} case{'' if len(study.cases) == 1 else 's'}")


def _load(path: Path) -> Any:
    """Return the content of a YAML file. Raises ``PlanError`` if it cannot be read."""
    from pytest_llenergy.errors import PlanError

    try:
        import yaml
    except ImportError:
        raise PlanError("studies are YAML files: pip install 'pytest-llenergy[import]'") from None

    class Loader(yaml.SafeLoader):
        """Names the line and the type of a value that looks like a date or a number but cannot be read."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep)
                if isinstance(value, int):
                    str(value)  # Python refuses to write more than some thousand digits
            except (ArithmeticError, AttributeError, LookupError, ValueError):
                kind = KINDS.get(node.tag, "value of its tag")
                raise PlanError(
                    f"{path}, line {node.start_mark.line + 1}: the value cannot be read as a {kind}; correct "
                    "it, or quote it if it is a text"
                ) from None
            return value

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is no YAML: {_explain(error)}") from None
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None


def _explain(error: Exception) -> str:
    """Return the problem and its line, without texts of the file, which may be secrets."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    # Python uses either quotes. Names of tokens, such as '<stream end>', and single characters stay.
    problem = re.sub(
        r""" (["'])(?!<[a-z ]+>\1|.\1).*\1""", "", getattr(error, "problem", None) or "cannot be read"
    )
    return f"{problem}, line {mark.line + 1}"
