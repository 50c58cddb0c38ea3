"""The changes that would gain most, by how much, and how sure that is.

Each candidate is one thing that somebody could change, tried alone: the network, the slowest ranks, and how the
strategy communicates. Must not add gains up: they overlap (`marginals.DO_NOT_ADD_UP`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from aorta.analysis.tables import Floats
from aorta.analysis.whatif.apply import apply
from aorta.analysis.whatif.change_words import parse_changes
from aorta.analysis.whatif.predicted_value import STATED_ERROR, value_of
from aorta.analysis.whatif.prediction import Base, flags_of
from aorta.analysis.whatif.replay import replay
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS

SHOWN: Final = 3
WORTH: Final = 0.005
"""A gain below this part of the step is not named."""
_CANDIDATES: Final = {
    "network.bandwidth=x2": "twice the bandwidth",
    "network.latency=x0.5": "half the latency",
    "network.algorithm=tree": "tree algorithms",
    "stragglers=none": "no rank slower than the typical one",
    "overlap=on": "overlap on",
    "prefetch=1": "prefetching one block",
    "prefetch=2": "prefetching two blocks",
    "buckets.mb=x2": "buckets twice as large",
    "buckets.mb=x0.5": "buckets half as large",
}
"""What is tried, where the run has it -> in words."""


@dataclass(frozen=True)
class Gain:
    """One change: by how much the job step would be shorter, with its interval."""

    change: str
    words: str
    gain_ms: float
    low_ms: float
    high_ms: float
    share: float
    notes: tuple[str, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.low_ms > 0

    def sentence(self) -> str:
        """By how much, and how sure."""
        sure = "sure" if self.sure else "not sure: it may gain nothing"
        return (
            f"{self.words}: {self.gain_ms:.3f} ms a step ({self.share:.1%}), "
            f"{self.low_ms:.3f} to {self.high_ms:.3f} ms, {sure}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, in a stable order."""
        return {**asdict(self), "sure": self.sure, "notes": list(self.notes), "sentence": self.sentence()}


@dataclass(frozen=True)
class Gains:
    """The largest gains, the largest first. `flags`: what is not known, whatever is changed."""

    step_ms: float
    of: tuple[Gain, ...]
    flags: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, in a stable order."""
        return {
            "step_ms": self.step_ms,
            "gains": [each.as_json() for each in self.of],
            "flags": list(self.flags),
        }


def gains(base: Base, shown: int = SHOWN) -> Gains:
    """Try the candidates that this run allows."""
    found: dict[bytes, Gain] = {}
    for text, words in _CANDIDATES.items():
        tried = _tried(base, text, words)
        if tried is not None:  # two that gain the same in every step are one change: FSDP's overlap and prefetch=1
            found.setdefault(tried[0].tobytes(), tried[1])
    worth = [gain for gain in found.values() if gain.share > WORTH]
    chosen = sorted(worth, key=lambda gain: -gain.gain_ms)[:shown]
    return Gains(base.identity.replayed_ms, tuple(chosen), flags_of(base.program))


def _tried(base: Base, text: str, words: str) -> tuple[Floats, Gain] | None:
    changes = parse_changes([text])
    try:
        changed = apply(base.program, changes)
    except InputError:
        return None  # this run has no such thing to change
    gained = (base.times.job_step_ns() - replay(changed.program).job_step_ns()) / NS_PER_MS
    stated = max(STATED_ERROR[type(change)] for change in changes)
    wrong_by = stated * abs(float(np.median(gained))) + base.identity.missed_ms
    found = value_of(gained, np.arange(len(gained)), wrong_by)
    share = found.value / base.identity.replayed_ms
    return gained, Gain(text, words, found.value, found.low, found.high, share, changed.flags)
