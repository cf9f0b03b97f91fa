# SPDX-License-Identifier: Apache-2.0
"""Every option: command line, ini key, reader, default and help."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_llenergy.errors import PlanError

if TYPE_CHECKING:
    from pytest_llenergy.compare.gate import Threshold
    from pytest_llenergy.report.columns import Layout


# Every option as pytest knows it: the table makes the command line and the ini keys.
#
# On the command line all defaults are ``None``; the ini key holds the default, so that an ini value is
# never hidden by a default of the command line. What a value may be stands in ``values``, which most runs of
# pytest need not import.

#: What ``--energy-report`` and ``--energy-html`` write without a name.
DEFAULT_REPORT, DEFAULT_PAGE = "energy.json", "energy.html"

#: Where ``--energy-save=NAME`` keeps reports, in the root directory.
SAVED = ".llenergy"


class Option:
    """One option: ``--energy-NAME`` and ini ``energy_NAME``.

    One that is ``repeatable`` is a tuple of what each is read as; in an ini file one stands on a line. One
    that ``is_path`` is taken from where pytest was called, in an ini file from the root directory; a
    repeatable one of that kind has names with paths. One that ``may_be_path`` is so where there is such a
    file. Written out, as every run would pay for a dataclass or a named tuple.
    """

    def __init__(
        self,
        name: str,
        metavar: str,
        default: str,
        help: str,  # noqa: A002 - as argparse calls it
        bare: str | None = None,
        *,
        is_path: bool = False,
        may_be_path: bool = False,
        repeatable: bool = False,
    ) -> None:
        self.name = name
        self.metavar = metavar
        self.default = default
        self.help = help
        self.bare = bare
        self.is_path = is_path
        self.may_be_path = may_be_path
        self.repeatable = repeatable
        self.flag: str = f"--energy-{name.replace('_', '-')}"
        self.ini: str = f"energy_{name}"


OPTIONS = (
    Option(
        "report",
        "FILE.json",
        "",
        f"Write the records of this run as JSON.\nWithout a name: {DEFAULT_REPORT}",
        bare=DEFAULT_REPORT,
        is_path=True,
    ),
    Option(
        "html",
        "FILE.html",
        "",
        "Show the records of this run on a page, with figures (needs\n"
        f"the extra html). Without a name: {DEFAULT_PAGE}",
        bare=DEFAULT_PAGE,
        is_path=True,
    ),
    Option("rounds", "N", "6", "Least number of measured rounds of each test (default: 6)"),
    Option("warmup", "N", "auto", "Unmeasured iterations before (default: until settled)"),
    Option(
        "gap",
        "SECONDS",
        "0.25",
        "Least quiet time around each round; slow counters make it\nlonger (default: 0.25)",
    ),
    Option(
        "target",
        "PERCENT",
        "2%",
        "Relative standard uncertainty to reach: decides iterations\nand further rounds (default: 2%)",
    ),
    Option(
        "budget",
        "SECONDS",
        "20",
        "Measuring time of a test after which no round is added\nto the least number (default: 20)",
    ),
    Option(
        "model",
        "MODEL",
        "",
        "Hub id, directory, .gguf file or random:PRESET.\nDefault: SmolLM2-135M-Instruct.",
        may_be_path=True,
    ),
    Option("backend", "NAME[,NAME]", "", "Run only these backends (default: all)"),
    Option(
        "python",
        "NAME=PYTHON",
        "",
        "Run the ranks of this backend in the Python of another\nenvironment (repeatable)",
        is_path=True,
        repeatable=True,
    ),
    Option(
        "gpus",
        "GPUS",
        "",
        "GPUs to use in spite of the environment: all, indices in PCI\norder, or UUIDs (boards or MIG)",
    ),
    Option(
        "meter",
        "NAME[,NAME]",
        "auto",
        "Meters to use; NAME:ARGUMENT stands last (default: auto)",
    ),
    Option("require", "measured", "", "Fail instead of estimating"),
    Option("threads", "N", "", "CPU threads of each rank (default: its cores)"),
    Option(
        "start_method",
        "METHOD",
        "spawn",
        "Start ranks as fresh interpreters (spawn, the default), or as\n"
        "forks of one that has imported their libraries (forkserver)",
    ),
    Option(
        "isolation",
        "WORD",
        "backend",
        "Ranks are shared by tests of one backend and model (backend,\n"
        "the default), by all (run), or by none (test)",
    ),
    Option(
        "rank_logs",
        "DIR",
        "",
        "Keep what each rank prints in this directory",
        is_path=True,
    ),
    Option("timeout", "SECONDS", "600", "Longest wait for a rank (default: 600)"),
    Option("lease_timeout", "SECONDS", "1800", "Longest wait for a device (default: 1800)"),
    Option(
        "busy",
        "WORD",
        "fail",
        "fail or skip a test whose GPU somebody else uses\n(default: fail)",
    ),
    Option(
        "busy_timeout",
        "SECONDS",
        "60",
        "Longest wait until they have left the GPU (default: 60)",
    ),
    Option(
        "prompts",
        "FILE",
        "",
        "Prompts for the prompts fixture, one a line",
        is_path=True,
    ),
    Option(
        "save",
        "NAME",
        "",
        f"Keep the records of this run as {SAVED}/NAME.json in the root\n"
        "directory, for --energy-compare=NAME",
    ),
    Option(
        "compare",
        "BASELINE",
        "",
        "Compare with this report: a file, an address, or a name that was\ngiven to --energy-save",
    ),
    Option(
        "fail_on",
        "METRIC:EXPR",
        "",
        "Fail tests in which a metric is worse than in the baseline,\n"
        "such as energy_j:3% or energy_j:3%+2J (repeatable)",
        repeatable=True,
    ),
    Option(
        "columns",
        "NAME[,NAME]",
        "",
        "Columns of the summary: backend, model, device, meter, rounds or\n"
        "metrics (default: of backend,energy_j,energy_per_output_token_j,\n"
        "output_tokens_per_s,meter those that are not empty)",
    ),
    Option(
        "sort",
        "WORD",
        "",
        "Sort the summary by name, fullname or a metric, -METRIC for the\n"
        "largest first (default: the order of the run)",
    ),
    Option(
        "group_by",
        "WORD[,WORD]",
        "",
        "Group the summary by name, func, fullfunc, param, param:NAME,\nbackend, model or device",
    ),
    Option(
        "server_command",
        "COMMAND",
        "",
        "Start this server for the backend server, such as\n"
        "'llama-server -m {model} --port {port}'; no shell reads it",
    ),
    Option(
        "server_url",
        "URL",
        "",
        "Where a server listens that runs on this host already, such as\nhttp://127.0.0.1:8000",
    ),
    Option(
        "server_health",
        "PATH",
        "/health",
        "What answers 200 when the server is ready (default: /health)",
    ),
    Option("server_model", "NAME", "", "The model's name in the server's API (default: its first)"),
    Option(
        "floor",
        "PERCENT",
        "1%",
        "What two runs of the same code differ by on this machine: nothing that\n"
        "may be less is a change (default: 1%)",
    ),
    Option(
        "inconclusive",
        "WORD",
        "warn",
        "What to do where --energy-fail-on can tell neither: warn, fail\nor pass (default: warn)",
    ),
    Option(
        "flops",
        "WORD",
        "off",
        "Count floating-point operations in a pass of their own after the\nrounds: on or off (default: off)",
        bare="on",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Register the table with pytest."""
    group = parser.getgroup("llenergy", "energy of LLM inference")
    for option in OPTIONS:
        bare: dict[str, Any] = {"nargs": "?", "const": option.bare} if option.bare else {}
        if option.repeatable:
            bare = {"action": "append"}
        group.addoption(
            option.flag,
            dest=option.ini,
            default=None,
            metavar=option.metavar,
            help=option.help.replace("%", "%%"),
            **bare,
        )
        parser.addini(option.ini, f"Default of {option.flag}", default=option.default)


def says_something(config: pytest.Config) -> bool:
    """Whether any of them is given: on the command line, or in an ini file other than its default."""
    return any(
        config.getoption(option.ini, default=None) is not None or config.getini(option.ini) != option.default
        for option in OPTIONS
    )


# What the value of each option may be. What reads one raises ``ValueError`` saying what it needs.


def count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.strip().isdecimal()) or int(text) < least:
            raise ValueError(f"needs a whole number, {least} or more")
        return int(text)

    return parse


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError("needs a number of seconds above 0")
    return value


def warmup(text: str) -> int | None:
    return None if text.strip() == "auto" else count(0)(text)


def share(text: str) -> float:
    number, _, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if "%" in text else float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 < value < 1:
        raise ValueError("needs a share between 0 and 1, such as 2% or 0.02")
    return value


def meters(text: str) -> tuple[str, ...]:
    """Names apart by commas; an argument after a colon may hold any character and runs to the end."""
    plain, colon, argument = text.partition(":")
    names = plain.split(",")
    names[-1] += colon + argument
    return _names_of(names, text)


def _names_of(parts: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(name for name in (part.strip() for part in parts) if name)
    if text.strip() and not names:
        raise ValueError("names nothing")
    if "auto" in names and len(names) > 1:
        raise ValueError("auto stands alone: it chooses the meters")
    return () if names == ("auto",) else names


def names(text: str) -> tuple[str, ...]:
    return _names_of(text.split(","), text)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: parse(text) if text.strip() else None


def command(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be read as a command: {error}") from None
    return text.strip()


def path(text: str) -> str:
    if not text.strip().startswith("/"):
        raise ValueError("needs a path such as /health")
    return text.strip()


def word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError(f"knows {_number_of(words)}: {', '.join(words)}")
        return text.strip()

    return parse


def switch(flag: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text.strip() not in ("on", "off"):
            raise ValueError(f"knows two words: on, off; did you mean: pytest {text} {flag}")
        return text.strip() == "on"

    return parse


def _number_of(words: Sequence[str]) -> str:
    return {1: "one word", 2: "two words", 3: "three words"}[len(words)]


def file(what: str, flag: str, default: str) -> Callable[[str], Path]:
    suffix = Path(default).suffix

    def parse(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or "::" in text or path.suffix == ".py":
            raise ValueError(
                f"names a test path, not a {what}; did you mean: pytest {text} {flag} "
                f"(the {what}'s name takes an equals sign: {flag}={default})"
            )
        if path.suffix != suffix:
            raise ValueError(f"the {what}'s name must end in {suffix}; did you mean {text}{suffix}?")
        return path

    return parse


def saved_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text) or text.endswith(".json"):
        raise ValueError(
            f"needs a plain name, such as main: it becomes {SAVED}/main.json; "
            "--energy-report=FILE.json writes to a place of your own"
        )
    return text


def python(text: str) -> tuple[str, Path]:
    backend, _, path = (part.strip() for part in text.partition("="))
    if not (backend and path):
        raise ValueError("needs a backend and its Python, such as vllm=.venvs/vllm/bin/python")
    return backend, Path(path).expanduser()


def columns(text: str) -> tuple[str, ...]:
    from pytest_llenergy.report.columns import parse_columns

    return parse_columns(text)


def sort(text: str) -> str:
    from pytest_llenergy.report.columns import parse_sort

    return parse_sort(text)


def group_by(text: str) -> tuple[str, ...]:
    from pytest_llenergy.report.columns import parse_group_by

    return parse_group_by(text)


def fail_on(text: str) -> Threshold:
    from pytest_llenergy.compare.gate import parse_fail_on

    try:
        return parse_fail_on(text)
    except PlanError as error:
        raise ValueError(str(error)) from None


#: What reads the text of each option of the table.
READERS: dict[str, Callable[[str], Any]] = {
    "report": optional(file("report", "--energy-report", DEFAULT_REPORT)),
    "html": optional(file("page", "--energy-html", DEFAULT_PAGE)),
    "rounds": count(1),
    "warmup": warmup,
    "gap": seconds,
    "target": share,
    "budget": seconds,
    "model": str,
    "backend": names,
    "python": python,
    "gpus": optional(str.strip),
    "meter": meters,
    "require": optional(word("measured")),
    "threads": optional(count(1)),
    "start_method": word("spawn", "forkserver"),
    "isolation": word("test", "backend", "run"),
    "rank_logs": optional(Path),
    "timeout": seconds,
    "lease_timeout": seconds,
    "busy": word("fail", "skip"),
    "busy_timeout": seconds,
    "prompts": optional(Path),
    "save": optional(saved_name),
    "compare": optional(str.strip),
    "fail_on": fail_on,
    "columns": optional(columns),
    "sort": optional(sort),
    "group_by": optional(group_by),
    "server_command": command,
    "server_url": str.strip,
    "server_health": path,
    "server_model": str.strip,
    "floor": share,
    "inconclusive": word("warn", "fail", "pass"),
    "flops": switch("--energy-flops"),
}


# What the options of a run say.


class Settings:
    """What the options say, checked. Times are seconds; empty tuples and ``None`` mean automatic."""

    report: Path | None
    html: Path | None
    rounds: int
    warmup: int | None
    gap: float
    target: float
    budget: float
    model: str
    backend: tuple[str, ...]
    python: tuple[tuple[str, Path], ...]
    gpus: str | None
    meter: tuple[str, ...]
    require: str | None
    threads: int | None
    start_method: Literal["spawn", "forkserver"]
    isolation: Literal["test", "backend", "run"]
    rank_logs: Path | None
    timeout: float
    lease_timeout: float
    busy: str
    busy_timeout: float
    prompts: Path | None
    save: str | None
    compare: str | None
    fail_on: tuple[Threshold, ...]
    columns: tuple[str, ...] | None
    sort: str | None
    group_by: tuple[str, ...] | None
    server_command: str
    server_url: str
    server_health: str
    server_model: str
    floor: float
    inconclusive: Literal["warn", "fail", "pass"]
    flops: bool

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: settings do not change")

    @property
    def keeps_something(self) -> bool:
        """Whether the run is there for what it measures."""
        kept = (self.report, self.html, self.save, self.compare)
        return any(each is not None for each in kept)

    @property
    def layout(self) -> Layout:
        """How the summary is laid out."""
        from pytest_llenergy.report.columns import Layout

        return Layout(self.columns or (), self.sort or "", self.group_by or ())

    @property
    def names_something(self) -> bool:
        """Whether a model, backend, Python or meter is named, which can be checked before any test runs."""
        return bool(self.model or self.backend or self.python or self.meter or self.server_url)


SETTINGS = pytest.StashKey[Settings]()


def settings_of(config: pytest.Config) -> Settings:
    """Those of this run, read once. Raises like ``read_settings``."""
    if SETTINGS not in config.stash:
        config.stash[SETTINGS] = read_settings(config)
    return config.stash[SETTINGS]


def read_settings(config: pytest.Config) -> Settings:
    """Command line over ini over default. Raises ``pytest.UsageError`` naming where a bad value stands."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = config.getoption(option.ini, default=None)
        name = option.flag if given is not None else f"ini key {option.ini}"
        texts = _texts(option, given, str(config.getini(option.ini)))
        if given is not None and not all(text.strip() for text in texts):
            raise pytest.UsageError(f"{name}= has no value; leave the option out, or give it one")
        parsed = [_parsed(option, name, text) for text in texts]
        value: Any = tuple(parsed) if option.repeatable else parsed[0]
        base = config.invocation_params.dir if given is not None else config.rootpath
        if option.is_path and value is not None:
            value = tuple((name, base / path) for name, path in value) if option.repeatable else base / value
        # ``Path.exists`` raises for a name that is too long for a file, which is no file.
        elif option.may_be_path and value and os.path.exists(base / value):  # noqa: PTH110
            value = str(base / value)
        values[option.name] = value
    return Settings(**values)


def _texts(option: Option, given: object, ini: str) -> list[str]:
    """What is said: one text, or those of an option that may be repeated."""
    if not option.repeatable:
        return [ini if given is None else str(given)]
    if isinstance(given, list):
        return [str(each) for each in given]
    return [line.strip() for line in ini.splitlines() if line.strip()]


def _parsed(option: Option, name: str, text: str) -> Any:
    try:
        return READERS[option.name](text)
    except ValueError as error:
        raise pytest.UsageError(f"{name}={text}: {error}") from None


# Where a run keeps what it has measured, looked at before hours are spent.


def check_writable(path: Path, flag: str = "--energy-report") -> None:
    """Nothing is created here. Raises ``pytest.UsageError``."""
    if path.exists() and not os.access(path, os.W_OK):
        raise pytest.UsageError(f"{flag}={path}: the file exists and cannot be written")
    directory = path.parent
    if not directory.is_dir():
        raise pytest.UsageError(f"{flag}={path}: no directory {directory}; make it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"{flag}={path}: no permission to write in {directory}")


def saved_as(config: pytest.Config, name: str) -> Path:
    """Where ``--energy-save=NAME`` keeps a report."""
    return config.rootpath / SAVED / f"{name}.json"


def check_savable(path: Path) -> None:
    """The same of a saved report, whose directory is made when there is something to save."""
    directory = path.parent if path.parent.is_dir() else path.parent.parent
    if path.exists() and not os.access(path, os.W_OK):
        raise pytest.UsageError(f"--energy-save={path.stem}: {path} exists and cannot be written")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"--energy-save={path.stem}: no permission to write in {directory}")
