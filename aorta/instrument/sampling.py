"""Chooses which steps are observed (`instrument.every`): one of each block of N, drawn at random.

    drawn(step, every=10, seed=seed_of(run_id))      # on every rank, and after a resume, the same answer

A step that is not drawn is passed over: its line has its length, its values, and why there is no more. Never every Nth
step, which may always or never meet what happens every Nth. `Sampler` asks this of each step, and for `auto` chooses N
first, by what AORTA's own work costs. Blocks of a power of two are nested: what is drawn of the larger one was drawn of
one of its halves, so ranks with several N have the steps of the largest in common.

Must not use a collective, or wait for another rank.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Final, NamedTuple

import torch.distributed as dist

PASSED, FOR_ANOTHER_REASON = -1, 0
"""Answers of `Sampler.draw`: the step is passed over; it is observed, but was not drawn (a profiler's window)."""
KNOWN_SHARE: Final = 0.001
"""Largest share of the training thread's time that AORTA's own work may take with `auto`."""
RESERVE: Final = 0.8
"""`auto` plans with so much of `KNOWN_SHARE`. Chosen: its own work may take a quarter more than in the few steps
that it measured, and is still within it."""
MOST: Final = 1024
"""Largest N that `auto` chooses."""
LITTLE: Final = 0.1
"""What steps that are observed may add to what all cost at least, where that is more than `KNOWN_SHARE`. Chosen: no
larger N would take off more than a tenth."""
LEAST_OBSERVED: Final = 5
"""Steps that `auto` observes at the beginning at least; it measures the later half of them."""
MEASURED: Final = 8
"""Steps that `auto` passes over, to know what these cost."""
_SPREAD: Final = 8
"""Steps from the choice to the first block that it holds for: by then the other ranks have read it."""
_PATIENCE: Final = 64
"""So many steps later a rank that has not read it chooses by itself."""
_KEY: Final = "every"
_log = logging.getLogger(__name__)
_packed = struct.Struct("<Qqq").pack


def seed_of(run_id: str) -> int:
    """Return the seed of a run, which all of its ranks and attempts know."""
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=8).digest(), "little")


def drawn_of(block: int, every: int, seed: int) -> int:
    """Return the step that is drawn of the block of `every` steps with this number."""
    if every & (every - 1):
        return block * every + _random(seed, every, block) % every
    step = block
    for level in range(every.bit_length() - 1, 0, -1):  # one half of it, and so on
        step = 2 * step + _random(seed, -level, step) % 2
    return step


def drawn(step: int, every: int, seed: int) -> bool:
    """Return whether a global step is drawn."""
    return drawn_of(step // every, every, seed) == step


def _random(seed: int, *what: int) -> int:
    return int.from_bytes(hashlib.blake2b(_packed(seed, *what), digest_size=8).digest(), "little")


class Choice(NamedTuple):
    """What `auto` chose, and by what.

    Attributes:
        from_step: the first global step that it holds for.
        observed_us, passed_us: AORTA's own time on the training thread in a step that is observed, or not.
        step_ms: from the begin of a step to that of the next.
    """

    every: int
    from_step: int
    observed_us: float
    passed_us: float
    step_ms: float

    @property
    def known_share(self) -> float:
        """The share of a step that AORTA's own work takes, over all steps."""
        return (self.observed_us + (self.every - 1) * self.passed_us) / self.every / (self.step_ms * 1e3)


def chosen(observed_us: float, passed_us: float, step_ms: float, from_step: int) -> Choice:
    """Return the smallest power of two that keeps the known share. Where none does, as steps that are passed over take
    more by themselves, the smallest at which those observed add little to it.
    """
    choice = Choice(1, from_step, observed_us, passed_us, step_ms)
    least = passed_us / (step_ms * 1e3)
    while choice.every < MOST and choice.known_share > max(KNOWN_SHARE * RESERVE, least * (1 + LITTLE)):
        choice = choice._replace(every=choice.every * 2)
    return choice


class Sampler:
    """Says of each training step of one rank whether it is observed.

    Args:
        every: one of so many steps; None: `auto`.
        seed: of the run.
        first: global step of the run's first one.
        warmup: so many steps from there on are all observed, for `auto`.
        store: where the first rank leaves what `auto` chose; None: each rank chooses by itself.
        is_first: this rank chooses.
        always: whether a step is to be observed, drawn or not.
        tell: called with the choice of `auto`, on the rank that made it.
    """

    def __init__(
        self,
        every: int | None,
        seed: int,
        first: int = 0,
        warmup: int = 0,
        store: dist.Store | None = None,
        *,
        is_first: bool = True,
        always: Callable[[int], bool] = lambda _step: False,
        tell: Callable[[Choice], None] = lambda _choice: None,
    ) -> None:
        self.every = every
        self._seed, self._store, self._is_first = seed, store, is_first
        self._always, self._tell = always, tell
        self._from = first
        self._measures_from = first + max(warmup, LEAST_OBSERVED)
        self._decides_at = self._measures_from + MEASURED
        self._block, self._drawn = -1, -1
        self._began_ns = 0
        self._observed_ns: list[int] = []
        self._passed_ns: list[int] = []
        self._between_ns: list[int] = []

    def draw(self, step: int, *, always: bool = False) -> int:
        """Return N where the step that begins now was drawn as one of N, `FOR_ANOTHER_REASON` (`always` is one) or
        `PASSED`.
        """
        if self.every is None:
            self._choose(step)
        every = self.every
        if every is not None and step >= self._from:
            block = step // every
            if block != self._block:
                self._block, self._drawn = block, drawn_of(block, every, self._seed)
            if step == self._drawn:
                return every
        elif step < self._measures_from:
            return FOR_ANOTHER_REASON
        return FOR_ANOTHER_REASON if always or self._always(step) else PASSED

    def took(self, own_ns: int, *, observed: bool) -> None:
        """Note what AORTA's own work of a step took, at its end."""
        if self.every is None:
            (self._observed_ns if observed else self._passed_ns).append(own_ns)

    def _choose(self, step: int) -> None:
        """Choose N, or read what the first rank chose. To ask the store for that takes a round trip, in the few steps
        until it is known: it is in AORTA's own time of these (`aorta_ms`), and not in the choice.
        """
        now_ns = time.perf_counter_ns()
        if step > self._measures_from and self._began_ns:
            self._between_ns.append(now_ns - self._began_ns)
        self._began_ns = now_ns
        alone = self._store is None or step >= self._decides_at + _PATIENCE
        if step >= self._decides_at and (alone or self._is_first) and self._passed_ns:
            later = self._observed_ns[len(self._observed_ns) // 2 :] or self._passed_ns
            costs = median(later) / 1e3, median(self._passed_ns) / 1e3
            choice = chosen(*costs, median(self._between_ns) / 1e6, step + (0 if alone else _SPREAD))
            if self._store is not None and self._is_first:
                with suppress(RuntimeError, OSError):  # the others choose by themselves
                    self._store.set(_KEY, f"{choice.every} {choice.from_step}")
            elif self._store is not None:
                _log.warning("instrument.every=auto: the first rank's choice is not known: 1 in %d steps", choice.every)
            self.every, self._from = choice.every, choice.from_step
            self._tell(choice)
        elif step >= self._decides_at + _SPREAD // 2 and self._store is not None:
            with suppress(RuntimeError, OSError):
                if self._store.check([_KEY]):
                    self.every, self._from = map(int, self._store.get(_KEY).split())
