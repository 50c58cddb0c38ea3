"""The changes that would gain most, by how much, and how sure that is.

Each candidate is one thing that somebody could change, tried alone: the network, the slowest ranks, and how the
strategy communicates. Must not add gains up: they overlap (`marginals.DO_NOT_ADD_UP`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from aorta.analysis.formatting import rough_interval
from aorta.analysis.tables import Floats
from aorta.analysis.whatif.apply import apply
from aorta.analysis.whatif.change_words import parse_changes
from aorta.analysis.whatif.predicted_value import STATED_ERROR, gain_of, step_gain_ms
from aorta.analysis.whatif.prediction import Base, flags_of, free_communication
from aorta.analysis.whatif.replay import replay
from aorta.errors import InputError

SHOWN: Final = 3
WORTH: Final = 0.005
"""A gain below this part of the step is not named."""
_SETTINGS: Final = {
    "overlap=on": "overlap on",
    "prefetch=1": "prefetching one block",
    "prefetch=2": "prefetching two blocks",
    "buckets.mb=x2": "buckets twice as large",
    "buckets.mb=x0.5": "buckets half as large",
    "network.algorithm=tree": "tree algorithms",
}
"""What the next launch can be given, where the run has it -> in words."""
_HYPOTHETICAL: Final = {
    "network.bandwidth=x2": "twice the bandwidth",
    "network.latency=x0.5": "half the latency",
    "stragglers=none": "no rank slower than the typical one",
}
"""What no setting changes."""


@dataclass(frozen=True)
class Gain:
    """One change: by how much the job step would be shorter, with its interval (`Prediction.gain_ms`).

    `setting`: whether a setting of the next launch makes it; otherwise it is hypothetical.
    """

    change: str
    words: str
    setting: bool
    gain_ms: float
    low_ms: float
    high_ms: float
    share: float
    notes: tuple[str, ...] = ()

    @property
    def significant(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.low_ms > 0

    def sentence(self) -> str:
        """By how much, and whether that is significant."""
        return (
            f"{self.words}{'' if self.setting else ' (hypothetical)'}: "
            f"{rough_interval(self.gain_ms, self.low_ms, self.high_ms)} per step, {self.share:.1%}, "
            f"{'significant' if self.significant else 'not significant'}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, in a stable order."""
        return {
            **asdict(self),
            "significant": self.significant,
            "notes": list(self.notes),
            "sentence": self.sentence(),
        }


@dataclass(frozen=True)
class Gains:
    """The largest gains: significant ones of settings first, then the others, the largest first. `flags`: what is not
    known, whatever is changed; `notes`: why less exposed communication is not as much less of a step.
    """

    step_ms: float
    of: tuple[Gain, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, in a stable order."""
        return {
            "step_ms": self.step_ms,
            "gains": [each.as_json() for each in self.of],
            "flags": list(self.flags),
            "notes": list(self.notes),
        }


def gains(base: Base, shown: int = SHOWN) -> Gains:
    """Try the candidates that this run allows."""
    found: dict[bytes, Gain] = {}
    for text, words in (_SETTINGS | _HYPOTHETICAL).items():
        tried = _tried(base, text, words)
        if tried is not None:  # two that gain the same in every step are one change: FSDP's overlap and prefetch=1
            found.setdefault(tried[0].tobytes(), tried[1])
    worth = [gain for gain in found.values() if gain.share > WORTH]
    chosen = sorted(worth, key=lambda gain: (not (gain.setting and gain.significant), -gain.gain_ms))[:shown]
    notes = free_communication(base).notes
    return Gains(base.identity.replayed_ms, tuple(chosen), flags_of(base.program), notes)


def _tried(base: Base, text: str, words: str) -> tuple[Floats, Gain] | None:
    (change,) = parse_changes([text])
    try:
        changed = apply(base.program, [change])
    except InputError:
        return None  # this run has no such thing to change
    gained = step_gain_ms(base.times, replay(changed.program))
    wrong_by = STATED_ERROR[type(change)] * abs(float(np.median(gained)))
    found = gain_of(gained, base.identity.missed_ms + wrong_by)
    share = found.value / base.identity.replayed_ms
    return gained, Gain(text, words, text in _SETTINGS, found.value, found.low, found.high, share, changed.flags)
