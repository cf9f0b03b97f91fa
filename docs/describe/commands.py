# SPDX-License-Identifier: Apache-2.0
"""Write the page of the command ``llenergy`` from its parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from pytest_llenergy.cli import build_parser

from .text import capital, code, help_text, lines_of, page, table

INTRODUCTION = """\
Exit code 2 means a wrong command line, or a file that cannot be used, with one line that says why."""

#: A default as help texts state it, alone or with other remarks: ``(repeatable; default: all)``.
DEFAULT = re.compile(r" ?\((?:([^();]+); )?default: ([^();]+)(?:; ([^();]+))?\)")


def commands_page() -> str:
    """Return the whole page."""
    return page(
        "# Commands", INTRODUCTION, *(list(_command(each, 2)) for each in commands_of(build_parser()))
    )


def commands_of(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of sub-commands."""
    # argparse has no public way to list sub-commands.
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _command(command: argparse.ArgumentParser, level: int) -> Iterator[str]:
    about = capital(help_text(command.description or help_of(command)))
    yield from lines_of(f"{'#' * level} {command.prog}", f"{about.rstrip('.')}.")
    rows = [_row(action) for group in command._action_groups for action in group._group_actions]
    rows = [row for row in rows if row]
    if rows:
        yield from lines_of(table(["argument", "", "default"], rows))
    if command.epilog:
        yield from lines_of(["```text", command.epilog.rstrip(), "```"])
    for each in commands_of(command):
        yield from _command(each, level + 1)


def help_of(command: argparse.ArgumentParser) -> str:
    """Return the one-line help of a sub-command, as its parent shows it."""
    for above in (build_parser(), *commands_of(build_parser())):
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
        listed = text == ", ".join(map(str, action.choices))
        text = words if listed or not text else f"{text}: {words}"
    # One word is what the user would type; several describe it.
    shown = help_text(default) if " " in default else code(default)
    return [_argument(action), capital(help_text(text)), shown]


def without_default(text: str) -> tuple[str, str]:
    """Split a help text into the text without its default, and the default."""
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
