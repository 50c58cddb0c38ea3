"""What `rocm-smi` prints, as values: its text and its JSON hold the same keys, whose wording changed over versions.

    values = values_of(output, local_rank, of_ranks=8)

Records keep the text, and reports read it again. Must not import torch, or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from aorta.device_metrics.sample_values import Values, first, megahertz, number, whole
from aorta.errors import DeviceUnreadable

Card: TypeAlias = Mapping[str, object]
_LINE: Final = re.compile(r"^GPU\[(\d{1,6})\]\s*:\s*(.+?)\s*:\s+(.*)$", re.MULTILINE)


def from_json(document: Any) -> list[Card]:
    """The cards in its JSON, in its order; keys in lower case and without a trailing colon."""
    if not isinstance(document, Mapping):
        raise DeviceUnreadable("rocm-smi: its JSON is not an object")
    return [
        {key.rstrip(":").lower(): value for key, value in card.items()}
        for name, card in document.items()
        if name.startswith("card") and isinstance(card, Mapping)
    ]


def from_text(text: str) -> list[Card]:
    """The cards in its text, in its order."""
    cards: dict[int, dict[str, object]] = {}
    for found in _LINE.finditer(text):
        cards.setdefault(int(found[1]), {})[found[2].rstrip(":").lower()] = found[3].strip()
    return [cards[number] for number in sorted(cards)]


def normalised(card: Card) -> Values:
    """The values of one card; it does not report throttling."""

    def value(*names: str) -> float | None:
        return first(*(number(card.get(name)) for name in names))

    def clock(name: str) -> float | None:
        return first(
            *(megahertz(card.get(f"{name} clock {what}")) for what in ("speed", "level") if _is_clock(card, name, what))
        )

    powers = sorted(key for key in card if "package power (w)" in key and "max" not in key)
    return Values(
        temp_c=value("temperature (sensor junction) (c)", "temperature (sensor edge) (c)"),
        power_w=value(*powers),
        sclk_mhz=clock("sclk"),
        mclk_mhz=clock("mclk"),
        util_pct=value("gpu use (%)"),
        mem_used_bytes=whole(value("vram total used memory (b)")),
    )


def _is_clock(card: Card, name: str, what: str) -> bool:
    """Whether a field holds a clock; a level by itself ("1") is none."""
    return "mhz" in str(card.get(f"{name} clock {what}")).lower()


def values_of(text: str, local_rank: int, of_ranks: int | None) -> Values:
    """The values in a text that nobody matched to a device when it was printed.

    Args:
        local_rank: whose card is wanted. Where the text lists several cards, it is the one of this number, provided
            that there are as many ranks on the node (`of_ranks`) as cards: ranks take the devices in their order unless
            `*_VISIBLE_DEVICES` says otherwise.

    Raises:
        DeviceUnreadable: no value in it, or several cards of which none is known to be the rank's.
    """
    cards = from_text(text)
    if not cards:
        raise DeviceUnreadable("rocm-smi: no card in its output")
    if len(cards) > 1 and (len(cards) != of_ranks or not 0 <= local_rank < len(cards)):
        raise DeviceUnreadable(f"rocm-smi: cannot tell which of {len(cards)} cards this rank computed on")
    values = normalised(cards[local_rank if len(cards) > 1 else 0])
    if values.empty:
        raise DeviceUnreadable("rocm-smi: none of its values is known")
    return values
