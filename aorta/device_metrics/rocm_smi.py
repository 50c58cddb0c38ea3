"""AMD devices through the program `rocm-smi`, which is no longer part of ROCm 10: the last resort.

When its raw output is to be kept, it is
run for the text, and the values are read from that: one run either way. Not run on a device here; tests read real
outputs.
"""

from __future__ import annotations

import time
from typing import Any

from aorta.device_metrics.device_identity import DeviceIdentity, match
from aorta.device_metrics.rocm_smi_output import Card, from_json, from_text, normalised
from aorta.device_metrics.sample_values import Values, first, json_after_words, number
from aorta.device_metrics.smi_programs import Program, ProgramOutput, checked
from aorta.errors import DeviceUnreadable

WORDS = ("--showtemp", "--showuse", "--showpower", "--showmemuse", "--showclocks", "--showmeminfo", "vram", "--showbus")
SETTINGS = ("--showmaxpower", "--showperflevel", "--showbus")


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


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value != "N/A" else None
