"""AMD devices through the programs `amd-smi` and `rocm-smi`: never on the training thread, traced, or left running.

What rocm-smi prints is read by `records.device_values`, which reports use too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aorta.device_metrics.device_identity import DeviceIdentity, match
from aorta.distributed.environment_checks import untraced
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import (
    BYTES_PER_MIB,
    Card,
    SampleSource,
    Values,
    first,
    from_json,
    from_text,
    json_in_output,
    normalised,
    number,
    whole,
)

TIMEOUT_S = 20.0
_SECTIONS = (
    "--power",
    "--temperature",
    "--clock",
    "--mem-usage",
    "--usage",
    "--throttle",
    "--violation",
    "--perf-level",
)
_VIOLATIONS = {
    "prochot": "prochot",
    "ppt": "power_cap",
    "socket_thermal": "thermal",
    "vr_thermal": "vr_thermal",
    "hbm_thermal": "memory_thermal",
}
WORDS = ("--showtemp", "--showuse", "--showpower", "--showmemuse", "--showclocks", "--showmeminfo", "vram", "--showbus")
SETTINGS = ("--showmaxpower", "--showperflevel", "--showbus")


class Program:
    """A program that is run repeatedly; `abort` from another thread ends a run in progress and prevents further ones.

    Raises:
        DeviceUnreadable: it is not on PATH.
    """

    def __init__(self, name: str) -> None:
        if shutil.which(name) is None:
            raise DeviceUnreadable(f"{name} not available")
        self.name = name
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run it to completion.

        Raises:
            DeviceUnreadable: it cannot be started, takes too long, or was aborted.
        """
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
        """End a run in progress, and start none again."""
        with self._lock:
            self._aborted = True
            child = self._child
        if child is not None and child.poll() is None:
            with suppress(OSError):
                child.kill()


def checked(program: Program, *words: str) -> str:
    """Run a program and return what it printed.

    Raises:
        DeviceUnreadable: it failed.
    """
    done = program.run(*words)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise DeviceUnreadable(f"{program.name} ended with {done.returncode}: {output[-1] if output else 'no output'}")
    return done.stdout


class _SmiSource(SampleSource):
    """A program as a metrics source: a call is expensive, and is ended with the run."""

    name: str
    min_interval_s = 1.0

    def __init__(self) -> None:
        self._program = Program(self.name)

    def close(self) -> None:
        """End a call in progress."""
        self._program.abort()


class AmdSmiProgram(_SmiSource):
    """One rank's device by `amd-smi metric --json`: two shapes of output, "N/A", warnings before the JSON.

    Since ROCm 7 the list of devices is under "gpu_data"; before, it is the whole document. "MB" are MiB there (a card
    of 192 GiB has 196592). A call uses a core for 0.3 to 1 s. Not run on a device here.

    Raises:
        DeviceUnreadable: the program is missing or fails, or the device cannot be identified.
    """

    name = "amd-smi"

    def __init__(self, identity: DeviceIdentity) -> None:
        super().__init__()
        words = checked(self._program, "metric", "--help")
        # Guests and older versions lack some sections; unless told which, it prints all of them, slowly.
        self._sections = [section for section in _SECTIONS if section in words]
        if "--throttle" in self._sections and "--violation" in self._sections:
            self._sections.remove("--violation")  # the later name of the same section
        cards = entries(json_in_output(checked(self._program, "list", "--json")))
        found = match(identity, [(str(card.get("bdf")), card.get("gpu")) for card in cards])
        if found is None:
            raise DeviceUnreadable(f"amd-smi: cannot tell which of {len(cards)} devices this rank computes on")
        self._index = str(found)

    def _card(self) -> Mapping[str, Any]:
        words = ("metric", "--gpu", self._index, *self._sections, "--json")
        for card in entries(json_in_output(checked(self._program, *words))):
            if str(card.get("gpu")) == self._index:
                return card
        raise DeviceUnreadable(f"amd-smi: no device {self._index} in its output")

    def read(self) -> Values:
        """Return the current values."""
        values = amd_smi_values(self._card())
        if values.empty:
            raise DeviceUnreadable("amd-smi: every value is N/A")
        return values

    def settings(self) -> dict[str, Any]:
        """Return the clock limits and locks, and the performance level, as reported by the metrics."""
        card = self._card()
        clock = _section(card, "clock")
        graphics, memory = _section(clock, "gfx_0"), _section(clock, "mem_0")
        locked = graphics.get("clk_locked")
        return {
            "sclk_max_mhz": number(graphics.get("max_clk")) or None,  # 0 MHz is seen for "not known"
            "mclk_max_mhz": number(memory.get("max_clk")) or None,
            "sclk_locked": {"ENABLED": True, "DISABLED": False}.get(
                str(locked), locked if locked in (True, False) else None
            ),
            "performance_level": card.get("perf_level") if card.get("perf_level") != "N/A" else None,
        }


def entries(document: Any) -> list[Mapping[str, Any]]:
    """Return the devices in either shape of output.

    Raises:
        DeviceUnreadable: it has neither shape.
    """
    found = document.get("gpu_data") if isinstance(document, Mapping) else document
    if not isinstance(found, list):
        raise DeviceUnreadable("amd-smi: neither a list of devices nor one under gpu_data")
    return [card for card in found if isinstance(card, Mapping)]


def amd_smi_values(card: Mapping[str, Any]) -> Values:
    """Return the values of one device of `amd-smi metric --json`."""
    power, temperature, memory = _section(card, "power"), _section(card, "temperature"), _section(card, "mem_usage")
    clocks = _section(card, "clock")
    return Values(
        temp_c=first(number(temperature.get("hotspot")), number(temperature.get("edge"))),
        power_w=first(
            *(number(power.get(name)) for name in ("socket_power", "current_socket_power", "average_socket_power"))
        ),
        sclk_mhz=_mean_clock(clocks, "gfx"),
        mclk_mhz=_mean_clock(clocks, "mem"),
        util_pct=number(_section(card, "usage").get("gfx_activity")),
        mem_used_bytes=whole(number(memory.get("used_vram")), BYTES_PER_MIB),
        throttle=_amd_smi_throttle(_section(card, "throttle"), power.get("throttle_status")),
    )


def _section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the document; empty where it is missing or "N/A"."""
    part = of.get(name)
    return part if isinstance(part, Mapping) else {}


def _mean_clock(clocks: Mapping[str, Any], kind: str) -> float | None:
    """Return the mean over the dies of a card (gfx_0 to gfx_7); missing ones are N/A."""
    parts = [value for name, value in clocks.items() if name == kind or name.startswith(f"{kind}_")]
    found = [clock for part in parts if (clock := number(_clock_of(part))) is not None]
    return sum(found) / len(found) if found else None


def _clock_of(part: object) -> object:
    return part.get("clk", part) if isinstance(part, Mapping) else part


def _amd_smi_throttle(section: Mapping[str, Any], status: object) -> list[str] | None:
    """Return which limits were hit; cards before MI300 report only that one was."""
    statuses = {name: str(section.get(f"{key}_violation_status")) for key, name in _VIOLATIONS.items()}
    known = {
        name: state for name, state in statuses.items() if state.upper() in ("ACTIVE", "NOT ACTIVE", "TRUE", "FALSE")
    }
    if known:
        return sorted(name for name, state in known.items() if state.upper() in ("ACTIVE", "TRUE"))
    return {"THROTTLED": ["other"], "UNTHROTTLED": []}.get(str(status))


class RocmSmi(_SmiSource):
    """One rank's device by `rocm-smi`, which is no longer part of ROCm 10: the last resort.

    When its raw output is to be kept, it is run for the text, and the values are read from that: one run either way.
    Not run on a device here; tests read real outputs.

    Args:
        keep_words: keep its raw output for the record (`rocm_smi_*`).

    Raises:
        DeviceUnreadable: the program is missing.
    """

    name = "rocm-smi"

    def __init__(self, identity: DeviceIdentity, keep_words: bool = False) -> None:
        super().__init__()
        self._identity, self._keep_words = identity, keep_words
        self._raw: dict[str, Any] = {}

    def read(self) -> Values:
        """Return the current values."""
        if self._keep_words:
            self._raw = {}  # a failed reading has no raw output
            text, self._raw = words_of(self._program)
            cards = from_text(text)
        else:
            cards = from_json(json_in_output(checked(self._program, *WORDS, "--json")))
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
        """Return the power cap and performance level (`manual` and `determinism` hold clocks fixed)."""
        card = self._mine(from_json(json_in_output(checked(self._program, *SETTINGS, "--json"))))
        return {
            "power_cap_w": first(number(card.get("max graphics package power (w)"))),
            "performance_level": _text(card.get("performance level")),
        }

    def raw(self) -> dict[str, Any]:
        """Return the raw output of the last reading, returned once."""
        raw, self._raw = self._raw, {}
        return raw


def words_of(program: Program) -> tuple[str, dict[str, Any]]:
    """Run it for its text: what it printed, and the `rocm_smi_*` fields of a step.

    Raises:
        DeviceUnreadable: it cannot be run.
    """
    now_ns = time.time_ns()
    done = program.run(*WORDS)
    fields = {"rocm_smi_output": done.stdout, "rocm_smi_exit_code": done.returncode, "rocm_smi_stderr": done.stderr}
    return done.stdout, {"rocm_smi_t_ns": now_ns, **fields}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value != "N/A" else None
