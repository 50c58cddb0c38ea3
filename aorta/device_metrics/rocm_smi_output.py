"""What `rocm-smi` prints, as values: its text and its JSON hold the same keys, whose wording changed over versions.

    values, why_none = read_words(output, local_rank, of_ranks=8)

Records keep the text, and reports read it again. Must not import torch, or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from aorta.device_metrics.sample_values import Values, first, megahertz, number, whole
from aorta.errors import DeviceUnreadable

Card: TypeAlias = Mapping[str, object]
_CARD: Final = re.compile(r"GPU\[(\d{1,6})\]\s*:")
_BEFORE_VALUE: Final = re.compile(r":\s")
"""The first colon with a blank behind it: a name may hold others ("PCI Bus:0")."""


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
    for line in text.splitlines():
        card = _CARD.match(line)
        if card is None:
            continue
        name, *value = _BEFORE_VALUE.split(line[card.end() :].strip(), maxsplit=1)
        if value and name.strip():
            cards.setdefault(int(card[1]), {})[name.strip().rstrip(":").lower()] = value[0].strip()
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


def read_words(
    text: str, local_rank: int, of_ranks: int | None, *, exit_code: int = 0, stderr: str = "", error: str | None = None
) -> tuple[Values, str | None]:
    """The values in a text that nobody matched to a device when it was printed; empty, with the reason, where there
    are none.

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
