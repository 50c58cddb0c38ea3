"""Every error AORTA raises on purpose, with the exit code a command ends with when it meets one.

    AortaError
    +-- ConfigError            1    the configuration cannot be run
    |   +-- FolderNotEmpty     1    a folder of the user's that was to be empty holds files
    |   +-- AnotherPlan        1    a plan's folder holds launches of a different plan
    +-- InputError             2    what an analysis was given cannot be read
    |   +-- IntervalError      2    an interval that ends before it starts
    +-- GateFailed             3    a threshold asked for on the command line was crossed
    +-- Inconclusive           4    the data cannot decide, and the caller asked to be told
    +-- RunIncomplete          5    training ended before its last step, or output is missing
    |   +-- RecordWriteError   5    the record could not be written (disk full, read-only)
    |   +-- PeerFailed         5    another rank died or stopped answering
    |   +-- InstrumentError    5    this torch does not offer what the interception needs
    |   +-- TracesIncomplete   5    the record is whole, and a trace did not get where it was to go
    |       +-- TraceExists    5    ... because another file has its name there
    +-- CausalityViolated      1    an effect comes before its cause by more than the clocks' bounds (--check)
    +-- ToolMissing            127  an external program is not installed
    +-- DeviceUnreadable       1    a device's sensors cannot be read (caught: no run ends with it)

A run stopped by signal n ends with 128 + n after a clean step; that is not an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

EXIT_OK = 0
SIGNAL_EXIT_BASE = 128
"""Added to the number of the signal that ended a run after a clean step."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a mistyped one; None where none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def meant(name: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """Return `did you mean NAME?` for an error message, between two texts; empty where no known name is like it."""
    near = nearest(name, known)
    return "" if near is None else f"{before}did you mean {near}?{after}"


class AortaError(Exception):
    """Root of the tree. The message says what was wrong, what was seen, what is allowed and what to do."""

    exit_code: ClassVar[int] = 1


class ConfigError(AortaError):
    """The configuration cannot be run."""


class FolderNotEmpty(ConfigError, FileExistsError):
    """A folder of the user's that was to be empty holds files."""


class AnotherPlan(ConfigError):
    """A plan's folder holds launches of a different plan."""


class InputError(AortaError):
    """What an analysis was given cannot be read."""

    exit_code = 2


class IntervalError(InputError, ValueError):
    """An interval that ends before it starts."""


class GateFailed(AortaError):
    """A threshold asked for on the command line was crossed."""

    exit_code = 3


class Inconclusive(AortaError):
    """The data cannot decide, and the caller asked to be told."""

    exit_code = 4


class CausalityViolated(AortaError):
    """An effect comes before its cause by more than the clocks explain, and the caller asked for the check."""


class RunIncomplete(AortaError):
    """Training ended before its last step, or not all of its output is where it was to go."""

    exit_code = 5


class RecordWriteError(RunIncomplete):
    """The record could not be written."""


class PeerFailed(RunIncomplete):
    """Another rank died or stopped answering."""


class InstrumentError(RunIncomplete):
    """This torch does not offer what the interception needs."""


class TracesIncomplete(RunIncomplete):
    """The loop and its record are whole, and a trace could not be written, or not be uploaded."""


class TraceExists(TracesIncomplete, FileExistsError):
    """A trace was not uploaded, as another file has its name there and `profiling.overwrite` is false."""


class ToolMissing(AortaError):
    """An external program is not installed."""

    exit_code = 127


class DeviceUnreadable(AortaError):
    """A device's sensors cannot be read. Telemetry goes without them; no run ends with it."""
