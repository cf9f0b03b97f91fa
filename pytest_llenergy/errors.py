# SPDX-License-Identifier: Apache-2.0
"""Exceptions and warnings of the package.

Each message is one line that names the problem, the value found, and the remedy.
"""

from __future__ import annotations


class LLEnergyError(Exception):
    """Base of all errors raised by pytest-llenergy."""


class ModelError(LLEnergyError):
    """A model could not be found, reached, converted or loaded."""


class BackendError(LLEnergyError):
    """A backend is unknown, unavailable, or lacks a requested capability."""


class ServerError(BackendError):
    """A server exited or did not start in time. ``sections`` are titles and texts of its output."""

    sections: tuple[tuple[str, str], ...] = ()


class MeterError(LLEnergyError):
    """A meter is unknown, unavailable, or cannot measure what was requested."""


class MeterDoesNotApply(MeterError):  # noqa: N818 - not a fault
    """A meter does not cover the devices of a test, such as RAPL for GPUs."""


class DeviceError(LLEnergyError):
    """The requested devices do not exist, are not allowed, or are not free."""


class LeaseTimeoutError(DeviceError):
    """Others still held the devices when the wait for them was over."""


class NoDriverError(DeviceError):
    """The host has no NVIDIA driver, or the Python binding is missing."""


class PlanError(LLEnergyError):
    """Marks, devices and backend contradict each other."""


class ReportError(LLEnergyError):
    """A report or journal cannot be read or written."""


class ForgeError(LLEnergyError):
    """GitHub or GitLab cannot be reached, or refuses a request."""


class OutdatedRunError(ForgeError):
    """The pull request was pushed to or closed since the run."""


class WorkerError(LLEnergyError):
    """A rank failed.

    Attributes:
        details: Formatted traceback of the rank.
        sections: Titles and texts of the latest output of ranks.
    """

    def __init__(
        self, message: str, details: str = "", *, sections: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.details = details
        self.sections = sections

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n{self.details}" if self.details else message


class WorkerPlacementError(WorkerError):
    """The ranks did not start on the devices that were planned."""
