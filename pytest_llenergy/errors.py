# SPDX-License-Identifier: Apache-2.0
"""Every exception and warning of the package.

Each message is one line that says what was wrong, what was found and what to do.
"""

from __future__ import annotations


class LLEnergyError(Exception):
    """Base of all errors raised by pytest-llenergy."""


class ModelError(LLEnergyError):
    """A model could not be found, reached, converted or loaded."""


class BackendError(LLEnergyError):
    """A backend is unknown, unavailable, or was asked for what it cannot do."""


class ServerError(BackendError):
    """A server ended or was not ready in time. ``sections`` are titles and text of what it has written."""

    sections: tuple[tuple[str, str], ...] = ()


class MeterError(LLEnergyError):
    """A meter is unknown, unavailable, or cannot measure what was asked of it."""


class MeterDoesNotApply(MeterError):  # noqa: N818 - it is no fault
    """A meter has nothing to do with the devices of a test, such as RAPL with GPUs."""


class DeviceError(LLEnergyError):
    """The requested devices do not exist, are not allowed, or are not free."""


class NoDriverError(DeviceError):
    """There is no NVIDIA driver on this host, or no module to ask it."""


class PlanError(LLEnergyError):
    """Marks, devices and backend contradict each other."""


class ReportError(LLEnergyError):
    """A report or journal cannot be read or written."""


class ExperimentError(LLEnergyError):
    """An experiment of another tool cannot be read."""


class ForgeError(LLEnergyError):
    """GitHub or GitLab could not be asked, or refused."""


class WorkerError(LLEnergyError):
    """A rank failed.

    ``details`` is the rank's traceback, ready to print, and ``sections`` are the titles and the text of what
    ranks have printed lately. ``before_ready`` tells of ranks that did not come as far as the test's work.
    """

    def __init__(
        self, message: str, details: str = "", *, sections: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.details = details
        self.sections = sections
        self.before_ready = False

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n{self.details}" if self.details else message


class WorkerPlacementError(WorkerError):
    """The ranks that started are not the ranks that were planned."""


class LLEnergyWarning(UserWarning):
    """Base of all warnings given by pytest-llenergy."""


class UncoordinatedLeaseWarning(LLEnergyWarning):
    """GPUs are leased where other users of the same GPUs cannot see it."""
