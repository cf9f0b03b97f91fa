# SPDX-License-Identifier: Apache-2.0
"""The page of the command ``llenergy``, of its parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from pytest_llenergy.cli import build_parser

from .text import capital, code, help_text, lines_of, page, table

INTRODUCTION = """\
Exit code 2 is a wrong command line, or a file that is not what it should be, told in one line."""

#: As helps tell it, with something before or after it: ``(repeatable; default: all)``.
DEFAULT = re.compile(r" ?\((?:([^();]+); )?default: ([^();]+)(?:; ([^();]+))?\)")


def commands_page() -> str:
    """The whole page."""
    return page("# Commands", INTRODUCTION, *(list(_command(each, 2)) for each in _commands(build_parser())))


def _commands(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """What stands below it. Parsers do not tell that in public, so what they keep is looked at."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _command(command: argparse.ArgumentParser, level: int) -> Iterator[str]:
    told = capital(help_text(command.description or _help_of(command)))
    yield from lines_of(f"{'#' * level} {command.prog}", f"{told.rstrip('.')}.")
    rows = [_row(action) for group in command._action_groups for action in group._group_actions]
    rows = [row for row in rows if row]
    if rows:
        yield from lines_of(table(["argument", "", "default"], rows))
    if command.epilog:
        yield from lines_of(["```text", command.epilog.rstrip(), "```"])
    for each in _commands(command):
        yield from _command(each, level + 1)


def _help_of(command: argparse.ArgumentParser) -> str:
    """What a command's line in the help of the whole says, where it says no more of itself."""
    for above in (build_parser(), *_commands(build_parser())):
        for action in above._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, each in action.choices.items():
                    if each.prog == command.prog:
                        return next(
                            (str(line.help) for line in action._choices_actions if line.dest == name), ""
                        )
    return ""


def _row(action: argparse.Action) -> list[str]:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return []
    text, default = without_default((action.help or "").replace("%%", "%"))
    if isinstance(action.default, str | int) and not isinstance(action.default, bool) and action.default:
        default = str(action.default)
    if action.choices:
        words = ", ".join(code(str(each)) for each in action.choices)
        text = f"{text}: {words}" if text else words
    # One word is what would be typed; several tell what it is.
    shown = help_text(default) if " " in default else code(default)
    return [_argument(action), capital(help_text(text)), shown]


def without_default(text: str) -> tuple[str, str]:
    """Help without what it says in brackets of the default, and that."""
    found = DEFAULT.search(text)
    if found is None:
        return text, ""
    rest = "; ".join(filter(None, (found[1], found[3])))
    return text.replace(found[0], f" ({rest})" if rest else "").strip(), found[2]


def _argument(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if action.choices and not value:
        value = "WORD"
    if not action.option_strings:
        return code(
            f"[{value}]" if action.nargs == "?" else f"{value} …" if action.nargs == "+" else str(value)
        )
    if action.nargs == 0:
        return ", ".join(map(code, action.option_strings))
    return ", ".join(code(f"{each} {value or action.dest.upper()}") for each in action.option_strings)
