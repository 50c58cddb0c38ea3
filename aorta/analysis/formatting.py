"""Numbers as text for people: how many digits, which sign, and what stands for a value that is not known.

    TEXT.number(1.23456, "ms")         1.235         terminal, Markdown, sentences, pictures
    PAGE.number(-1234.5, "ms")         -1,234.500    the HTML page: thousands apart, a real minus sign (U+2212)
    TEXT.effect(0.05, "quotient")      +5.0 %
    PAGE.effect(0.05, "difference")    +5.00 points
    TEXT.size(26_214_400)              26.2 MB

The module lies below everything that writes sentences (`compare`, `attribution`, `gate`) and below the reports.
Must not choose words about a result, compute a number, or write a value that is not known as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from aorta.analysis.documents.comparison import ComparedMetric, Effect, Side
from aorta.analysis.documents.dataset import DatasetEntry, Ends

DIGITS: Final = {"ms": 3, "ratio": 4, "GB/s": 3}
"""Digits behind the point, by unit of a metric."""
_OTHER_DIGITS: Final = 3
_SIZES: Final = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True)
class NumberFormat:
    """How one medium writes numbers; `TEXT` and `PAGE` are the two there are.

    Attributes:
        unknown: what stands for None.
        unknown_size: what stands for a number of bytes that is not known.
        separator: between thousands.
        minus: the sign of a negative number.
        space: between a number and `%`, `points` or a unit of bytes.
        effects_in_points: an effect on a ratio in percentage points, not as a ratio.
        effect_digits: behind the point of an effect in per cent or points.
    """

    unknown: str = "unknown"
    unknown_size: str = "unknown size"
    separator: str = ""
    minus: str = "-"
    space: str = " "
    effects_in_points: bool = False
    effect_digits: int = 1

    def number(self, value: float | None, unit: str, *, signed: bool = False, fewer: int = 0) -> str:
        """Return a value of a metric without its unit: ms and GB/s with three decimals, ratios with four.

        Args:
            signed: write a + as well, for a difference.
            fewer: leave so many decimals out, where there is little room.
        """
        if value is None:
            return self.unknown
        return self._fixed(value, DIGITS.get(unit, _OTHER_DIGITS) - fewer, signed=signed)

    def quantity(self, value: float | None, unit: str, *, signed: bool = False) -> str:
        """Return a value of a metric with its unit; a ratio has none."""
        text = self.number(value, unit, signed=signed)
        return text if value is None or unit == "ratio" else f"{text} {unit}"

    def ratio(self, value: float | None) -> str:
        """Return a ratio as a sentence states it, with a digit less than in a table."""
        return self.number(value, "ratio", fewer=1)

    def bounds(self, ends: Ends, unit: str, *, fewer: int = 0, named: bool = True) -> str:
        """Format the bounds of a value that is not known better: `at most 0.750`, `0.210 to at most 0.750 ms`.

        Args:
            named: with the unit, where it has one.
        """
        low, high = ends.at_least, ends.at_most
        if low == high:
            return self.quantity(high, unit) if named and not fewer else self.number(high, unit, fewer=fewer)
        least = "" if low <= 0 else f"{self.number(low, unit, fewer=fewer)} to "
        return f"{least}at most {self.number(high, unit, fewer=fewer)}" + (
            "" if unit == "ratio" or not named else f"{self.space}{unit}"
        )

    def side(self, pair: ComparedMetric, side: Side) -> str:
        """Return one side of a metric that is compared, with its unit: the value, or its bounds."""
        ends = pair.ends(side)
        return self.quantity(pair.value(side), pair.unit) if ends is None else self.bounds(ends, pair.unit)

    def percent(self, share: float | None, digits: int = 1, *, signed: bool = False) -> str:
        """Return a share: 0.123 is 12.3 %."""
        return self.unknown if share is None else f"{self._fixed(100 * share, digits, signed=signed)}{self.space}%"

    def points(self, difference: float, digits: int = 1, *, signed: bool = False) -> str:
        """Return a difference of two shares: 0.123 is 12.3 points."""
        return f"{self._fixed(100 * difference, digits, signed=signed)}{self.space}points"

    def effect(self, value: float | None, kind: str) -> str:
        """Return an effect with its sign: the `difference` of two ratios, or a `quotient` less 1."""
        if value is None:
            return self.unknown
        if kind != "difference":
            return self.percent(value, self.effect_digits, signed=True)
        if self.effects_in_points:
            return self.points(value, self.effect_digits, signed=True)
        return self._fixed(value, 3, signed=True)

    def interval(self, entry: Effect) -> str:
        """Format an effect of `summary.json` from `low` to `high`, as `effect` formats them, the unit once."""
        if entry.low is None or entry.high is None:
            return self.unknown
        return f"{self.effect(entry.low, entry.kind).partition(self.space)[0]} to {self.effect(entry.high, entry.kind)}"

    def size(self, count: float | None) -> str:
        """Return bytes in units of 1000 with three digits, without trailing zeros. -1 is not known either."""
        if count is None or count < 0:
            return self.unknown_size
        for unit, least in _SIZES:
            if count >= least:
                digits = 2 if count < 10 * least else 1 if count < 100 * least else 0
                text = f"{count / least:.{digits}f}"
                return f"{text.rstrip('0').rstrip('.') if digits else text}{self.space}{unit}"
        return f"{count:.0f}{self.space}B"

    def whole(self, value: int) -> str:
        """Return a count with its thousands separated."""
        return f"{value:{self.separator}}"

    def count(self, value: int, what: str) -> str:
        """Return `1 launch`, `4 launches`."""
        plural = what + ("es" if what.endswith(("s", "ch")) else "s")
        return f"{self.whole(value)} {what if value == 1 else plural}"

    def steps_used(self, entry: DatasetEntry) -> str:
        """Return `7 steps on 2 ranks`; with the number of records where that is not their product."""
        steps, ranks = entry.steps, len(entry.health.ranks_read)
        said = self.count(steps.global_steps_used, "step") + (f" on {self.count(ranks, 'rank')}" if ranks else "")
        if steps.rank_steps_used == steps.global_steps_used * ranks:
            return said
        return f"{said} ({self.count(steps.rank_steps_used, 'record')}, one per step and rank)"

    def _fixed(self, value: float, digits: int, *, signed: bool) -> str:
        text = f"{value:{'+' if signed else ''}{self.separator}.{digits}f}"
        return text.replace("-", self.minus)


TEXT: Final = NumberFormat()
"""Plain characters: a terminal, Markdown, JUnit, sentences in `summary.json`, pictures."""

PAGE: Final = NumberFormat(
    unknown="\u2013",
    unknown_size="size unknown",
    separator=",",
    minus="\u2212",
    space="\u00a0",
    effects_in_points=True,
    effect_digits=2,
)
"""The HTML page; a number and its unit stay on one line."""


def is_zero(pair: ComparedMetric) -> bool:
    """Return whether a compared metric is 0 on both sides, to the digits that are shown: a row that says nothing."""
    least = 0.5 * 10.0 ** -DIGITS.get(pair.unit, _OTHER_DIGITS)
    return all(value is not None and abs(value) < least for value in (pair.reference, pair.candidate))


def p_value(p: float | None, digits: int = 2, *, unknown: str = "unknown") -> str:
    """Return a probability with two significant digits, or three where it stands in a table."""
    return unknown if p is None else f"{p:.{digits}g}"


def significant(value: float, digits: int = 4) -> str:
    """Return a value with so many digits in all, for a sentence that names both sides of a comparison."""
    return f"{value:.{digits}g}"


def rough_ms(value_ms: float) -> str:
    """Return milliseconds for a sentence: three digits or so, with their unit, without a sign."""
    value = abs(value_ms)
    if value == 0:
        return "0 ms"
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 3}f} ms"


def rough_interval(value: float, low: float, high: float, unit: str = "ms") -> str:
    """Return a value with its interval, and no more digits than its width gives a meaning: 20 ms (16 to 23)."""
    half = (high - low) / 2
    digits = 3 if half <= 0 else min(max(-math.floor(math.log10(half / 2)), 0), 3)
    while digits < 3 and low * high > 0 and not (round(low, digits) and round(high, digits)):
        digits += 1  # the interval holds no 0, and must not look as if it did
    numbers = [round(number, digits) + 0.0 for number in (value, low, high)]  # + 0.0: no -0
    middle, least, most = (f"{number:.{digits}f}" for number in numbers)
    named = f" {unit}" if unit else ""
    return f"{middle}{named} ({least} to {most})" if any(numbers) else f"0{named}"


def rough_percent(share: float) -> str:
    """Return a share in whole per cent, for a sentence; none is called 0 or 100 that is not."""
    if 0 < share < 0.005:
        return "less than 1 %"
    if 0.995 <= share < 0.9995:
        return "over 99 %"
    return TEXT.percent(share, 0)


def whole_percent(share: float | None) -> str:
    """Return a share for a table, or in passing: 0.123 is 12%."""
    return TEXT.unknown if share is None else f"{share:.0%}"


def first_upper(sentence: str) -> str:
    """Return a sentence that begins with a capital letter."""
    return sentence[:1].upper() + sentence[1:]


def json_text(value: object) -> str:
    """Return any JSON value as one line; strings as they are."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(json_text, value)) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{key}={json_text(each)}" for key, each in value.items()) or "(none)"
    return str(value)
