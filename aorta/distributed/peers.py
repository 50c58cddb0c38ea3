"""Communication between ranks outside collectives: values from the first rank, joint decisions, and who failed.

Everything goes through the rendezvous store, which still answers when a collective cannot: under torchrun it lives in
the agent, so it outlives any rank. At the end of a run ranks write files and upload traces, for as long as that takes;
`gather_when_idle` waits for those that are still busy. Must not use a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
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
            self.store.set(f"fact/{key}", json.dumps(value))
        self._wait([f"fact/{key}"], self.ranks[:1], key)
        return json.loads(self.store.get(f"fact/{key}"))

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON types), in rank order; also a barrier."""
        self.store.set(f"gather/{key}/{self.rank}", json.dumps(value))
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
            return f"the rendezvous store stopped answering ({_first_line(error)}): the process that held it is gone"
        parts = [f"rank {rank} failed: {text}" for rank, text in sorted(reports.items())]
        parts += [f"rank {rank} exited without reporting an error, or hangs" for rank in sorted(silent)]
        return "; ".join(parts) or "no rank reported an error of its own"

    def explain(self, error: Exception) -> AortaError:
        """Return the error to report for this rank: its own, or a peer's, which is named. Publishes it for the others.

        Call it while the store still answers; calling it again with its own result changes nothing.
        """
        if isinstance(error, AortaError):
            self._try_report(str(error), own=not isinstance(error, PeerFailed))
            return error
        text = f"{type(error).__name__}: {_first_line(error)}"
        if self.world_size > 1 and _is_communication(error):
            self._try_report(text, own=False)
            return PeerFailed(f"rank {self.rank}: a collective failed because of a peer: {self.diagnose()} ({text})")
        self._try_report(text, own=True)
        return RunIncomplete(f"rank {self.rank}: {text}; the traceback is in its log file")

    def _try_report(self, text: str, *, own: bool) -> None:
        with suppress(RuntimeError, OSError):  # a dead store has no readers
            self.report_failure(text, own=own)

    def _wait(self, names: list[str], ranks: list[int], what: str) -> None:
        try:
            until = time.monotonic() + self.timeout_s
            while self._go_on is not None and time.monotonic() < until - _SLICE_S:
                with suppress(dist.DistStoreError):  # they have not come yet
                    return self.store.wait(names, timedelta(seconds=_SLICE_S))
                self._go_on()
            self.store.wait(names, timedelta(seconds=max(until - time.monotonic(), _SLICE_S)))
        except (RuntimeError, OSError) as error:
            missing = [rank for rank, name in zip(ranks, names, strict=True) if not self._has(name)]
            raise PeerFailed(
                f"rank {self.rank} waited {self.timeout_s:g} s for {what!r} from "
                f"{', '.join(f'rank {rank}' for rank in missing) or 'the store'} ({_first_line(error)}); "
                "ranks that are merely slow to start need a longer timeout_s"
            ) from error

    def _has(self, name: str) -> bool:
        try:
            return bool(self.store.check([name]))
        except (RuntimeError, OSError):
            return False


def _is_communication(error: Exception) -> bool:
    """Return whether a collective failed. gloo raises plain RuntimeErrors, so the message is the only evidence."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COMMUNICATION_WORDS)


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
    others = _Others(peers, key)
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
                others.look()
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


class _Others:
    def __init__(self, peers: Peers, key: str) -> None:
        self._peers, self._key = peers, key
        self._waited_for = {rank: (-1, time.monotonic()) for rank in peers.ranks if rank != peers.rank}

    def look(self) -> None:
        """Check the heartbeats.

        Raises:
            PeerFailed: a rank has fallen silent.
        """
        store, limit_s = self._peers.store, self._peers.timeout_s
        for rank, (beats, since) in list(self._waited_for.items()):
            if store.check([_done(self._key, rank)]):
                del self._waited_for[rank]
                continue
            now_beats, now = store.add(f"busy/{self._key}/{rank}", 0), time.monotonic()
            if now_beats != beats:
                self._waited_for[rank] = (now_beats, now)
            elif now - since > limit_s:
                raise PeerFailed(f"rank {rank} has said nothing for {limit_s:g} s ({self._key})")
