"""Where numbers go besides the record and the report: tools that people look at anyway.

A `Logger` takes the scalars of steps while a run goes on, and those of a finished report. AORTA has four
(`aorta.loggers.clients`), each through its tool's own client, which is an extra; any object with the three methods is
one too:

    class Printer:
        def log_step(self, step, values): print(step, values["overlap_ratio"])
        def log_summary(self, label, values): print(label, values)
        def close(self): pass

    with aorta.record("artifacts/mine", model=model, loggers=["tensorboard", Printer()]) as recording:
        ...

Must not compute a metric (values come from the record and from `summary.json`), load torch, or import a client that was
not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["Logger"]


@runtime_checkable
class Logger(Protocol):
    """Takes scalars. Of a run only rank 0 has loggers; their calls come one at a time, from a thread of AORTA's.

    An exception from any method is logged once, and the logger is not called again; the run goes on.
    """

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a finished step, some steps after it ended.

        Args:
            step: its global step.
            values: name -> value; a value that the step does not have is left out (docs/loggers.md lists them).
        """

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log the numbers of one dataset of a report, or of its comparison.

        Args:
            label: of the dataset; of a comparison `CANDIDATE-vs-REFERENCE`.
            values: name -> value; text for verdicts, identities and units.
        """

    def close(self) -> None:
        """Write what is still held; called once at the end."""
