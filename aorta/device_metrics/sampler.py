"""The source of device metrics for a rank, the one requested or the best available, and the thread that samples it
while a run lasts.

Samples have their own time stamps; the record takes them with the next step it writes. Must not run anything on the
training thread, fail or stop a run, or hide a failed sample.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from aorta.config.schema import Devices
from aorta.device_metrics.rocm_smi import Program, RocmSmi, words_of
from aorta.device_metrics.sources import AmdSmi, DeviceIdentity, Nvml, SampleSource
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Values
from aorta.records.schema import DeviceSample, DeviceTelemetry, Step

_log = logging.getLogger(__name__)
BEST: dict[str, tuple[str, ...]] = {"cuda": ("nvml",), "rocm": ("amdsmi", "rocm-smi")}
"""In order of preference: the library before the program."""
UNASKED_PROGRAM_INTERVAL_S = 5.0
"""Interval for a program that was not requested explicitly: each run uses a core for up to a second, on every rank."""


@dataclass(frozen=True)
class Opened:
    """An open source. Where `source` is None, `problem` says why; if that is None too, there is nothing to sample."""

    source: SampleSource | None = None
    interval_s: float | None = None
    problem: str | None = None


def open_source(
    asked: Devices, interval_s: float, identity: DeviceIdentity, keep_words: bool = False, *, forced: bool = False
) -> Opened:
    """Open the source; the caller closes it.

    Args:
        asked: `telemetry.devices`; `auto` opens nothing on a CPU, whose sensors are not read.
        interval_s: requested seconds between two samples.
        keep_words: rocm-smi, if it is chosen, keeps its raw output.
        forced: `telemetry.force`: auto chooses rocm-smi, whatever the device.
    """
    if asked is Devices.off or (asked is Devices.auto and identity.platform == "cpu" and not forced):
        return Opened()
    makers: dict[str, Callable[[], SampleSource]] = {
        "nvml": lambda: Nvml(identity),
        "amdsmi": lambda: AmdSmi(identity),
        "rocm-smi": lambda: RocmSmi(identity, keep_words),
    }
    best = BEST.get(identity.platform, ()) if asked is Devices.auto else (asked.name,)
    problems = []
    for name in ("rocm-smi", *best) if asked is Devices.auto and forced else best:
        try:
            source = makers[name]()
        except DeviceUnreadable as error:
            problems.append(str(error))
            continue
        unasked = asked is Devices.auto and not forced and source.min_interval_s >= 1
        return Opened(source, max(interval_s, UNASKED_PROGRAM_INTERVAL_S if unasked else source.min_interval_s))
    return Opened(problem="; ".join(problems) or "no source is known for this kind of device")


_JOIN_S = 5.0
MIN_WORDS_INTERVAL_S = 1.0


class DeviceSampler:
    """Takes samples for the length of a `with` block, and closes the source.

    Args:
        keep_words: record rocm-smi's output, for which rocm-smi is run in addition if another source was chosen.
        interval_s: between two such outputs.
    """

    def __init__(self, opened: Opened, keep_words: bool = False, interval_s: float = 1.0) -> None:
        self._opened = opened
        self._source: SampleSource | None = opened.source
        self._keep_words = keep_words
        self._separate_words = keep_words and (self._source is None or self._source.name != "rocm-smi")
        self._words_interval_s = max(interval_s, MIN_WORDS_INTERVAL_S)
        self._program: Program | None = None
        self._lock = threading.Lock()
        self._samples: list[DeviceSample] = []
        self._raw: dict[str, Any] = {}
        self._error: str | None = None
        self.taken = self.failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aorta-devices", daemon=True)
        self.settings: dict[str, Any] = {}
        if self._source is not None:
            try:
                self.settings = self._source.settings()
            except Exception as error:  # noqa: BLE001  as in _sample: a failure loses values, never the run; logged
                reason = error if isinstance(error, DeviceUnreadable) else f"{type(error).__name__}: {error}"
                _log.warning("device telemetry: power caps and clock limits are not known: %s", reason)

    @property
    def is_sampling(self) -> bool:
        """Whether steps get anything."""
        return self._source is not None or self._keep_words

    @property
    def header(self) -> DeviceTelemetry | None:
        """Entry of the record's header; None if no metrics were requested."""
        if self._source is None and self._opened.problem is None:
            return None
        name = None if self._source is None else self._source.name
        return DeviceTelemetry(name, self._opened.interval_s, self._opened.problem)

    def facts(self) -> dict[str, Any] | None:
        """Return the manifest's entry for this rank's device; None if no metrics were requested."""
        header = self.header
        return None if header is None else {**msgspec.structs.asdict(header), "settings": self.settings}

    def __enter__(self) -> Self:
        if self.is_sampling:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        if self._program is not None:
            self._program.abort()
        if self._source is not None and self._source.min_interval_s >= 1:
            self._source.close()  # ends a running program; a library is closed when no call is in progress
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)
        if self._source is not None and not self._thread.is_alive():
            self._source.close()
        if self.failed:
            _log.warning(
                "device telemetry: %d of %d samples failed, the last one: %s",
                self.failed,
                self.taken + self.failed,
                self._error,
            )

    def onto(self, step: Step) -> Step:
        """Return the step with the samples taken since the last call."""
        with self._lock:
            samples, self._samples = self._samples, []
            raw, self._raw = self._raw, {}
            error = self._error
        fields: dict[str, Any] = dict(raw)
        if samples:
            fields["device"] = samples
            if any(is_failed(sample) for sample in samples):
                fields["reasons"] = {**step.reasons, "device": error or "not known"}
        return msgspec.structs.replace(step, **fields) if fields else step

    def _run(self) -> None:
        now = time.monotonic()
        due = {self._sample: now} if self._source is not None else {}
        interval = {self._sample: self._opened.interval_s or 1.0, self._sample_words: self._words_interval_s}
        if self._separate_words:
            due[self._sample_words] = now
        while due and not self._stop.is_set():
            job = min(due, key=due.__getitem__)
            if self._stop.wait(max(0.0, due[job] - time.monotonic())):
                return
            job()
            # Measured from the end of a sample, so that a slow source does not run continuously.
            due[job] = time.monotonic() + interval[job]

    def _sample(self) -> None:
        source = self._source
        assert source is not None  # _run samples only with a source
        start_ns = time.monotonic_ns()
        raw: dict[str, Any] = {}
        try:
            values, error = source.read(), None
        except DeviceUnreadable as problem:
            values, error = Values(), str(problem)
        except Exception as problem:  # noqa: BLE001  a bug in a source loses its samples, never the run; it is recorded
            values, error = Values(), f"{source.name}: {type(problem).__name__}: {problem}"
        end_ns = time.monotonic_ns()
        if error is not None and self._stop.is_set():
            return  # it failed because the run ended
        with suppress(Exception):
            raw = source.raw()
        if error is not None and self._keep_words and not self._separate_words and not raw:
            raw = {"rocm_smi_t_ns": time.time_ns(), "rocm_smi_error": error}
        with self._lock:
            self._samples.append(DeviceSample(start_ns, end_ns, **vars(values)))
            self._raw = raw or self._raw
            if error is None:
                self.taken += 1
                return
            self.failed, self._error, first = self.failed + 1, error, self.failed == 0
        if first:
            _log.warning("device telemetry: a sample failed, and is null in the record: %s", error)

    def _sample_words(self) -> None:
        now_ns = time.time_ns()
        try:
            if self._program is None:
                self._program = Program("rocm-smi")
            _, raw = words_of(self._program)
        except DeviceUnreadable as problem:
            if self._stop.is_set():
                return
            raw = {"rocm_smi_t_ns": now_ns, "rocm_smi_error": str(problem)}
        with self._lock:
            self._raw = raw


def is_failed(sample: DeviceSample) -> bool:
    return all(getattr(sample, name) is None for name in DeviceSample.__struct_fields__[2:])
