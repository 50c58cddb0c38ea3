"""Parses the conditions of the gate, for example `exposed_comm_ms>5%` or `overlap_ratio<-0.02`.

Must not: look at a run.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.analysis.metrics import STEP_METRIC_NAMES
from aorta.analysis.tables import KIND_METRICS
from aorta.errors import InputError

Sign: TypeAlias = Literal["<", ">"]
ALIASES: Final = {"ratio_delta": "overlap_ratio"}
"""The first AORTA's name for the difference of the overlap ratios (SPEC D23)."""
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_FORM: Final = "expected METRIC<NUMBER or METRIC>NUMBER, with % behind the number for a part of the reference"


@dataclass(frozen=True)
class Condition:
    """One condition: the gate fails where candidate minus reference lies beyond `threshold`. The threshold is in the
    unit of the metric or, if `relative`, a fraction of the reference (0.05 for `5%`). `text` is the condition as it was
    given.
    """

    text: str
    metric: str
    sign: Sign
    threshold: float
    relative: bool

    def beyond(self, value: float) -> bool:
        """Whether a difference of `value` fails the condition."""
        return value < self.threshold if self.sign == "<" else value > self.threshold


def parse_condition(text: str, known: Collection[str] = STEP_METRIC_NAMES) -> Condition:
    """Parse one condition.

    Args:
        known: metrics that may be named; `ratio_delta` is accepted as an alias of `overlap_ratio`.

    Raises:
        InputError: it is malformed; the message shows where, and what is allowed.
    """
    signs = [at for at, char in enumerate(text) if char in "<>"]
    if not signs:
        raise _wrong(text, len(text), f"no < or > in it; {_FORM}")
    if len(signs) > 1:
        raise _wrong(text, signs[1], f"a second comparison; {_FORM}. Give --fail-on once for each condition")
    at = signs[0]
    left, right = text[:at], text[at + 1 :]
    name, number = left.strip(), right.strip()
    if not name:
        raise _wrong(text, 0, f"no metric before {text[at]}; {_FORM}")
    metric = ALIASES.get(name, name)
    if metric not in known:
        raise _wrong(text, len(left) - len(left.lstrip()), _unknown(name, known))
    start = at + 1 + len(right) - len(right.lstrip())
    if number.startswith("="):
        raise _wrong(text, start, f"there is no {text[at]}=; {_FORM}")
    relative = number.endswith("%")
    digits = number[:-1].rstrip() if relative else number
    if not _NUMBER.fullmatch(digits):
        raise _wrong(text, start, f"{number!r} is no number; {_FORM}")
    value = float(digits) / (100 if relative else 1)
    if not math.isfinite(value):
        raise _wrong(text, start, f"{number} is too large a number")
    return Condition(text.strip(), metric, "<" if text[at] == "<" else ">", value, relative)


def _unknown(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]}?" if near else "."
    names = ", ".join([*(metric for metric in known if not _of_a_kind(metric)), *ALIASES])
    kinds = "KIND_ms, compute_KIND_ms, exposed_KIND_ms of a kind of collective"
    return f"{name!r} is no metric{meant} Known metrics: {names}, and {kinds}"


def _of_a_kind(metric: str) -> bool:
    return metric in KIND_METRICS


def _wrong(text: str, at: int, what: str) -> InputError:
    """An error that shows the condition, a mark under the position, and what is wrong there."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return InputError(f"condition {shown!r}: {what}\n    {shown}\n    {' ' * at}^")
