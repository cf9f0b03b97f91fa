# SPDX-License-Identifier: Apache-2.0
"""Every option as pytest knows it: the table makes the command line and the ini keys.

On the command line all defaults are ``None``; the ini key holds the default, so that an ini value is
never hidden by a default of the command line. What a value may be stands in ``values``, which most runs of
pytest need not import.
"""

from __future__ import annotations

from typing import Any

import pytest

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
