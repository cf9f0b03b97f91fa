# SPDX-License-Identifier: Apache-2.0
"""Part 7, a user's commands: the benchmarks with a report, and ``llenergy ab`` on the same work twice."""

from __future__ import annotations

import shutil
import sys

from .part import Notebook, main, need_board, need_cuda, scratch
from .session import LLENERGY, SUITE, load_report, note_variables, run_command

BUDGET_S = 80.0

#: Seconds reserved for ``ab`` after the benchmarks.
AB_S = 30.0

#: Start of a test's line in the output.
VERDICTS = ("regressed", "improved", "unchanged", "inconclusive", "invalid")


def body(notebook: Notebook) -> None:
    """Run the commands of the README with a model that needs no network."""
    if not notebook.dry:
        need_cuda()
        need_board()
    _run_benchmarks(notebook)
    _run_ab(notebook)


def _run_benchmarks(notebook: Notebook) -> None:
    report = notebook.file("energy.json")
    quick = ["--energy-rounds=3", "--energy-budget=1", "--energy-warmup=1"]
    what = "benchmarks/inference/test_inference.py" if notebook.dry else "benchmarks"
    size = "tiny" if notebook.dry else "135m"
    command = [sys.executable, "-m", "pytest", what, f"--energy-report={report}", *quick]
    command += [f"--energy-model=random:llama-{size}", "--energy-backend=transformers"]
    # Some need a server; without a backend that serves, collecting them is an error. Others need two boards
    # and would be slow on the CPU.
    command += ["--ignore=benchmarks/serving", "-k", "not parallel"]
    # The repository's settings turn warnings into errors, which is meant for its own tests.
    command += ["-W", "default", "-p", "no:cacheprovider"]
    done = run_command(notebook, "benchmarks", command, notebook.left_s - AB_S)
    made = load_report(report)
    records = [] if made is None else list(made.records)
    measured = [record for record in records if record.counts]
    on_gpu = [record for record in measured if record.devices and record.devices[0].startswith("GPU-")]
    notebook.check(
        "pytest benchmarks --energy-report",
        done.code == 0 and bool(measured),
        f"{len(measured)} of {len(records)} measured; {done.last}",
    )
    if not notebook.dry:
        kinds = {record.kind for record in on_gpu}
        message = f"{len(on_gpu)} of {len(measured)}; kinds {sorted(map(str, kinds))}"
        notebook.check("the tests were measured on the GPU", bool(on_gpu) and kinds == {"measured"}, message)


def _run_ab(notebook: Notebook) -> None:
    """Compare a copy in a separate directory, since this repository may change meanwhile."""
    with scratch("ab") as directory:
        shutil.copytree(SUITE, directory / "suite", ignore=shutil.ignore_patterns("__pycache__"))
        sides = directory / "ab.json"
        command = [*LLENERGY, "ab", "--a=", "--b=-W default", "--pairs=6", "--rounds-per-session=6"]
        command += ["-o", str(sides), "--", "pytest", "-c", "suite/pytest.ini", "suite/suite_user.py"]
        command += ["--energy-budget=2"]
        done = run_command(
            notebook, "ab", command, notebook.left_s - 3, note_variables(notebook.file("ab.jsonl")), directory
        )
        if sides.exists():
            shutil.copy(sides, notebook.file("ab.json"))
    said = (line.strip() for line in done.output.splitlines())
    verdict = next((line for line in said if line.startswith(VERDICTS)), done.last)
    detail = f"code {done.code}; {verdict}"
    notebook.check("llenergy ab of the same work twice: no alarm", done.code == 0, detail)


if __name__ == "__main__":
    sys.exit(main("user", body, BUDGET_S))
