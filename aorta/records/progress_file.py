"""Progress of one rank in a file mapped into its memory: `progress/rank_<rank>.bin` in the run's folder.

    progress = ProgressFile.create(path, facts)     # in the rank
    with progress.phase("checkpoint"):
        ...
    seen = read_progress(path)                      # anywhere on the host, also while the rank is stuck or dead

The rank only stores into memory; the kernel keeps the pages when the rank is killed, stopped, or holds the interpreter
lock, so that nobody in the rank has to answer. Compiled interceptors write the ring, and step and phase, through a
mapping of their own (`instrument/native/progress.hpp`, `phases.hpp`). Times are nanoseconds of CLOCK_MONOTONIC, the
clock of `time.perf_counter_ns`.

Layout, version 2: little-endian 64-bit words, a page of header and state, facts as JSON, groups as JSON lines, and a
ring of `SLOTS` collectives. A slot's stamp is 0 while it is written, and then 1 + the number of the collective; step
and phase are one word, which repeats the lowest bits of the word for the time since when. So a reader sees torn values.

Must not import torch, wait for anything, or raise into a training loop once the file is there.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from aorta.records.files import decode_json, open_regular, read_small, whole_file
from aorta.records.schema import WORLD_LIMIT, Integer, Rank

PROGRESS_DIR: Final = "progress"
PROGRESS_FILE: Final = "rank_{rank}.bin"
PROGRESS_FILE_GLOB: Final = "rank_*.bin"
RING_FILE: Final = "ring_{rank}.bin"
RING_FILE_GLOB: Final = "ring_*.bin"
"""Beside it: rows of what happened (`aorta.records.ring_file`)."""
STACKS_FILE: Final = "rank_{rank}.stacks"
"""Where the rank's faulthandler writes its stacks, when it is asked to by a signal or dies by one."""
MAGIC: Final = b"AORTAPRG"
VERSION: Final = 2
SLOTS: Final = 1024
SLOT_WORDS: Final = 16
PHASES: Final = (
    *("none", "step", "data", "forward", "backward", "pipeline", "optimizer", "clip", "loss_read"),
    *("checkpoint", "evaluation", "baseline", "trace", "closing", "paused"),
)
ANNOUNCED: Final = frozenset({"checkpoint", "evaluation", "baseline", "trace", "closing"})
"""Phases that may take much longer than a step."""
WHEN_UNKNOWN: Final = -1
"""Completion time of a collective that is known to have completed, though not when."""
NOWHERE: Final = -1
"""Index of a collective that has no slot, of a group that is not listed, of a peer that is not known."""

_WORD: Final = 8
_STATE_AT: Final = 512
_FACTS_AT: Final = 1024
_GROUPS_AT: Final = 8192
_RING_AT: Final = 65536
_BYTES: Final = _RING_AT + SLOTS * SLOT_WORDS * _WORD
_HEADER: Final = struct.Struct("<8sqqq")  # magic, version, slots, bytes of facts
# Words of the state, from _STATE_AT on.
_STEP_AND_PHASE, _SINCE, _STEPS_DONE, _ENDED, _EXIT, _GROUPS_BYTES, _ISSUED, _RING_NS = range(8)
# Of `_STEP_AND_PHASE`, from the highest bits on: the step; 8 bits of the phase's number; 16 bits of `_SINCE`.
_STEP_SHIFT: Final = 24
_PHASE_SHIFT: Final = 16
_SINCE_MASK: Final = 0xFFFF
# Words of a slot.
_STAMP, _GROUP, _NUMBER, _KIND, _DTYPE, _SIZE, _PEER, _ISSUED_NS, _COMPLETED_NS = range(9)
_STATE_WORD: Final = _STATE_AT // _WORD
RING_WORDS: Final = (_STATE_WORD + _ISSUED, _STATE_WORD + _RING_NS, _RING_AT // _WORD, SLOTS, SLOT_WORDS)
"""For a writer of the ring in compiled code: words of the count and the time of progress, the first slot's, how many
slots there are, and how many words each has."""
_PHASE_WORDS: Final = (_STATE_WORD + _STEP_AND_PHASE, _STATE_WORD + _SINCE, _STEP_SHIFT, _PHASE_SHIFT, _SINCE_MASK)
_TRIES: Final = 10
_RETRY_S: Final = 0.001


class ProgressFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a rank runs.

    Attributes:
        start_ticks: of the process, as field 22 of /proc/PID/stat; tells a process from a later one of the same pid.
        pid_namespace: in which the process has that pid; 0 where it is not known.
        opened_ns: when the file was created.
        warmup_steps: first steps, whose pace says nothing about later ones.
        main_thread: identity of the thread that trains, as faulthandler prints it.
        stack_signal: makes the rank's faulthandler write its main thread's stack; None: none is registered.
        completed_late: completions are noted when the device's step is read, and not when they happen.
        error_file: in which torchrun's workers leave their exception; None: there is none.
        kinds, dtypes, phases: names of the numbers in the file.
    """

    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=WORLD_LIMIT)]
    local_rank: Integer
    pid: Integer
    start_ticks: Integer
    pid_namespace: Integer
    host: str
    boot_id: str
    run_id: str
    attempt: Integer
    opened_ns: Integer
    warmup_steps: Integer
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    main_thread: Integer | None = None
    stack_signal: Integer | None = None
    completed_late: bool = False
    error_file: str | None = None


class ProgressGroup(msgspec.Struct, frozen=True):
    """A process group of the rank: its global ranks, by rank within the group."""

    name: str
    ranks: tuple[Rank, ...]


class ProgressCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, or one send or receive, as it was issued.

    Attributes:
        index: counts all that the rank issued.
        group: None where it is not listed.
        number: counts those of the group; of send and receive those with this peer in this direction.
        peer: rank within the group.
        completed_ns: None: not seen to have completed. `WHEN_UNKNOWN`: has completed at an unknown time.
    """

    index: int
    group: ProgressGroup | None
    number: int
    kind: str
    dtype: str | None
    bytes: int
    peer: int | None
    issued_ns: int
    completed_ns: int | None


class ProgressState(NamedTuple):
    """Where a rank is in its loop.

    Attributes:
        step: the open step, or the last one that ended; None before the first.
        phase: "none" outside of a step.
        steps_done: how many steps have ended.
        progress_ns: when a step or phase last began or ended, or a collective was issued or seen to complete.
        exit_code: with which the rank has left the recorded part of its program; None while it is in there, or when it
            died in there.
    """

    step: int | None
    phase: str
    phase_since_ns: int
    steps_done: int
    progress_ns: int
    exit_code: int | None


class ProgressSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The file as read at one moment.

    Attributes:
        issued: how many collectives the rank has issued.
        collectives: the newest of them, the oldest first.
        torn: what could not be read, if anything.
    """

    facts: ProgressFacts
    state: ProgressState
    groups: tuple[ProgressGroup, ...]
    issued: int
    collectives: tuple[ProgressCollective, ...]
    torn: str | None


class UnreadableProgress(ValueError):
    """A file is no progress file, of another version, or too short."""


class Progress:
    """Progress of a loop that has no file: notes nothing."""

    path: Path | None = None

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""

    def end_step(self) -> None:
        """End the open step, and count it."""

    def enter(self, phase: str) -> str:
        """Note that a phase begins; returns the one it interrupts. A name that is not in `PHASES` changes nothing."""
        return phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note a phase, a `with` block; afterwards the one before it continues. After an error it stays: for whoever
        asks where that happened.
        """
        before = self.enter(name)
        yield
        self.enter(before)

    def group(self, _name: str, _ranks: Sequence[int]) -> int:
        """List a process group; returns its index, or `NOWHERE` where there is no space."""
        return NOWHERE

    def issue(
        self, _group: int, _number: int, _kind: int, _dtype: str | None, _size: int, _peer: int, _issued_ns: int
    ) -> int:
        """Note that a collective is issued; returns its index."""
        return NOWHERE

    def completed(self, index: int, at_ns: int) -> None:
        """Note that a collective has completed, at a time or `WHEN_UNKNOWN`."""

    @property
    def issued(self) -> int:
        """How many collectives have been issued."""
        return 0

    def leave(self) -> None:
        """In a forked child: note nothing in the file any more, which is the parent's."""

    def end(self, exit_code: int) -> None:
        """Note that the rank leaves the recorded part of its program; what follows is not noted."""


class ProgressFile(Progress):
    """The writer; made by `create`. Step and phase are the training thread's alone to write."""

    path: Path

    def __init__(self, path: Path, memory: mmap.mmap, facts: ProgressFacts) -> None:
        self.path = path
        self._map(memory)
        self._phase_numbers = {name: number for number, name in enumerate(facts.phases)}
        self._dtypes = {name: number for number, name in enumerate(facts.dtypes)}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._step, self._phase = NOWHERE, facts.phases[0]
        self._state[_STEP_AND_PHASE] = NOWHERE << _STEP_SHIFT | facts.opened_ns & _SINCE_MASK
        self._state[_SINCE] = facts.opened_ns

    def _map(self, memory: mmap.mmap | bytearray) -> None:
        self._memory, self._words = memory, memoryview(memory).cast("q")
        self._state = self._words[_STATE_WORD : _FACTS_AT // _WORD]

    @classmethod
    def create(cls, path: Path, facts: ProgressFacts) -> ProgressFile:
        """Create a new file in place of an older one, with all of its space reserved: on a full disk a later store
        would end the process.

        Raises:
            OSError: it cannot be created or reserved, or its file system maps no files.
        """
        encoded = msgspec.json.encode(facts)
        if len(encoded) > _GROUPS_AT - _FACTS_AT:
            raise OSError(f"the facts of rank {facts.rank} take {len(encoded)} bytes")
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:  # an older one may be mapped by another process
            with part.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, _BYTES)
                memory = mmap.mmap(file.fileno(), _BYTES)
            memory[_FACTS_AT : _FACTS_AT + len(encoded)] = encoded
            memory[: _HEADER.size] = _HEADER.pack(MAGIC, VERSION, SLOTS, len(encoded))
            return cls(path, memory, facts)

    def begin_step(self, step: int) -> None:
        self._step = step
        self.enter("step")

    def end_step(self) -> None:
        self._state[_STEPS_DONE] += 1
        self.enter("none")

    def enter(self, phase: str) -> str:
        number = self._phase_numbers.get(phase)
        if number is None:
            return phase
        before, self._phase = self._phase, phase
        # Two stores, each of a whole word: a step enters a dozen phases, with cold caches.
        now_ns, state = time.perf_counter_ns(), self._state
        state[_SINCE] = now_ns
        state[_STEP_AND_PHASE] = self._step << _STEP_SHIFT | number << _PHASE_SHIFT | now_ns & _SINCE_MASK
        return before

    def group(self, name: str, ranks: Sequence[int]) -> int:
        group = ProgressGroup(name, tuple(ranks))
        known = self._groups.get((name, group.ranks))
        if known is not None:
            return known
        line, used = msgspec.json.encode(group) + b"\n", self._state[_GROUPS_BYTES]
        if _GROUPS_AT + used + len(line) > _RING_AT:
            return NOWHERE
        self._memory[_GROUPS_AT + used : _GROUPS_AT + used + len(line)] = line
        self._state[_GROUPS_BYTES] = used + len(line)
        index = self._groups[(name, group.ranks)] = len(self._groups)
        return index

    def issue(self, group: int, number: int, kind: int, dtype: str | None, size: int, peer: int, issued_ns: int) -> int:
        state, words = self._state, self._words
        index = state[_ISSUED]
        at = _RING_AT // _WORD + index % SLOTS * SLOT_WORDS
        state[_ISSUED] = index + 1  # first, so that a slot that was never finished is missed
        words[at + _STAMP] = 0
        words[at + _GROUP], words[at + _NUMBER], words[at + _KIND] = group, number, kind
        words[at + _DTYPE] = NOWHERE if dtype is None else self._dtypes.get(dtype, NOWHERE)
        words[at + _SIZE], words[at + _PEER] = size, peer
        words[at + _ISSUED_NS], words[at + _COMPLETED_NS] = issued_ns, 0
        words[at + _STAMP] = index + 1
        state[_RING_NS] = issued_ns
        return index

    def completed(self, index: int, at_ns: int) -> None:
        at = _RING_AT // _WORD + index % SLOTS * SLOT_WORDS
        if index != NOWHERE and self._words[at + _STAMP] == index + 1:
            self._words[at + _COMPLETED_NS] = at_ns
            self._state[_RING_NS] = max(self._state[_RING_NS], at_ns)

    def compile_phases(self, mapping: Any) -> None:
        """Have step and phase noted by compiled functions from now on; those that are there already stay.

        Args:
            mapping: of this file, by the compiled interceptor: its `Progress`.
        """
        if "enter" in self.__dict__:
            return
        number = self._phase_numbers[self._phase]
        enter, begin_step = mapping.phases(_PHASE_WORDS, list(self._phase_numbers), self._step, number)
        self.__dict__.update(enter=enter, begin_step=begin_step)

    @property
    def issued(self) -> int:
        return self._state[_ISSUED]

    def leave(self) -> None:
        for name in ("enter", "begin_step"):
            self.__dict__.pop(name, None)  # compiled functions
        self._map(bytearray(_BYTES))

    def end(self, exit_code: int) -> None:
        self._state[_EXIT] = exit_code
        self._state[_ENDED] = 1


class ProgressWatch:
    """A file that is looked at again and again. It is not mapped: a mapping ends the process that reads behind the end
    of a file which somebody has cut off.

    Raises:
        OSError, UnreadableProgress: as `read_progress`.
    """

    def __init__(self, path: Path) -> None:
        file = open_regular(path, buffering=0)
        weakref.finalize(self, file.close)
        data = file.read(_BYTES)
        self._state = _words_of(path, data)[_STATE_WORD : _FACTS_AT // _WORD]
        self._file, self.facts = file.fileno(), _facts(path, data)

    def state(self) -> ProgressState:
        """Return the state as it is now, or the last one that could be read; step and phase may be of two moments that
        follow each other closely.
        """
        with suppress(OSError):
            if len(now := os.pread(self._file, _FACTS_AT - _STATE_AT, _STATE_AT)) == _FACTS_AT - _STATE_AT:
                self._state = memoryview(now).cast("q")
        return _state(self._state, self.facts)


def read_progress(path: Path) -> ProgressSeen:
    """Return the file as it is now. What is being written meanwhile is read again, and named in `torn` where that does
    not help.

    Raises:
        OSError: it cannot be read.
        UnreadableProgress: it is no progress file, of another version, or too short.
    """
    for _ in range(_TRIES):
        data = read_small(path)
        words = _words_of(path, data)
        facts = _facts(path, data)
        state = words[_STATE_WORD : _FACTS_AT // _WORD]
        groups: tuple[ProgressGroup, ...] = ()
        torn = []
        try:
            listed, decoder = data[_GROUPS_AT : _GROUPS_AT + state[_GROUPS_BYTES]], msgspec.json.Decoder(ProgressGroup)
            groups = tuple(decode_json(line, decoder) for line in listed.splitlines())
        except ValueError as error:
            torn.append(f"groups: {error}")
        collectives, lost = _collectives(words, _words_of(path, read_small(path)), facts, groups)
        if lost:
            torn.append(f"{lost} of the newest collectives: they were being written")
        if (state[_STEP_AND_PHASE] ^ state[_SINCE]) & _SINCE_MASK:
            torn.append("step and phase: they were being written")
        if not torn:
            break
        time.sleep(_RETRY_S)
    return ProgressSeen(
        facts=facts,
        state=_state(state, facts),
        groups=groups,
        issued=state[_ISSUED],
        collectives=collectives,
        torn="; ".join(torn) or None,
    )


def progress_files(run_folder: Path) -> list[Path]:
    """Return the progress files of a run, by rank; empty where there are none."""
    try:
        found = list((run_folder / PROGRESS_DIR).glob(PROGRESS_FILE_GLOB))
    except OSError:
        return []
    numbered = [(path.stem.removeprefix("rank_"), path) for path in found]
    ranked = sorted((int(number), path) for number, path in numbered if number.isdecimal())
    return [path for rank, path in ranked if rank < WORLD_LIMIT]


def _state(state: memoryview, facts: ProgressFacts) -> ProgressState:
    both = state[_STEP_AND_PHASE]
    return ProgressState(
        step=None if both >> _STEP_SHIFT == NOWHERE else both >> _STEP_SHIFT,
        phase=_name(facts.phases, both >> _PHASE_SHIFT & 0xFF) or "none",
        phase_since_ns=state[_SINCE],
        steps_done=state[_STEPS_DONE],
        progress_ns=max(state[_SINCE], state[_RING_NS]),
        exit_code=state[_EXIT] if state[_ENDED] else None,
    )


def _words_of(path: Path, data: bytes) -> memoryview:
    if len(data) < _BYTES or data[: len(MAGIC)] != MAGIC:
        raise UnreadableProgress(f"{path}: is not a progress file, or is cut off: {len(data)} bytes of {_BYTES}")
    _, version, slots, _ = _HEADER.unpack_from(data)
    if version != VERSION or slots != SLOTS:
        raise UnreadableProgress(
            f"{path}: version {version} with {slots} slots; this AORTA reads version {VERSION} with {SLOTS}"
        )
    return memoryview(data)[:_BYTES].cast("q")


def _facts(path: Path, data: bytes) -> ProgressFacts:
    size = _HEADER.unpack_from(data)[3]
    try:
        return decode_json(data[_FACTS_AT : _FACTS_AT + size], msgspec.json.Decoder(ProgressFacts))
    except ValueError as error:
        raise UnreadableProgress(f"{path}: its facts cannot be read: {error}") from error


def _collectives(
    words: memoryview, again: memoryview, facts: ProgressFacts, groups: tuple[ProgressGroup, ...]
) -> tuple[tuple[ProgressCollective, ...], int]:
    found = []
    for slot in range(SLOTS):
        at = _RING_AT // _WORD + slot * SLOT_WORDS
        row = words[at : at + SLOT_WORDS]
        index = row[_STAMP] - 1
        if index < 0 or again[at + _STAMP] != row[_STAMP] or index % SLOTS != slot:
            continue
        found.append(
            ProgressCollective(
                index=index,
                group=groups[row[_GROUP]] if 0 <= row[_GROUP] < len(groups) else None,
                number=row[_NUMBER],
                kind=_name(facts.kinds, row[_KIND]) or "unknown",
                dtype=_name(facts.dtypes, row[_DTYPE]),
                bytes=row[_SIZE],
                peer=None if row[_PEER] == NOWHERE else row[_PEER],
                issued_ns=row[_ISSUED_NS],
                completed_ns=row[_COMPLETED_NS] or None,
            )
        )
    found.sort(key=lambda row: row.index)
    newest = max(words[_STATE_WORD + _ISSUED], found[-1].index + 1 if found else 0)
    found = [row for row in found if row.index >= newest - SLOTS]
    return tuple(found), min(newest, SLOTS) - len(found)


def _name(names: Sequence[str], number: int) -> str | None:
    return names[number] if 0 <= number < len(names) else None
