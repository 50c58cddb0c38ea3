"""Ranges that the caller names, until the step takes them that ends first after them.

They are read on the host's clock, from any thread; while torch.profiler records the calling thread, a range is in its
trace too, as `range <name>`. A range that fails is recorded with the type of the error, which goes on. Must not
synchronise with the device, or grow without bound.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from aorta.errors import ConfigError
from aorta.redaction import redact

TRACE_NAME: Final = "range {name}"
"""In torch's traces. The word in front keeps a name such as `ProfilerStep#3` from being taken for a step."""
MOST_NAME_CHARS: Final = 120
MOST_NAMES: Final = 1_000
"""Distinct names of a recording; all further ones are recorded as `OTHER_NAMES`."""
OTHER_NAMES: Final = "(more names)"
MOST_PER_STEP: Final = 10_000
"""Ranges of a step; more are left out, and counted in the step's `reasons`."""
MOST_THREADS: Final = 64
"""Threads that are told apart; all further ones are recorded as the last."""


@dataclass
class MarksOfStep:
    """Ranges (name, thread, depth, start_ns, end_ns, error); `left_out` counts those beyond `MOST_PER_STEP`."""

    ranges: list[tuple[str, int, int, int, int, str | None]] = field(default_factory=list)
    left_out: int = 0


class UserMarks:
    """Collects the caller's ranges until a step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks = MarksOfStep()
        self._names: dict[str, str] = {}
        self.thread = _Thread(itertools.count())

    def range(self, name: str) -> AbstractContextManager[None]:
        """Record a `with` block when it ends.

        Raises:
            ConfigError: `name` is no string, or empty.
        """
        return _OpenRange(self, self._name(name))

    @property
    def has_ranges(self) -> bool:
        """Whether any were recorded since they were taken."""
        return bool(self._marks.ranges)

    def take(self) -> MarksOfStep:
        """Return what was recorded since the last call."""
        with self._lock:
            taken, self._marks = self._marks, MarksOfStep()
        return taken

    def ended(self, row: tuple[str, int, int, int, int, str | None]) -> None:
        with self._lock:
            if len(self._marks.ranges) < MOST_PER_STEP:
                self._marks.ranges.append(row)
            else:
                self._marks.left_out += 1

    def _name(self, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"recording.range({name!r}): a name must be a string that is not empty")
        key = name[: MOST_NAME_CHARS + 1]
        known = self._names.get(key)
        if known is not None:
            return known
        if len(self._names) >= MOST_NAMES:
            return OTHER_NAMES
        # A lone surrogate is no character of any encoding, so JSON cannot hold it.
        clean = redact(name)[:MOST_NAME_CHARS].encode("utf-8", "replace").decode("utf-8")
        return self._names.setdefault(key, clean + ("..." if len(key) > MOST_NAME_CHARS else ""))


class _Thread(threading.local):
    """Of the caller: its number, and how many of its ranges are open. The thread that records is number 0."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.number, self.depth = min(next(numbers), MOST_THREADS - 1), 0


class _OpenRange:
    """A range between its begin and its end, which are on one thread."""

    __slots__ = ("_depth", "_marks", "_name", "_seen", "_start_ns", "_thread")

    def __init__(self, marks: UserMarks, name: str) -> None:
        self._marks, self._name = marks, name

    def __enter__(self) -> None:
        thread = self._marks.thread
        self._thread, self._depth = thread.number, thread.depth
        thread.depth += 1
        self._seen: Any = None
        if torch.autograd._profiler_enabled():
            self._seen = torch.profiler.record_function(TRACE_NAME.format(name=self._name))
            self._seen.__enter__()
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *how: object) -> None:
        end_ns = time.perf_counter_ns()
        if self._seen is not None:
            self._seen.__exit__(kind, *how)
        thread = self._marks.thread
        thread.depth = max(0, thread.depth - 1)  # it may have been entered on another thread
        why = None if kind is None else kind.__name__[:MOST_NAME_CHARS]
        self._marks.ended((self._name, self._thread, self._depth, self._start_ns, end_ns, why))
