"""What people see of rank 0's finished steps while a run goes on: progress on the terminal, scalars for loggers.

Finished steps come some steps late. Loggers have a thread of their own: the training thread puts a dozen numbers of a
step, which is in the record already, into a queue; clients, files and networks are the thread's business. A rank other
than 0 shows and logs nothing: each rank's numbers are in its record. Must not wait for a device, stop a run, wait for a
client while it goes on, or lose steps in silence.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from tqdm import tqdm

from aorta.command_line import rounded_time
from aorta.config.schema import Training, Wording
from aorta.distributed.peers import Peers
from aorta.errors import ConfigError
from aorta.loggers import LoggedRun, Logger, missing_client, open_logger
from aorta.records.files import open_regular
from aorta.records.schema import Anchor, Calibration, Footer, Header, MeasuredBy, Step
from aorta.timeline.overlap import NS_PER_MS

_log = logging.getLogger(__name__)
FOLLOW_S: Final = 0.5
"""From one look at a record that another process writes to the next."""
MOST_WAITING: Final = 1000
"""Steps that may wait for slow clients; further ones are counted and left out."""
LEAVE_S: Final = 30.0
"""How long the end of a completed run waits for its loggers: a client may have to upload."""
LEAVE_EARLY_S: Final = 5.0
"""The same after an error or a signal: a launcher kills what is left soon after (torchrun after 30 s)."""
_OF_OVERLAP: Final = ("overlap_ratio", "exposed_comm_ms", "comm_ms", "compute_ms", "compute_stall_ms", "idle_ms")


class ShownStep(msgspec.Struct, tag_field="record", tag="step", frozen=True, gc=False):
    """What is shown and logged of a step, read from a line of the record."""

    global_step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    start_mono_ns: int
    end_mono_ns: int
    t_end_ns: int
    overlap: dict[str, float | None]
    phase: str = "train"
    bounds: dict[str, tuple[float, float]] | msgspec.UnsetType = msgspec.UNSET
    measured_by: MeasuredBy | msgspec.UnsetType = msgspec.UNSET


class FollowedRecord(AbstractContextManager[None]):
    """Hands the steps that another process appends to a record to whoever shows them, on a thread of its own.

    Args:
        then: takes them in order.
    """

    def __init__(self, path: Path, then: Callable[[ShownStep], None]) -> None:
        self._path, self._then, self._offset = path, then, 0
        self._decode = msgspec.json.Decoder(Header | ShownStep | Anchor | Calibration | Footer).decode
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aorta-shown-steps", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Hand over what is in the record by now; nothing after that."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._read()

    def _run(self) -> None:
        while not self._stop.wait(FOLLOW_S):
            self._read()

    def _read(self) -> None:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                for text in file:
                    if not text.endswith(b"\n"):
                        return
                    self._offset += len(text)
                    line = self._decode(text)
                    if isinstance(line, ShownStep):
                        self._then(line)
        except (OSError, msgspec.DecodeError) as error:
            self._stop.set()
            _log.warning("%s: steps are no longer shown: %s", self._path, error)


def scalars(step: Step | ShownStep, samples_per_step: int | None) -> dict[str, float]:
    """Return what loggers get of a step, without nulls. `samples_per_step`: of all ranks; None: not known."""
    step_ms = (step.end_mono_ns - step.start_mono_ns) / NS_PER_MS
    values = {name: step.overlap.get(name) for name in _OF_OVERLAP}
    values |= {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "step_ms": step_ms}
    if step_ms > 0:
        values["steps_per_s"] = 1e3 / step_ms
        if samples_per_step is not None:
            values["samples_per_s"] = samples_per_step * 1e3 / step_ms
    return {name: value for name, value in values.items() if value is not None}


def refuse_missing_clients(names: Sequence[str], peers: Peers, key: str) -> None:
    """Refuse loggers whose clients rank 0 lacks; collective. Call it before any folder is touched.

    Args:
        names: only rank 0's count.
        key: what asks for them, for the message.

    Raises:
        ConfigError: on every rank; says what to install.
    """
    problem = missing_client(names) if peers.is_first else None
    refused = peers.from_first_rank("loggers", None if problem is None else f"{','.join(names)}: {problem}")
    if refused is not None:
        raise ConfigError(f"{key}={refused}, where rank 0 runs; or leave it out")


class LiveLoggers:
    """The loggers of a run, open for the length of a `with` block; without any it does nothing. They are opened on
    their thread too: one may wait for its server for minutes.

    Args:
        names: of `aorta.loggers`; one that cannot be opened is logged and left out.
        own: loggers of the caller, whose names are their types'.
        interval: steps from one that is logged to the next.
        samples_per_step: as `scalars`.

    Attributes:
        has_takers: whether anything is logged.
    """

    def __init__(
        self,
        names: Sequence[str],
        place: LoggedRun,
        own: Sequence[Logger] = (),
        *,
        interval: int = 1,
        samples_per_step: int | None = None,
    ) -> None:
        self._names, self._place, self._own = names, place, own
        self._interval, self._samples_per_step = interval, samples_per_step
        self._open: list[tuple[str, Logger]] = []
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aorta-loggers", daemon=True)
        self.has_takers = bool(names or own)
        self._leave_s = LEAVE_S
        self._taken = self._lost = self._taking_ns = self._background_ns = 0

    def __enter__(self) -> Self:
        if self.has_takers:
            self._thread.start()
        return self

    def hurry(self) -> None:
        """Wait no longer for the loggers than after an error, as the run ends early."""
        self._leave_s = LEAVE_EARLY_S

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._thread.is_alive():
            return
        if kind is not None:
            self.hurry()
        self._queue.put(None)
        self._thread.join(self._leave_s / 2)  # the rest of the time is for closing
        if self._thread.is_alive():
            self._drop_waiting()
            self._thread.join(self._leave_s / 2)
        if self._thread.is_alive():
            _log.warning("loggers: still busy %g s after the run, which ends without them", self._leave_s)
        if self._lost:
            _log.warning(
                "loggers: %d steps not logged: more than %d waited, or the run ended first; raise logger_interval",
                self._lost,
                MOST_WAITING,
            )
        if self._taken:
            _log.info(
                "loggers: %d steps; per step %.0f us on the training thread, %.0f us of processor time on their own",
                self._taken,
                self._taking_ns / self._taken / 1e3,
                self._background_ns / self._taken / 1e3,
            )

    def take(self, step: Step | ShownStep) -> None:
        """Queue a finished step of the training. Never blocks."""
        if not self.has_takers or step.phase != "train" or (step.global_step + 1) % self._interval:
            return
        begin_ns = time.perf_counter_ns()
        if self._queue.qsize() >= MOST_WAITING:
            self._lost += 1
            return
        self._queue.put((step.global_step, scalars(step, self._samples_per_step)))
        self._taken += 1
        self._taking_ns += time.perf_counter_ns() - begin_ns

    def _drop_waiting(self) -> None:
        """Leave out the steps that still wait, so that the clients are closed next."""
        with suppress(queue.Empty):
            while True:
                if self._queue.get_nowait() is not None:
                    self._lost += 1
                    self._taken -= 1
        self._queue.put(None)

    def _run(self) -> None:
        self._open += [(type(logger).__name__, logger) for logger in self._own]
        for name in dict.fromkeys(self._names):
            try:
                self._open.append((name, open_logger(name, self._place)))
            except Exception as error:  # noqa: BLE001  a client may raise anything; the run goes on, and it is logged
                _log.warning("logger %s cannot be opened; the run goes on without it: %s", name, described(error))
        self.has_takers = bool(self._open)
        while (waiting := self._queue.get()) is not None:
            begin_ns = time.thread_time_ns()
            step, values = waiting
            self._call_all(lambda logger, step=step, values=values: logger.log_step(step, values))  # type: ignore[misc]
            self._background_ns += time.thread_time_ns() - begin_ns
        self._call_all(lambda logger: logger.close())

    def _call_all(self, call: Callable[[Logger], None]) -> None:
        for entry in list(self._open):
            name, logger = entry
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001  a client may raise anything; the run goes on, and it is logged
                self._open.remove(entry)
                self.has_takers = bool(self._open)
                _log.warning("logger %s failed and is not called again: %s", name, described(error))


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def progress_of(
    training: Training, first: int, stop: int, samples: int, *, shown: bool, alone: bool = False
) -> TutorialProgress:
    """Return what `training.progress` asks for.

    Args:
        first, stop: global steps of the run, the latter exclusive.
        samples: of a step, of all ranks together.
        shown: whether this rank shows anything.
        alone: whether it is the only rank, whose overlap says nothing.
    """
    if training.progress is Wording.tutorial:
        return TutorialProgress(stop, training.log_interval, shown=shown)
    return OverlapProgress(first, stop, training.log_interval, samples, shown=shown, alone=alone)


class TutorialProgress:
    """One line every `interval` steps, as profiling tutorials print them; takes finished steps in order."""

    def __init__(self, stop: int, interval: int, *, shown: bool) -> None:
        self._stop, self._interval, self._shown = stop, interval, shown

    def show(self, step: Step | ShownStep) -> None:
        number = step.global_step + 1
        if self._shown and number % self._interval == 0:
            loss = "-" if step.loss is None else f"{step.loss:.4f}"
            _log.info("[rank 0] step %d/%d loss=%s", number, self._stop, loss)

    def close(self) -> None:
        """Remove the progress line from the terminal; here, only complete lines were printed."""


class OverlapProgress(TutorialProgress):
    """A bar on a terminal, plain lines otherwise: loss, times, overlap now and so far, rates, time left."""

    def __init__(self, first: int, stop: int, interval: int, samples: int, *, shown: bool, alone: bool) -> None:
        super().__init__(stop, interval, shown=shown)
        self._samples, self._alone = samples, alone
        self._began_ns, self._steps = 0, 0
        # Hidden and exposed communication, each at least and at most, by who measured the step.
        self._sums_ms = {"marks": [0.0] * 4, "kernels": [0.0] * 4}
        self._kernel_steps = 0
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=stop, initial=first, unit="step", dynamic_ncols=True, file=sys.stderr)

    def show(self, step: Step | ShownStep) -> None:
        if not self._shown:
            return
        if self._began_ns:
            self._steps += 1
            self._add(step)
        else:  # the first step pays for the start, and counts in no rate
            self._began_ns = step.t_end_ns
        passed_ns, left = step.t_end_ns - self._began_ns, self._stop - step.global_step - 1
        rate = self._steps * 1e9 / passed_ns if self._steps and passed_ns > 0 else None
        comm_ms = step.overlap.get("comm_ms")
        parts = [
            "loss -" if step.loss is None else f"loss {step.loss:.4f}",
            f"step {step.overlap['window_ms']:.1f} ms",
            "comm -" if comm_ms is None else f"comm {comm_ms:.1f} ms",
            f"overlap {'n/a (1 rank)' if self._alone else self._overlap(step)}",
        ]
        if rate is not None:
            parts.append(f"{rate * self._samples:.0f} samples/s")
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.update(1)  # it draws itself ten times a second at most, with steps per second and the time left
        if rate is not None:
            parts += [f"{rate:.3g} steps/s", *([f"{rounded_time(left / rate)} left"] if left else [])]
        if (step.global_step + 1) % self._interval == 0 or not left:
            # With a bar the lines would only repeat it; the log file has them anyway.
            level = logging.DEBUG if self._bar is not None else logging.INFO
            _log.log(level, "step %d/%d  %s", step.global_step + 1, self._stop, "  ".join(parts))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _add(self, step: Step | ShownStep) -> None:
        hidden, exposed = _bounds(step, "compute_comm_ms"), _bounds(step, "exposed_comm_ms")
        if hidden is None or exposed is None:
            return
        by = "kernels" if step.measured_by == "kernels" else "marks"
        self._kernel_steps += by == "kernels"
        self._sums_ms[by] = [a + b for a, b in zip(self._sums_ms[by], (*hidden, *exposed), strict=True)]

    def _overlap(self, step: Step | ShownStep) -> str:
        """Return the hidden share of this step's communication, and of all by marks, by kernels where these leave it
        open.
        """
        shares = {}
        for by, (low, high, least, most) in self._sums_ms.items():
            shares[by] = _between(low / (low + most), high / (high + least)) if low + most and high + least else None
        marks, kernels = shares["marks"], shares["kernels"]
        ratio = _bounds(step, "overlap_ratio")
        now = "-" if ratio is None else _between(*ratio) + (" by kernels" if step.measured_by == "kernels" else "")
        if kernels is not None and (marks is None or _TO in marks):
            count = self._kernel_steps
            return f"{now} ({kernels} in {count} step{'s' * (count > 1)} by kernels)"
        return now if marks is None else f"{now} ({marks} so far)"


_TO: Final = " to at most "


def _bounds(step: Step | ShownStep, name: str) -> tuple[float, float] | None:
    """Return a metric of a step at least and at most; None where the step does not say."""
    value = step.overlap.get(name)
    if value is not None:
        return value, value
    return None if step.bounds is msgspec.UNSET else step.bounds.get(name)


def _between(low: float, high: float) -> str:
    ends = f"{low:.2f}", f"{high:.2f}"
    return ends[0] if ends[0] == ends[1] else _TO.join(ends)
