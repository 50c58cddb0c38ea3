"""Communication between ranks outside collectives: values from the first rank, joint decisions, who failed, and how a
run ends early, all ranks after the same step.

Everything goes through the rendezvous store, which still answers when a collective cannot: under torchrun it lives in
the agent, so it outlives any rank. At the end of a run ranks write files and upload traces, for as long as that takes;
`gather_when_idle` waits for those that are still busy. Must not use a collective.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from aorta.errors import AortaError, PeerFailed, RunIncomplete

_POLL_S = 0.05
_SLICE_S = 0.1
"""Of a wait that can be ended."""
_BEAT_S = 0.2
_LOOK_S = 5.0
"""Interval between checks of each rank's heartbeat."""
_FAILED = "failed"
"""Key of the failure reported last, by whichever rank."""
_COMMUNICATION_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")


class Peers:
    """The ranks that communicate.

    Args:
        ranks: those of the world that take part, in order; None: all.
        go_on: called while this rank waits; what it raises ends the wait.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        go_on: Callable[[], None] | None = None,
    ) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self.ranks = list(range(world_size) if ranks is None else ranks)
        self._go_on = go_on

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for all: it is the first of them, as a rule rank 0."""
        return self.rank == self.ranks[0]

    def from_first_rank(self, key: str, value: Any) -> Any:
        """Return `value` as the first rank passed it (JSON types); those of other ranks are ignored."""
        if self.is_first:
            self._tell(f"fact/{key}", value)
        self._wait([f"fact/{key}"], self.ranks[:1], key)
        return json.loads(self.store.get(f"fact/{key}"))

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON types), in rank order; also a barrier."""
        self._tell(f"gather/{key}/{self.rank}", value)
        names = [f"gather/{key}/{rank}" for rank in self.ranks]
        self._wait(names, self.ranks, key)
        return [json.loads(text) for text in self.store.multi_get(names)]

    def agree(self, key: str, error: str | None) -> None:
        """Wait at a barrier at which any rank may report that it cannot continue: all continue, or all stop.

        Args:
            error: why this rank cannot continue; None if it can.

        Raises:
            PeerFailed: names each rank that reported an error, with its message.
        """
        errors = zip(self.ranks, self.gather(f"agree/{key}", error), strict=True)
        if failed := [f"rank {rank}: {text}" for rank, text in errors if text]:
            raise PeerFailed("; ".join(failed))

    def report_failure(self, text: str, *, own: bool) -> None:
        """Publish a failure for the other ranks: `own` is this rank's own fault, otherwise it only met a peer's."""
        with suppress(RuntimeError, OSError):  # a dead store has no readers
            self.store.set(f"failure/{self.rank}", json.dumps({"text": text, "own": own}))
            if own:
                named = text.removeprefix(f"rank {self.rank}: ")  # an error explained before already has the prefix
                self.store.set(_FAILED, f"rank {self.rank} failed: {named}")

    def raise_if_peer_failed(self) -> None:
        """Check for failed peers, between steps without collectives, where a failure would not be noticed otherwise.

        Raises:
            PeerFailed: a rank has reported a failure of its own; it is named.
        """
        if self.world_size > 1 and self._has(_FAILED):
            raise PeerFailed(f"rank {self.rank} stops: {self.store.get(_FAILED).decode()}")

    def reported_failure(self, rank: int) -> str | None:
        """Return a rank's report of a failure of its own; None if it has reported nothing, or the store is gone."""
        with suppress(RuntimeError, OSError):
            if self._has(f"failure/{rank}"):
                word = json.loads(self.store.get(f"failure/{rank}"))
                return str(word["text"]) if word["own"] else None
        return None

    def diagnose(self, grace_s: float = 3.0) -> str:
        """Name the ranks to blame after a collective failed, as one sentence.

        Waits up to `grace_s` for the others to report. A rank that reports nothing is dead or hangs.
        """
        silent = {*self.ranks} - {self.rank}
        reports: dict[int, str] = {}
        deadline = time.monotonic() + grace_s
        try:
            over = False
            while silent and not over:
                over = time.monotonic() >= deadline  # before the look: the last one is behind the deadline
                for rank in sorted(silent):
                    if self.store.check([f"failure/{rank}"]):
                        silent.discard(rank)
                        word = json.loads(self.store.get(f"failure/{rank}"))
                        if word["own"]:
                            reports[rank] = word["text"]
                time.sleep(_POLL_S)
        except (RuntimeError, OSError) as error:
            return _gone(error)
        parts = [f"rank {rank} failed: {text}" for rank, text in sorted(reports.items())]
        parts += [f"rank {rank} exited without reporting an error, or hangs" for rank in sorted(silent)]
        return "; ".join(parts) or "no rank reported an error of its own"

    def explain(self, error: Exception) -> AortaError:
        """Return the error to report for this rank: its own, or a peer's, which is named. Publishes it for the others.

        Call it while the store still answers; calling it again with its own result changes nothing.
        """
        if isinstance(error, AortaError):
            self.report_failure(str(error), own=not isinstance(error, PeerFailed))
            return error
        text = f"{type(error).__name__}: {_first_line(error)}"
        # gloo raises plain RuntimeErrors, so the message is the only evidence that a collective failed.
        collective = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COMMUNICATION_WORDS)
        )
        if self.world_size > 1 and collective:
            self.report_failure(text, own=False)
            return PeerFailed(f"rank {self.rank}: a collective failed because of a peer: {self.diagnose()} ({text})")
        self.report_failure(text, own=True)
        return RunIncomplete(f"rank {self.rank}: {text}; the traceback is in its log file")

    def _tell(self, name: str, value: Any) -> None:
        try:
            self.store.set(name, json.dumps(value))
        except (RuntimeError, OSError) as error:
            raise PeerFailed(f"rank {self.rank}: {_gone(error)}") from error

    def _wait(self, names: list[str], ranks: list[int], what: str) -> None:
        since = time.monotonic()
        until = since + self.timeout_s
        try:
            while self._go_on is not None and time.monotonic() < until - _SLICE_S:
                with suppress(dist.DistStoreError):  # they have not come yet
                    return self.store.wait(names, timedelta(seconds=_SLICE_S))
                self._go_on()
            self.store.wait(names, timedelta(seconds=max(until - time.monotonic(), _SLICE_S)))
        except (RuntimeError, OSError) as error:
            missing = [rank for rank, name in zip(ranks, names, strict=True) if not self._has(name)]
            waited_s = round(min(time.monotonic() - since, self.timeout_s), 1)
            raise PeerFailed(
                f"rank {self.rank} waited {waited_s:g} s for {what!r} from "
                f"{', '.join(f'rank {rank}' for rank in missing) or 'the store'} ({_first_line(error)}); "
                "ranks that are merely slow to start need a longer timeout_s"
            ) from error

    def _has(self, name: str) -> bool:
        try:
            return bool(self.store.check([name]))
        except (RuntimeError, OSError):
            return False


def _gone(error: BaseException) -> str:
    return f"the rendezvous store stopped answering ({_first_line(error)}): the process that held it is gone"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def gather_when_idle(
    peers: Peers, key: str, busy: Callable[[], bool], value: Callable[[], Any], beat_s: float = _BEAT_S
) -> list[Any]:
    """Return every rank's `value()`, in rank order, once no rank is `busy()` any more.

    Each rank sends a heartbeat every `beat_s` seconds; a rank is given up only after a silence of the peers'
    `timeout_s`.

    Args:
        key: identifies this call; the same on all ranks, and used once.
        busy: whether this rank is still at work.
        value: what this rank contributes, in JSON types; called when it is no longer busy.

    Raises:
        PeerFailed: a rank fell silent; names it.
    """
    beat, names = f"busy/{key}/{peers.rank}", [_done(key, rank) for rank in peers.ranks]
    silent = {rank: (-1, time.monotonic()) for rank in peers.ranks if rank != peers.rank}  # beats, and since when
    published, next_look = False, time.monotonic()
    try:
        while True:
            if not published and not busy():
                peers.store.set(_done(key, peers.rank), json.dumps(value()))
                published = True
            elif not published:
                peers.store.add(beat, 1)
            # One query for all ranks: a query per pair of ranks would overload the store.
            if published and peers.store.check(names):
                return [json.loads(text) for text in peers.store.multi_get(names)]
            if time.monotonic() >= next_look:
                for rank, (beats, since) in list(silent.items()):
                    if peers.store.check([_done(key, rank)]):
                        del silent[rank]
                        continue
                    now_beats, now = peers.store.add(f"busy/{key}/{rank}", 0), time.monotonic()
                    if now_beats != beats:
                        silent[rank] = (now_beats, now)
                    elif now - since > peers.timeout_s:
                        raise PeerFailed(f"rank {rank} has said nothing for {peers.timeout_s:g} s ({key})")
                next_look = time.monotonic() + min(_LOOK_S, peers.timeout_s / 4)
            time.sleep(beat_s)
    except (RuntimeError, OSError) as error:
        raise PeerFailed(f"the rendezvous store stopped answering ({error}) ({key})") from error


def leave_value(peers: Peers, key: str, value: Any) -> None:
    """Give `gather_when_idle` of the others this rank's value; it failed and does not wait for theirs."""
    with suppress(RuntimeError, OSError):  # a dead store has no readers
        peers.store.set(_done(key, peers.rank), json.dumps(value))


def _done(key: str, rank: int) -> str:
    return f"done/{key}/{rank}"


_STOP_POLL_S = 0.25
_IMPATIENCE_S = 2.0
_STOP_GRACE_S = 15.0
"""A living rank posts within one poll, whatever its training thread does; torchrun kills 30 s after its own signal."""
_NO_DEMAND = -1


class StopAgreement:
    """Decides before each step whether it may start. `stopped_by`: the signal that requested a stop on any rank.

    A signal reaches ranks at different times; if each stopped after its own current step, the faster ones would wait in
    a collective for ever. So a thread of each rank agrees on the last step through the store: once a stop is requested,
    each rank posts the step it is in and starts no other until all have posted; the largest is the last one for all.
    The loop checks one flag per step. A rank whose loop is over posts -1, so nobody waits for it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.stopped_by: signal.Signals | None = None
        self._lock = threading.Lock()
        self._started = _NO_DEMAND
        self._posted = False
        self._last_step: int | None = None
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="aorta-stop", daemon=True)
            self._thread.start()

    def request(self, by: signal.Signals) -> None:
        """Ask all ranks to stop after the current step. Safe inside a signal handler."""
        self.stopped_by = self.stopped_by or by

    def may_start(self, step: int) -> bool:
        """Return whether `step` (a global step) may begin; blocks while the ranks agree on the last one."""
        if self._thread is None:
            return self.stopped_by is None
        with self._lock:
            if not self._posted and not self._decided.is_set():
                self._started = step
                return True
        self._decided.wait()
        return step <= self._last_step if self._last_step is not None else self.stopped_by is None

    def close(self) -> None:
        """Stop watching; this rank starts no further step."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _STOP_POLL_S)
            with suppress(RuntimeError, OSError):  # the store is gone, and with it whoever would read this
                self._post(_NO_DEMAND)

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_STOP_POLL_S):
                if self.stopped_by is not None:
                    self._store.set("stop/asked", str(int(self.stopped_by)))
                if self.stopped_by is not None or self._store.check(["stop/asked"]):
                    break
            else:
                return
            self._post()
            names = [f"stop/at/{rank}" for rank in range(self._world_size)]
            deadline = time.monotonic() + _STOP_GRACE_S
            while not self._store.check(names):
                if self._closed.wait(_STOP_POLL_S / 5) or time.monotonic() > deadline:
                    return
            self.stopped_by = self.stopped_by or signal.Signals(int(self._store.get("stop/asked")))
            self._last_step = max(int(text) for text in self._store.multi_get(names))
        except (RuntimeError, OSError):
            # The store is gone: the run is failing, and a rank that got no stop request goes on into the
            # collective that reports it. One that gets it later stops by itself.
            return
        finally:
            self._decided.set()

    def _post(self, demand: int | None = None) -> None:
        """Post `demand`, or the step this rank is in; only the first post counts."""
        with self._lock:
            if self._posted:
                return
            self._posted = True
            step = self._started if demand is None else demand
        self._store.set(f"stop/at/{self._rank}", str(step))


@contextmanager
def stop_on_signals(request: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into one call of `request`, inside the signal handler, for the length of a `with` block.

    Launchers often repeat the signal, so a repetition is ignored; a SIGINT more than two seconds after the first signal
    comes from an impatient person and interrupts at once (KeyboardInterrupt).
    """
    first: float | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            request(signal.Signals(number))
        elif number == signal.SIGINT and time.monotonic() - first > _IMPATIENCE_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
