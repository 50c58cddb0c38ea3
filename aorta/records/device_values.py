"""Values of a device's sensors in common units, and the notations in which tools print them.

    values, why_none = read_words(output, local_rank, of_ranks=8)

What `rocm-smi` prints, as text and as JSON, holds the same keys, whose wording changed over versions; records keep the
text, and reports read it again. Must not import torch, run anything, or turn a missing value into 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from aorta.errors import DeviceUnreadable

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Bounded, or a long row of digits would be tried from each of them to its end.
_MHZ = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s{0,8}MHz", re.IGNORECASE)


@dataclass(frozen=True)
class Values:
    """One reading. None: the source does not provide it. `throttle`: why clocks are reduced now; empty: they are
    not.
    """

    temp_c: float | None = None
    power_w: float | None = None
    sclk_mhz: float | None = None
    mclk_mhz: float | None = None
    util_pct: float | None = None
    mem_used_bytes: int | None = None
    throttle: list[str] | None = None

    @property
    def empty(self) -> bool:
        """Whether no value is known."""
        return all(getattr(self, field.name) is None for field in fields(self))


def number(value: object) -> float | None:
    """Parse a tool's number: 87, "87 %", {"value": 87, "unit": "%"}; None for "N/A", lists, NaN, booleans."""
    if isinstance(value, Mapping):
        return number(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        match = _NUMBER.match(value.strip())
        value = match[0] if match else None
    if not isinstance(value, str | int | float):
        return None
    try:
        parsed = float(value)
    except OverflowError:  # an integer beyond floats
        return None
    return parsed if math.isfinite(parsed) else None


def megahertz(value: object) -> float | None:
    """Return the clock in "(300Mhz)" or "1: (300Mhz)", where the first number may be a level."""
    match = _MHZ.search(value) if isinstance(value, str) else None
    return number(match[1] if match else value)


def whole(value: float | None, factor: float = 1) -> int | None:
    return None if value is None or not math.isfinite(value * factor) else round(value * factor)


def first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def json_in_output(text: str) -> Any:
    """Return the JSON document in the output of a tool that may print warnings before it (even "[WARNING] ...").

    Raises:
        DeviceUnreadable: there is none.
    """
    decoder = json.JSONDecoder()
    for match in re.finditer(r"^[ \t]*[\[{]", text, re.MULTILINE):
        try:
            decoded, _ = decoder.raw_decode(text, match.end() - 1)
        except (ValueError, RecursionError):  # ValueError: not JSON, or a number of more digits than Python takes
            continue
        if isinstance(decoded, dict) or (isinstance(decoded, list) and all(isinstance(part, dict) for part in decoded)):
            return decoded
    raise DeviceUnreadable(f"no JSON in its output: {text.strip()[:200]!r}")


Card: TypeAlias = Mapping[str, object]
_CARD: Final = re.compile(r"GPU\[(\d{1,6})\]\s*:")
_BEFORE_VALUE: Final = re.compile(r":\s")
"""The first colon with a blank behind it: a name may hold others ("PCI Bus:0")."""


def from_json(document: Any) -> list[Card]:
    """Return the cards in its JSON, in its order; keys in lower case and without a trailing colon."""
    if not isinstance(document, Mapping):
        raise DeviceUnreadable("rocm-smi: its JSON is not an object")
    return [
        {key.rstrip(":").lower(): value for key, value in card.items()}
        for name, card in document.items()
        if name.startswith("card") and isinstance(card, Mapping)
    ]


def from_text(text: str) -> list[Card]:
    """Return the cards in its text, in its order."""
    cards: dict[int, dict[str, object]] = {}
    for line in text.splitlines():
        card = _CARD.match(line)
        if card is None:
            continue
        name, *value = _BEFORE_VALUE.split(line[card.end() :].strip(), maxsplit=1)
        if value and name.strip():
            cards.setdefault(int(card[1]), {})[name.strip().rstrip(":").lower()] = value[0].strip()
    return [cards[number] for number in sorted(cards)]


def normalised(card: Card) -> Values:
    """Return the values of one card; it does not report throttling."""

    def value(*names: str) -> float | None:
        return first(*(number(card.get(name)) for name in names))

    def clock(name: str) -> float | None:
        printed = [card.get(f"{name} clock {what}") for what in ("speed", "level")]
        return first(*(megahertz(text) for text in printed if "mhz" in str(text).lower()))  # a level by itself is none

    powers = sorted(key for key in card if "package power (w)" in key and "max" not in key)
    return Values(
        temp_c=value("temperature (sensor junction) (c)", "temperature (sensor edge) (c)"),
        power_w=value(*powers),
        sclk_mhz=clock("sclk"),
        mclk_mhz=clock("mclk"),
        util_pct=value("gpu use (%)"),
        mem_used_bytes=whole(value("vram total used memory (b)")),
    )


def read_words(
    text: str, local_rank: int, of_ranks: int | None, *, exit_code: int = 0, stderr: str = "", error: str | None = None
) -> tuple[Values, str | None]:
    """Return the values in a text that nobody matched to a device when it was printed; empty, with the reason, where
    there are none.

    Args:
        local_rank: whose card is wanted. Where the text lists several cards, it is the one of this number, provided
            that there are as many ranks (`of_ranks`) as cards: ranks take the devices in their order unless
            `*_VISIBLE_DEVICES` says otherwise.
        error: why there is no text.
    """
    if error is None and exit_code:
        error = f"rocm-smi ended with {exit_code}: {stderr.strip()[:200]}"
    if error is not None:
        return Values(), error
    cards = from_text(text)
    if not cards:
        return Values(), "rocm-smi: no card in its output"
    if len(cards) > 1 and (len(cards) != of_ranks or not 0 <= local_rank < len(cards)):
        return Values(), f"rocm-smi: cannot tell which of {len(cards)} cards this rank computed on"
    values = normalised(cards[local_rank if len(cards) > 1 else 0])
    return values, "rocm-smi: none of its values is known" if values.empty else None
