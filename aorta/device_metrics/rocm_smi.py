"""One rank's device by the program `rocm-smi`, whose output `records.device_values` parses.

Must not run it on the training thread, traced, or leave one running.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from aorta.device_metrics.sources import DeviceIdentity, SampleSource, match
from aorta.distributed.environment_checks import untraced
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Card, Values, first, from_json, from_text, json_in_output, normalised, number

TIMEOUT_S = 20.0
WORDS = ("--showtemp", "--showuse", "--showpower", "--showmemuse", "--showclocks", "--showmeminfo", "vram", "--showbus")
SETTINGS = ("--showmaxpower", "--showperflevel", "--showbus")


class Program:
    """A program that is run repeatedly, until `abort` from another thread. Raises DeviceUnreadable if not on PATH."""

    def __init__(self, name: str) -> None:
        if shutil.which(name) is None:
            raise DeviceUnreadable(f"{name} not available")
        self.name = name
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run it to completion. Raises DeviceUnreadable where it cannot start, takes too long, or was aborted."""
        command = [self.name, *words]
        try:
            with self._lock:
                if self._aborted:
                    raise DeviceUnreadable(f"{self.name}: the run has ended")
                self._child = child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=untraced(os.environ),
                )
            try:
                out, err = child.communicate(timeout=TIMEOUT_S)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.communicate()
        except subprocess.TimeoutExpired as error:
            raise DeviceUnreadable(f"{self.name} failed: no answer in {TIMEOUT_S:g} s") from error
        except OSError as error:
            raise DeviceUnreadable(f"{self.name} failed: {error.strerror or error}") from error
        if self._aborted:
            raise DeviceUnreadable(f"{self.name}: the run has ended")
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            child = self._child
        if child is not None and child.poll() is None:
            with suppress(OSError):
                child.kill()


class RocmSmi(SampleSource):
    """One rank's device by `rocm-smi`, the last resort, as ROCm 10 no longer has it. `keep_words`: keep its text for
    the record (`rocm_smi_*`), and read the values from that. Raises DeviceUnreadable where the program is missing.
    """

    name = "rocm-smi"
    min_interval_s = 1.0

    def __init__(self, identity: DeviceIdentity, keep_words: bool = False) -> None:
        self._program = Program(self.name)
        self._identity, self._keep_words = identity, keep_words
        self._raw: dict[str, Any] = {}

    def read(self) -> Values:
        if self._keep_words:
            self._raw = {}  # a failed reading has no raw output
            text, self._raw = words_of(self._program)
            cards = from_text(text)
        else:
            cards = self._cards(*WORDS)
        values = normalised(self._mine(cards))
        if values.empty:
            raise DeviceUnreadable("rocm-smi: none of its values is known")
        return values

    def _cards(self, *words: str) -> list[Card]:
        done = self._program.run(*words, "--json")
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines()
            message = output[-1] if output else "no output"
            raise DeviceUnreadable(f"{self.name} ended with {done.returncode}: {message}")
        return from_json(json_in_output(done.stdout))

    def _mine(self, cards: list[Card]) -> Card:
        if not cards:
            raise DeviceUnreadable("rocm-smi: no card in its output")
        card = match(self._identity, [(_text(card.get("pci bus")), card) for card in cards])
        if card is None:
            raise DeviceUnreadable(f"rocm-smi: cannot tell which of {len(cards)} cards this rank computes on")
        return card

    def settings(self) -> dict[str, Any]:
        """Return the power cap and performance level (`manual` and `determinism` hold clocks fixed)."""
        card = self._mine(self._cards(*SETTINGS))
        return {
            "power_cap_w": first(number(card.get("max graphics package power (w)"))),
            "performance_level": _text(card.get("performance level")),
        }

    def raw(self) -> dict[str, Any]:
        """Return the output of the last reading, once."""
        raw, self._raw = self._raw, {}
        return raw

    def close(self) -> None:
        self._program.abort()


def words_of(program: Program) -> tuple[str, dict[str, Any]]:
    """Return what `rocm-smi` printed, and the `rocm_smi_*` fields of a step; raises as `Program.run`."""
    now_ns = time.time_ns()
    done = program.run(*WORDS)
    fields = {"rocm_smi_output": done.stdout, "rocm_smi_exit_code": done.returncode, "rocm_smi_stderr": done.stderr}
    return done.stdout, {"rocm_smi_t_ns": now_ns, **fields}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value != "N/A" else None
