"""How the ranks of a program that knows nothing of AORTA come to record together, while they train.

At its first optimizer step a rank starts a thread, which prepares what has to be there, announces the rank in a store
of its own, waits until all ranks have announced themselves, or only those that step, agrees with the threads of the
others on the step behind which they begin, and opens the run. The training waits for its own thread alone, and not for
long: at its first step, as ranks that step together begin together, and at the step that was agreed on.

Must not wait for another rank's training, or use the program's own connection to the store, which an operation blocks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

import torch
import torch.distributed as dist

from aorta.distributed.peers import Peers
from aorta.errors import InstrumentError, PeerFailed

AGREED_STEP_S: Final = 10.0
"""How long the step that was agreed on may wait for the run to be open, and a thread for those of the others."""
OTHERS_S: Final = 10.0
"""From a rank's own first step, until ranks that have not stepped are left out."""
_POLL_S: Final = 0.05
_COUNT, _RANKS = "stepped", "ranks"

joined: ContextVar[Meeting | None] = ContextVar("joined", default=None)
"""In the thread of a meeting: that meeting, through which the run is opened."""


class Meeting:
    """This rank's part of it.

    Args:
        store: of this meeting alone.
        prepare: called first, in the thread; may take minutes.
        open_run: opens the run, in the thread, given the step behind which it begins; returns what `result` will be.

    Attributes:
        peers: the ranks that have met; None: they have not.
        trains_in: identity of the thread that trains.
        result: of `open_run`, once `stepped` has returned True.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        prepare: Callable[[], None],
        open_run: Callable[[int], Any],
    ) -> None:
        self.peers: Peers | None = None
        self.trains_in = threading.get_ident()
        self.result: Any = None
        self._store, self._rank, self._world_size = store, rank, world_size
        self._prepare, self._open_run = prepare, open_run
        self._changed, self._given_up = threading.Condition(), threading.Event()
        self._steps, self._begins_behind = 0, -1
        self._is_prepared = self._is_held = self._is_over = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="aorta meeting", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> list[int]:
        """Ranks that had not stepped."""
        return [] if self.peers is None else sorted(set(range(self._world_size)).difference(self.peers.ranks))

    def stepped(self, patience_s: float = 0.0) -> bool:
        """Return whether the run is open, and begins behind the step that the training has just ended.

        Args:
            patience_s: how long to wait for an agreement, where there is none.

        Raises:
            Exception: what kept the run from being opened.
        """
        with self._changed:
            self._steps, self._is_held = self._steps + 1, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._begins_behind >= self._steps, patience_s)
            if self._begins_behind == self._steps and not self._changed.wait_for(
                lambda: self._is_over or self._begins_behind != self._steps, AGREED_STEP_S
            ):
                self.give_up()
                raise PeerFailed(f"the run was not open {AGREED_STEP_S:g} s after the step that it begins behind")
            self._is_held = False
            if self._error is not None:
                raise self._error
            return self._is_over

    def until_held(self) -> None:
        """Wait, in the thread, until the training waits behind the step that was agreed on. Raises PeerFailed where the
        program has ended the meeting.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._given_up.is_set() or (self._is_held and self._steps == self._begins_behind)
            )
        self._go_on()

    def give_up(self) -> str:
        """End the meeting, and return what it waited for. A run that opens all the same is closed."""
        with self._changed:
            self._given_up.set()
            self._changed.notify_all()
        self._thread.join(1.0)
        if not self._is_prepared:
            return "the program ended while the interceptor was compiled, which goes on: record again in a minute"
        with suppress(RuntimeError, OSError):  # the store may be gone
            if missing := [rank for rank in range(self._world_size) if not self._store.check([_name(rank)])]:
                return f"no optimizer step was taken by ranks {', '.join(map(str, missing))}"
        return "the program ended before the run was open"

    def _run(self) -> None:
        joined.set(self)
        error: Exception | None = None
        result = None
        try:
            self._prepare()
            self._is_prepared = True
            self.peers = self._meet()
            result = self._open_run(self._agree_on_step(self.peers))
        except Exception as problem:  # noqa: BLE001  for the thread that trains
            error = problem
        del self._open_run  # which knows the model, and the program may free that
        with self._changed:
            if not self._given_up.is_set():
                self.result, self._error, self._is_over = result, error, True
                self._changed.notify_all()
                return
        if result is not None:
            result.close(PeerFailed("given up"))

    def _meet(self) -> Peers:
        announce(self._store, self._rank, None)
        until = time.monotonic() + OTHERS_S
        while self._store.add(_COUNT, 0) < self._world_size and time.monotonic() < until:
            if self._store.check([_RANKS]):
                break
            self._go_on(_POLL_S)
        stepped = [rank for rank in range(self._world_size) if self._store.check([_name(rank)])]
        ranks = json.loads(self._store.compare_set(_RANKS, "", json.dumps(stepped)))  # the first one decides
        if self._rank not in ranks:
            raise PeerFailed(f"rank {self._rank} took its first optimizer step when the others had begun")
        errors = {rank: json.loads(self._store.get(_name(rank))) for rank in ranks}
        if any(errors.values()):
            raise PeerFailed("; ".join(f"rank {rank}: {error}" for rank, error in errors.items() if error))
        return Peers(self._store, self._rank, self._world_size, AGREED_STEP_S, ranks, self._go_on)

    def _agree_on_step(self, peers: Peers) -> int:
        """Return a step behind which every rank's training can still be held."""
        number = margin = 0
        while True:
            with self._changed:
                here = self._steps if self._is_held else self._steps + 1
            behind = max(peers.gather(f"step {number}", here)) + margin
            with self._changed:
                can_wait = behind > self._steps or (behind == self._steps and self._is_held)
                self._begins_behind = behind if can_wait else -1
                self._changed.notify_all()
            if all(peers.gather(f"held {number}", can_wait)):
                return int(behind)
            with self._changed:
                self._begins_behind = -1
                self._changed.notify_all()
            number, margin = number + 1, 2 * margin + 1

    def _go_on(self, pause_s: float = 0.0) -> None:
        if self._given_up.wait(pause_s):
            raise PeerFailed("the program ended before all ranks had met")


def announce(store: dist.Store, rank: int, error: str | None) -> None:
    """Tell the other ranks that this one has stepped, and why it cannot record, if so."""
    store.set(_name(rank), json.dumps(error))
    store.add(_COUNT, 1)


def _name(rank: int) -> str:
    return f"stepped/{rank}"


def own_store() -> dist.Store:
    """Return a connection of AORTA's own to the store of the default process group."""
    return dist.PrefixStore("aorta/zero_lines", default_store().clone())  # type: ignore[attr-defined]  # not in its stubs


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    group = dist.group.WORLD
    if group is None or not hasattr(group, "get_group_store"):
        raise InstrumentError(
            f"torch {torch.__version__} does not offer ProcessGroup.get_group_store, through which ranks agree on a "
            "folder; use a torch that AORTA supports (>= 2.11)"
        )
    return group.get_group_store()
