# SPDX-License-Identifier: Apache-2.0
"""From a file of LLenergyMeasure to a file of tests."""

from __future__ import annotations

from pathlib import Path

from pytest_llenergy.backends.registry import known_backends
from pytest_llenergy.errors import ExperimentError
from pytest_llenergy.peers.keys import Notes, case_of, settings_lost, warmup_of
from pytest_llenergy.peers.pytest_file import TestFile
from pytest_llenergy.peers.study import read_study


def converted(file: Path, fallback: str | None = None) -> TestFile:
    """Read a file. Raises ``ExperimentError``, one line, for what is no experiment."""
    study = read_study(file)
    notes, backends = Notes(), known_backends()
    cases = []
    for number, experiment in enumerate(study.experiments, 1):
        try:
            cases.append(case_of(experiment, backends, notes))
        except ExperimentError as error:
            which = f" experiment {number} of {len(study.experiments)}:" if len(study.experiments) > 1 else ""
            raise ExperimentError(f"{file.name}:{which} {error}") from None
    settings_lost(study.settings, notes)
    datasets = {case.dataset for case in cases}
    if len(datasets) > 1:
        notes.told.pop("task.dataset.source", None)
        named = ", ".join(sorted(datasets))
        notes.add(
            "task.dataset.source", named, "a file of tests has one set of prompts; see --energy-prompts"
        )
    warmups = {warmup_of(experiment) for experiment in study.experiments}
    (warmup,) = warmups if len(warmups) == 1 else (None,)
    return TestFile(
        origin=file.name,
        title=study.name or file.stem,
        cases=cases,
        notes=notes.lines,
        swept=study.swept,
        arguments=[] if warmup is None else [f"--energy-warmup={warmup}"],
        fallback=fallback,
    )
