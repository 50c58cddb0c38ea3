"""Gives the scalars of rank 0's finished steps to loggers, from a thread of their own, while the run goes on.

The training thread takes a dozen numbers out of a step that is already in the record, and puts them into a queue;
clients, files and networks are the thread's business. A rank other than 0 has no loggers: each rank's numbers are in
the record, and curves of a thousand ranks help nobody. Must not stop a run, wait for a client while it goes on, or lose
steps in silence.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self

from aorta.distributed.peers import Peers
from aorta.errors import ConfigError
from aorta.loggers import Logger, Place, missing_client, open_logger
from aorta.records.schema import Step
from aorta.timeline.overlap import NS_PER_MS

_log = logging.getLogger(__name__)
MOST_WAITING: Final = 1000
"""Steps that may wait for slow clients; further ones are counted and left out."""
LEAVE_S: Final = 30.0
"""How long the end of a completed run waits for its loggers: a client may have to upload."""
LEAVE_EARLY_S: Final = 5.0
"""The same after an error or a signal: whoever ended the run kills what is left soon after (torchrun after 30 s)."""
_OF_OVERLAP: Final = (
    "overlap_ratio",
    "exposed_comm_ms",
    "comm_ms",
    "compute_ms",
    "compute_stall_ms",
    "idle_ms",
)
_MS_PER_S: Final = 1e3


def scalars(step: Step, samples_per_step: int | None) -> dict[str, float]:
    """Return what loggers get of a step; what it does not have (null) is left out.

    Args:
        samples_per_step: of all ranks together; None where it is not known.
    """
    step_ms = (step.end_mono_ns - step.start_mono_ns) / NS_PER_MS
    found = {name: step.overlap.get(name) for name in _OF_OVERLAP}
    found |= {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "step_ms": step_ms}
    if step_ms > 0:
        found["steps_per_s"] = _MS_PER_S / step_ms
        if samples_per_step is not None:
            found["samples_per_s"] = samples_per_step * _MS_PER_S / step_ms
    return {name: value for name, value in found.items() if value is not None}


def refuse_missing_clients(names: Sequence[str], peers: Peers, key: str) -> None:
    """Refuse loggers whose clients rank 0 does not have; collective. Call it before any folder is touched.

    Args:
        names: those of other ranks than 0 do not count, and may be others.
        key: what asks for them, for the message.

    Raises:
        ConfigError: on every rank; says what to install.
    """
    problem = missing_client(names) if peers.rank == 0 else None
    refused = peers.from_rank_zero("loggers", None if problem is None else f"{','.join(names)}: {problem}")
    if refused is not None:
        raise ConfigError(f"{key}={refused}, where rank 0 runs; or leave it out")


class _Scalars(NamedTuple):
    step: int
    values: Mapping[str, float]


class LiveLoggers:
    """The loggers of a run, open for the length of a `with` block. Without any, and on other ranks than 0, it does
    nothing. Clients are opened on the thread too: one may wait for its server for minutes.

    Args:
        names: of `aorta.loggers`; one that cannot be opened is logged and left out.
        place: what they are opened for.
        own: loggers of the caller, whose names are their types'.
        interval: steps from one that is logged to the next.
        samples_per_step: as `scalars`.
    """

    def __init__(
        self,
        names: Sequence[str],
        place: Place,
        own: Sequence[Logger] = (),
        *,
        interval: int = 1,
        samples_per_step: int | None = None,
    ) -> None:
        self._names, self._place, self._own = names, place, own
        self._interval, self._samples_per_step = interval, samples_per_step
        self._open: list[tuple[str, Logger]] = []
        self._queue: queue.SimpleQueue[_Scalars | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aorta-loggers", daemon=True)
        self._has_takers = bool(names or own)
        self._leave_s = LEAVE_S
        self._taken = self._lost = self._taking_ns = self._background_ns = 0

    def __enter__(self) -> Self:
        if self._has_takers:
            self._thread.start()
        return self

    def hurry(self) -> None:
        """Hurry, as the run ends early: wait no longer for the loggers than after an error."""
        self._leave_s = LEAVE_EARLY_S

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            _log.warning("loggers: not done %g s after the run, which ends without them", self._leave_s)
        if self._lost:
            _log.warning(
                "loggers: %d steps left out: more than %d were waiting, or the end of the run came first; raise "
                "logger_interval",
                self._lost,
                MOST_WAITING,
            )
        if self._taken:
            _log.info(
                "loggers: %d steps; %.0f us each on the training thread, %.0f us of processor time behind it",
                self._taken,
                self._taking_ns / self._taken / 1e3,
                self._background_ns / self._taken / 1e3,
            )

    def take(self, step: Step) -> None:
        """Queue a finished step of the training. Never blocks."""
        if not self._has_takers or step.phase != "train" or (step.global_step + 1) % self._interval:
            return
        begin_ns = time.perf_counter_ns()
        if self._queue.qsize() >= MOST_WAITING:
            self._lost += 1
            return
        self._queue.put(_Scalars(step.global_step, scalars(step, self._samples_per_step)))
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
        self._open_all()
        while (found := self._queue.get()) is not None:
            begin_ns = time.thread_time_ns()
            step, values = found
            self._each(partial(_log_step, step=step, values=values))
            self._background_ns += time.thread_time_ns() - begin_ns
        self._each(lambda logger: logger.close())

    def _open_all(self) -> None:
        self._open += [(type(logger).__name__, logger) for logger in self._own]
        for name in dict.fromkeys(self._names):
            try:
                self._open.append((name, open_logger(name, self._place)))
            except Exception as error:  # noqa: BLE001  a client may raise anything; the run goes on, and it is logged
                _log.warning("logger %s: cannot be opened, the run goes on without it: %s", name, _said(error))
        self._has_takers = bool(self._open)

    def _each(self, call: Callable[[Logger], None]) -> None:
        for entry in list(self._open):
            name, logger = entry
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001  a client may raise anything; the run goes on, and it is logged
                self._open.remove(entry)
                self._has_takers = bool(self._open)
                _log.warning("logger %s: failed, and is dropped: %s", name, _said(error))


def _log_step(logger: Logger, step: int, values: Mapping[str, float]) -> None:
    logger.log_step(step, values)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
