"""AMD devices through the program `rocm-smi`, which is no longer part of ROCm 10: the last resort.

Its text and its JSON hold the same keys, whose wording changed over versions. When its raw output is to be kept, it is
run for the text, and the values are read from that: one run either way. Not run on a device here; tests read real
outputs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from aorta.device_metrics.device_identity import DeviceIdentity, match
from aorta.device_metrics.sample_values import Values, first, json_after_words, megahertz, number, whole
from aorta.device_metrics.smi_programs import Program, ProgramOutput, checked
from aorta.errors import DeviceUnreadable

WORDS = ("--showtemp", "--showuse", "--showpower", "--showmemuse", "--showclocks", "--showmeminfo", "vram", "--showbus")
SETTINGS = ("--showmaxpower", "--showperflevel", "--showbus")
_LINE = re.compile(r"^GPU\[(\d{1,6})\]\s*:\s*(.+?)\s*:\s+(.*)$", re.MULTILINE)

Card = Mapping[str, object]


class RocmSmi:
    """The metrics source of one rank's device.

    Args:
        keep_words: keep its raw output for the record (`rocm_smi_*`).

    Raises:
        DeviceUnreadable: the program is missing.
    """

    name = "rocm-smi"
    min_interval_s = 1.0

    def __init__(self, identity: DeviceIdentity, keep_words: bool = False) -> None:
        self._program = Program("rocm-smi")
        self._identity, self._keep_words = identity, keep_words
        self._raw: dict[str, Any] = {}

    def read(self) -> Values:
        """The current values."""
        if self._keep_words:
            self._raw = {}  # a failed reading has no raw output
            done, self._raw = words_of(self._program)
            cards = from_text(done.out)
        else:
            cards = from_json(json_after_words(checked(self._program, *WORDS, "--json")))
        values = normalised(self._mine(cards))
        if values.empty:
            raise DeviceUnreadable("rocm-smi: none of its values is known")
        return values

    def _mine(self, cards: list[Card]) -> Card:
        if not cards:
            raise DeviceUnreadable("rocm-smi: no card in its output")
        found = match(self._identity, [(_text(card.get("pci bus")), card) for card in cards])
        if found is None:
            raise DeviceUnreadable(f"rocm-smi: cannot tell which of {len(cards)} cards this rank computes on")
        return found

    def settings(self) -> dict[str, Any]:
        """Power cap and performance level (`manual` and `determinism` hold clocks fixed)."""
        card = self._mine(from_json(json_after_words(checked(self._program, *SETTINGS, "--json"))))
        return {
            "power_cap_w": first(number(card.get("max graphics package power (w)"))),
            "performance_level": _text(card.get("performance level")),
        }

    def raw(self) -> dict[str, Any]:
        """The raw output of the last reading, returned once."""
        raw, self._raw = self._raw, {}
        return raw

    def close(self) -> None:
        """End a call in progress."""
        self._program.abort()


def words_of(program: Program) -> tuple[ProgramOutput, dict[str, Any]]:
    """Run it for its text: the program's output, and the `rocm_smi_*` fields of a step.

    Raises:
        DeviceUnreadable: it cannot be run.
    """
    now_ns = time.time_ns()
    done = program.run(*WORDS)
    fields = {"rocm_smi_output": done.out, "rocm_smi_exit_code": done.code, "rocm_smi_stderr": done.err}
    return done, {"rocm_smi_t_ns": now_ns, **fields}


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


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value != "N/A" else None
