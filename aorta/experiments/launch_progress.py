"""Where a plan is: one bar over all its launches on a terminal, otherwise one line per launch; on stderr.

Must not write to stdout, which holds what the plan says at its end.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tqdm import tqdm

from aorta.command_line import rounded_time, to_stderr, tolerate_closed_terminal


class LaunchProgress:
    """A bar, or lines.

    Args:
        total: launches of the plan.
        done: how many of them were done before.
        seconds: how long those lasted.
    """

    def __init__(self, total: int, done: int, seconds: list[float]) -> None:
        self._total, self._done, self._seconds = total, done, list(seconds)
        self._bar: Any = None
        if sys.stderr.isatty():
            # tqdm's own thread would wake up beside what is measured.
            tqdm.monitor_interval = 0
            with tolerate_closed_terminal():
                self._bar = tqdm(
                    total=total, initial=done, unit="launch", dynamic_ncols=True, file=sys.stderr, leave=True
                )

    def started(self, name: str) -> None:
        """A launch runs."""
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.set_description(name)

    def tick(self) -> None:
        """Time has passed."""
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.refresh()

    def ended(self, name: str, seconds: float, outcome: str, *, counts: bool) -> None:
        """A launch has ended; `counts`: it is done."""
        if counts:
            self._done += 1
            self._seconds.append(seconds)
        left = self._total - self._done
        line = f"[{self._done}/{self._total}] {name}: {outcome} in {seconds:.1f} s"
        if self._bar is None:
            about = (
                f", about {rounded_time(left * statistics.fmean(self._seconds))} left" if left and self._seconds else ""
            )
            to_stderr(f"{line}{about}")
            return
        with tolerate_closed_terminal():
            if counts:
                self._bar.update(1)
            else:
                self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.close()
