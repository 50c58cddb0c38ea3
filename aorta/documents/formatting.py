"""Numbers as text for people, by one rule: three significant digits, without trailing zeros.

    TEXT.quantity(164.918, "ms")       165 ms        terminal, Markdown, sentences, pictures
    PAGE.quantity(-1234.5, "ms")       -1,234 ms     the HTML page: thousands apart, a real minus sign (U+2212)
    TEXT.effect(-0.48, "difference")   -48 points    a difference of two ratios

Must not choose words about a result, compute a number, or write a value that is not known as 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aorta.command_line import name_ranks
from aorta.documents.comparison import ComparedMetric, Effect
from aorta.documents.dataset import DatasetEntry, Ends, Statistics

LEAST: Final = 0.0005
"""What is nearer to 0 is written as 0 or `<0.001`, or of a share `<0.1 %`."""
_MOST_DECIMALS: Final = 3
_LISTED: Final = 6
_SIZES: Final = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True)
class NumberFormat:
    """How one medium writes numbers; `TEXT` and `PAGE` are the two there are. `separator` stands between thousands,
    `space` between a number and its unit.
    """

    unknown: str = "unknown"
    unknown_size: str = "unknown size"
    separator: str = ""
    minus: str = "-"
    space: str = " "

    def number(self, value: float | None, unit: str = "", *, signed: bool = False) -> str:
        """Return a value of a metric without `ms` or `GB/s`, with three significant digits, at most three decimals;
        a `ratio` is a share in per cent.

        Args:
            signed: a difference: with a + as well, and of two ratios in points.
        """
        if value is None:
            return self.unknown
        if unit == "ratio":
            return self.points(value) if signed else self.percent(value)
        digits = 2 - math.floor(math.log10(float(f"{abs(value):.3g}"))) if value else 0
        return self._fixed(value, min(max(digits, 0), _MOST_DECIMALS), signed=signed)

    def quantity(self, value: float | None, unit: str, *, signed: bool = False) -> str:
        """Return a value of a metric with its unit."""
        text = self.number(value, unit, signed=signed)
        return text if value is None or unit in ("ratio", "") else f"{text}{self.space}{unit}"

    def bounds(self, ends: Ends, unit: str, *, named: bool = True) -> str:
        """Format the bounds of a value that is not known better: `at most 75 %`, `0.21 to at most 0.75 ms`.

        Args:
            named: with the unit, where it has one.
        """
        write = self.quantity if named else self.number
        low, high = ends.at_least, ends.at_most
        least = "" if low <= 0 or low == high else f"{self.number(low, unit)} to "
        return write(high, unit) if low == high else f"{least}at most {write(high, unit)}"

    def known(self, entry: Statistics, unit: str) -> str:
        """Return the value of a metric with its unit, or its bounds."""
        return self.quantity(entry.value, unit) if entry.ends is None else self.bounds(entry.ends, unit)

    def percent(self, share: float | None, digits: int = 1, *, signed: bool = False) -> str:
        """Return a share: 0.123 is 12.3 %."""
        return self.unknown if share is None else f"{self._fixed(100 * share, digits, signed=signed)}{self.space}%"

    def points(self, difference: float) -> str:
        """Return a difference of two shares with its sign: 0.123 is +12.3 points."""
        return f"{self._fixed(100 * difference, 1, signed=True)}{self.space}points"

    def effect(self, value: float | None, kind: str) -> str:
        """Return an effect with its sign: the `difference` of two ratios in points, or a `quotient` less 1."""
        if value is None:
            return self.unknown
        if kind == "difference":
            return self.points(value)
        return self.percent(value, 0 if abs(value) >= 0.9995 else 1, signed=True)

    def interval(self, entry: Effect) -> str:
        """Format an effect of `summary.json` from `low` to `high`, as `effect` formats them, the unit once."""
        if entry.low is None or entry.high is None:
            return self.unknown
        return f"{self.effect(entry.low, entry.kind).partition(self.space)[0]} to {self.effect(entry.high, entry.kind)}"

    def size(self, count: float | None, *, exact: bool = False) -> str:
        """Return bytes in units of 1000 with three digits (`exact`: all of them), without trailing zeros. -1 is not
        known either.
        """
        if count is None or count < 0:
            return self.unknown_size
        for unit, least in _SIZES:
            if count >= least:
                digits = 9 if exact else 2 if count < 10 * least else 1 if count < 100 * least else 0
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
        """Return `7 steps on 2 ranks`."""
        steps, ranks = self.count(entry.steps.global_steps_used, "step"), entry.steps.ranks_used
        return f"{steps} on {self.count(ranks, 'rank')}" if ranks else steps

    def _fixed(self, value: float, digits: int, *, signed: bool) -> str:
        rounded = round(value, digits)
        if not rounded:
            return "0" if signed or not value else f"<{10.0**-digits:.{digits}f}"
        text = f"{rounded:{'+' if signed else ''}{self.separator}.{digits}f}"
        return (text.rstrip("0").rstrip(".") if digits else text).replace("-", self.minus)


TEXT: Final = NumberFormat()
"""Plain characters: a terminal, Markdown, JUnit, sentences in `summary.json`, pictures."""

PAGE: Final = NumberFormat("\u2013", "size unknown", ",", "\u2212", "\u00a0")
"""The HTML page; a number and its unit stay on one line."""


def is_zero(pair: ComparedMetric) -> bool:
    """Return whether a compared metric is 0 on both sides, to the digits that are shown: a row that says nothing."""
    return all(value is not None and abs(value) < LEAST for value in (pair.reference.value, pair.candidate.value))


def p_value(p: float | None, digits: int = 2) -> str:
    """Return a probability with two significant digits, or three where it stands in a table."""
    return "unknown" if p is None else f"{p:.{digits}g}"


def rough_ms(value_ms: float) -> str:
    """Return milliseconds for a sentence: as in a table, with their unit, without a sign."""
    return TEXT.quantity(abs(value_ms), "ms")


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


def group_title(
    name: str,
    members: Collection[Sequence[int]] = (),
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
) -> str:
    """Return a process group as a person calls it: by the dimension of the mesh that it lies along, with its ranks
    unless these are all (`shard, ranks 0-1`). torch names the one of `init_process_group` 0.

    Args:
        members: the ranks of each group of this name.
        mesh: dimension -> size of the mesh that the ranks fill in row-major order, where that is known.
    """
    if name == "0":
        return "default group"
    groups = [sorted(ranks) for ranks in members]
    dimensions = {_dimension(ranks, mesh or {}) for ranks in groups}
    title = (dimensions.pop() if len(dimensions) == 1 else None) or f"group {name}"
    return f"{title}, {name_ranks(groups[0], _LISTED)}" if len(groups) == 1 and len(groups[0]) != world_size else title


def _dimension(ranks: Sequence[int], mesh: Mapping[str, int]) -> str | None:
    """Return along which dimension of a mesh a group lies; None where it lies along none, or has one rank."""
    stride = 1
    for name, size in reversed(list(mesh.items())):
        base = ranks[0] - ranks[0] // stride % size * stride
        if size > 1 and list(ranks) == [base + stride * index for index in range(size)]:
            return name
        stride *= size
    return None


def first_upper(sentence: str) -> str:
    """Return a sentence that begins with a capital letter."""
    return sentence[:1].upper() + sentence[1:]


def value_text(value: object) -> str:
    """Return any JSON value as one line; strings as they are."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{key}={value_text(item)}" for key, item in value.items()) or "(none)"
    return str(value)
