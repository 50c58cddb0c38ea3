"""The ring of a rank: where it is in its loop, and rows of what happened there, in a file mapped into its memory.

    ring = RingFile.create(path, process=...) # in the rank: `progress/rank_<rank>.bin` in the run's folder
    ring.progress.enter("forward")            # `aorta.records.progress`, which also reads it for an autopsy
    ring.describe(facts)                      # rows are appended by compiled code (`native/ring.hpp`), or by Python
                                              # (`aorta/instrument/ring_rows.py`)
    ring.text("optimizer")                    # its number, for rows
    rows, first = ring.rows_since(index)      # anywhere: what happened since, and the index of its first row
    ring.close()                              # where its rows are in the record, the newest collectives stay

Layout, little-endian: a page of words; facts of the process, and of its rows, as JSON; texts and groups as JSON lines,
numbered from 1 on; a ring of rows of 64 bytes. A row's stamp is 0 while it is written, and then 1 + its index, so a
reader sees torn and overwritten rows.

    kind           a, b                       x, y                       a2, b2; flags; name
    STEP           begin, end                 global step; behind rows   its first row; epoch, step; facts; why unseen
    SUMMARY        own time; its STEP         issued; outside            ahead before, after; counted; why unclear
    VALUE          when, 0                    a float's bits             ; which
    COLLECTIVE     issue; end * 2 + by wait   bytes; number              end of a long call; pair; group, op, dtype
    WAIT           begin, end                 ; number                   ; blocked, over; group, op
    PASS           begin, end                                            ; backward; block
    TAIL, STALL    begin, end
    AUX, PIPELINE  begin, end                                            ; name, group
    COMPUTE        begin, end                 phase                      ; block
    RANGE          begin, end                 thread; depth              error; its STEP; name
    LEFT_OUT       how many, of how many                                 ; its STEP
    LINK           start; backend's end       its COLLECTIVE             ; by the fabric
    NOTE           how many                   a float's bits             ; its STEP; about what; text

On a device begin and end are what it says, and a2 and b2 when the host recorded the marks. It has also

    SPAN           begin, end                 its COLLECTIVE; launch,    marked; why it has no end
                                              communicator
    COPY           begin, end                 bytes                      marked; direction, computes, elsewhere
    GAP            begin, end                                            marked
    JOINED                                    its GAP; number            ; group, op

where a COLLECTIVE has twice the end of its SPAN, and flags of what the device is known to have begun and done, also
while the loop stands still; it is unmarked where it lacks a mark, or has no SPAN. A step of a device has its end last
of all. A pair is a number times 2^32, and the peer, a rank within the group: there sends and receives are counted by
peer and direction, as the two ranks of a pair agree on that alone. Collectives outside of steps have rows of
themselves only.

A step has the rows from its first one on that stand before what is behind them, and those which name it. Times are
nanoseconds of CLOCK_MONOTONIC, the clock of `time.perf_counter_ns`; an end of 0: not yet. A collective on an emulated
fabric has a LINK as well, which is filled before the collective ends. Must not import torch, or wait for anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records import progress as layout
from aorta.records.files import OF_THIS_PROCESS, above_streams, open_own, whole_file, write_whole
from aorta.records.progress import Progress, ProgressFacts, RingHead, UnreadableProgress
from aorta.records.schema import ClockReading, CopyDirection, Integer, Rank

_RANKS_UNTIL: Final = (layout.ROWS_AT - layout.NAMES_AT) // 2
"""So much of the space for names may be taken where groups are still listed with their ranks."""

ROW: Final = np.dtype(
    [
        *(("stamp", "<u8"), ("kind", "u1"), ("flags", "u1"), ("op", "u1"), ("dtype", "u1"), ("group", "<u2")),
        *(("name", "<u2"), ("a", "<i8"), ("b", "<i8"), ("x", "<i8"), ("y", "<i8"), ("a2", "<i8"), ("b2", "<i8")),
    ]
)
STEP, COLLECTIVE, WAIT, PASS, TAIL, STALL, AUX, PIPELINE, COMPUTE, RANGE, LEFT_OUT, VALUE, SUMMARY, LINK = range(1, 15)
SPAN, COPY, GAP, JOINED, NOTE = range(15, 20)
# Flags, by kind.
WARMUP, CONTINUES, BLIND, PHASE_SHIFT, PASSED_OVER = 1, 2, 4, 3, 32  # of STEP; two bits are the index in STEP_PHASES
OWN_COUNTED = 1  # of SUMMARY
BLOCKED, OVER = 1, 2  # of WAIT
BACKWARD = 1  # of PASS
BY_FUTURE, UNWATCHED, ON_DEVICE, UNMARKED, BEGUN, DONE = 1, 2, 4, 8, 16, 32  # of COLLECTIVE
BY_FABRIC = 1  # of LINK: the emulated fabric set its end
LOSS, GRAD_NORM, LR = range(3)  # of VALUE, and of a NOTE: values that were read later
CAPTURED, NO_COPIES, UNSEEN, DRAWN = range(3, 7)  # of NOTE: what it is about; the last: as one of how many
DIRECTION, COMPUTES, ELSEWHERE = 3, 4, 8  # of COPY; the lowest bits are the index in DIRECTIONS
DIRECTIONS: Final[tuple[CopyDirection, ...]] = ("h2d", "d2h", "d2d", "p2p")
UNKNOWN_COMMUNICATOR, OF_THE_GROUP, OF_A_PEER = range(3)
"""The lower half of a SPAN's `y`: the peer and `OF_A_PEER` where a pair has a communicator; the upper half is 1 + the
number of the launch that it was part of."""
UNTIMED: Final = {
    1: "the device has no stream left to time them on",
    2: (
        "they take lists of tensors and were launched together with others, and only the caller's own wait may release "
        "the tensors in which the backend stacks such lists"
    ),
}
"""Why a SPAN has no end, by its flags."""
STEP_PHASES: Final = ("train", "compute_only", "comm_only")
NOT_COUNTED: Final = -(1 << 62)
"""`issued` of a SUMMARY where a backend keeps no count."""
NO_DTYPE: Final = 0xFF
MOST_TEXTS: Final = 0xFFFF
OTHERS: Final = "(more names)"
"""Stands for texts for which there is no space."""


class RingOperator(NamedTuple):
    """An operator, by its number."""

    kind: str
    point_to_point: bool


class RingGroup(NamedTuple):
    """A process group, by its number: how many of its collectives the backend runs at once, whether that counts sends
    and receives, and its global ranks, by rank within the group; empty where there is no space for them.
    """

    name: str
    lanes: int
    counts_point_to_point: bool
    ranks: tuple[Rank, ...] = ()


_OTHER_GROUPS: Final = RingGroup(OTHERS, 1, False)


class RingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a rank runs, of its record: also names of the numbers in rows.

    Attributes:
        stall_cutoff_ns: length up to which a backend's call only handed a collective over.
        no_values: why loss and norm of gradients say nothing, if so.
        no_copies: why copies are not looked at, if they are not.
        anchor_interval: training steps from one reading of the clocks to the next in the record, where another process
            may make the lines of this ring; None: the rank alone does.
        bound_ns: how long an idle device takes to reach what the host has just handed over; None: there is no device.
        times_spans: spans of the loop (optimizer, loss read) are timed; on a device compiled code alone does that.
    """

    rank: Rank
    world_size: Integer
    anchor: ClockReading
    stall_cutoff_ns: Integer
    no_copies: str | None
    no_values: str | None
    operators: tuple[RingOperator, ...]
    dtypes: tuple[str, ...]
    anchor_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None
    bound_ns: Integer | None = None
    times_spans: bool = True


_in_memory: Final[list[mmap.mmap]] = []
"""Rings without a file, kept to the end: compiled code may store the end of a collective in one after the recording."""


class _Word:
    """A word of the first page, as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, ring: RingFile, _owner: type[RingFile] | None = None) -> int:
        return ring._words[self._index]

    def __set__(self, ring: RingFile, number: int) -> None:
        ring._words[self._index] = number


class RingFile:
    """A ring, mapped. Texts and groups are the training thread's alone to add.

    Attributes:
        path: None: it is in memory, and ends with the process.
        memory: all of it, as bytes.
        file: its descriptor in the process that made it, which holds a lock on it; -1 where it is in memory.
        process: whose it is; None: nobody said.
        progress: for the process that made it.
        facts: what `describe` said.
        count: how many rows were appended; `steps_ended`: how many steps have ended.
        read: the index of the first row that is not in the record yet.
        owner: the process that makes lines of its rows, and writes to the record; or `progress.NOBODY`, `GIVEN_UP`.
        is_whole: whether all that its rows tell is in the record: who completes records leaves it alone from then on.
    """

    count, steps_ended = _Word(layout.COUNT_WORD), _Word(layout.DONE_WORD)
    read, owner, is_whole = _Word(layout.READ_WORD), _Word(layout.OWNER_WORD), _Word(layout.WHOLE_WORD)
    facts: RingFacts

    def __init__(self, memory: mmap.mmap, path: Path | None = None, file: int = -1) -> None:
        self.path, self.file = path, file
        self.memory = memoryview(memory)
        self._words = self.memory[: layout.PAGE].cast("q")
        self.slots = self._words[layout.SLOTS_WORD]
        self.progress = Progress(self._words, path)
        self.process: ProgressFacts | None = None
        self._rows: NDArray[Any] = np.frombuffer(memory, ROW, self.slots, layout.ROWS_AT)
        self._listed: dict[str | RingGroup, int] = {}
        self._names: list[Any] = [None]
        self._names_read = 0
        self._mapped_by = os.getpid()

    @classmethod
    def create(cls, path: Path | None, process: ProgressFacts | None = None, slots: int = layout.SLOTS) -> RingFile:
        """Create a new file in place of an older one, with all of its space reserved: on a full disk a later store
        would end the process.

        Raises:
            OSError: it cannot be created or reserved, or its file system maps no files.
        """
        size = layout.ROWS_AT + slots * ROW.itemsize
        if path is None:
            _in_memory.append(memory := mmap.mmap(-1, size))
            return cls._made(memory, -1, process, slots, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:  # an older one may be mapped by another process
            file = above_streams(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            try:
                os.posix_fallocate(file, 0, size)
                with suppress(OSError):  # where the disk has no locks, nobody else touches a ring
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls._made(mmap.mmap(file, size), file, process, slots, path)
            except OSError:
                os.close(file)
                raise

    @classmethod
    def _made(
        cls, memory: mmap.mmap, file: int, process: ProgressFacts | None, slots: int, path: Path | None
    ) -> RingFile:
        words = memoryview(memory).cast("q")
        words[layout.VERSION_WORD], words[layout.SLOTS_WORD] = layout.VERSION, slots
        memory[: len(layout.MAGIC)] = layout.MAGIC
        ring = cls(memory, path, file)
        if process is not None:
            ring.process = process
            ring._say(process, layout.PROCESS_WORD, layout.PAGE, layout.FACTS_AT)
        ring.progress.begin_step(layout.NOWHERE)
        ring.progress.enter("none")
        if file >= 0:
            OF_THIS_PROCESS.add(file)
        ring._list(OTHERS)
        ring._list(_OTHER_GROUPS)
        return ring

    @classmethod
    def open(cls, path: Path) -> RingFile:
        """Map a ring for reading its rows, and for saying what of them is in the record.

        Raises:
            OSError: it cannot be read or mapped, or is no file of its own (`files.open_own`).
            UnreadableProgress: as `RingHead`, or it says nothing of rows yet.
        """
        with open_own(path, existing=True) as file:
            head = RingHead(path, file)
            ring = cls(mmap.mmap(file.fileno(), head.size), path)
        if (facts := head.of_rows()) is None:
            raise UnreadableProgress(f"{path}: says nothing of rows")
        ring.facts = facts
        if head.words[layout.PROCESS_WORD]:
            ring.process = head.process()
        return ring

    def describe(self, facts: RingFacts) -> None:
        """Say what rows mean; before the first one."""
        self.facts = facts
        self._say(facts, layout.FACTS_WORD, layout.FACTS_AT, layout.NAMES_AT)

    def _say(self, facts: msgspec.Struct, word: int, start: int, stop: int) -> None:
        encoded = msgspec.json.encode(facts)
        if len(encoded) > stop - start:
            raise OSError(f"the facts of a rank take {len(encoded)} bytes")
        self.memory[start : start + len(encoded)] = encoded
        self._words[word] = len(encoded)

    def close(self) -> None:
        """Give up the descriptor; of rows that are in the record (`is_whole`), or of which there are none, nothing
        stays but the newest collectives. What is mapped here stays.
        """
        if self.file < 0 or os.getpid() != self._mapped_by:
            return
        if self.is_whole or not self._words[layout.FACTS_WORD]:
            self.keep_progress()
        OF_THIS_PROCESS.discard(self.file)
        os.close(self.file)
        self.file = -1

    def keep_progress(self) -> None:
        """Put a small file in its place, with the newest collectives for an autopsy of a run that has ended. Where that
        cannot be written, all of it stays.
        """
        assert self.path is not None  # it has a file
        rows, _ = self.rows_since(0)
        kept = rows[rows["kind"] == COLLECTIVE][-layout.KEPT :]
        kept["stamp"] = np.arange(1, len(kept) + 1)
        small = bytearray(layout.ROWS_AT + layout.KEPT * ROW.itemsize)
        small[: layout.ROWS_AT] = self.memory[: layout.ROWS_AT]
        small[layout.ROWS_AT : layout.ROWS_AT + kept.nbytes] = kept.tobytes()
        words = memoryview(small)[: layout.PAGE].cast("q")
        words[layout.SLOTS_WORD], words[layout.COUNT_WORD], words[layout.WHOLE_WORD] = layout.KEPT, len(kept), 1
        with suppress(OSError):
            write_whole(self.path, bytes(small))

    # --- names -------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Return the number of a text, which is listed if it is new."""
        return self._listed.get(text) or self._list(text, self._listed[OTHERS])

    def group(self, group: RingGroup) -> int:
        """Return the number of a group, likewise."""
        return self._listed.get(group) or self._list(group, self._listed[_OTHER_GROUPS])

    def _list(self, name: str | RingGroup, others: int = 0) -> int:
        """Return the number of a new name, or of `others` where there is no space for it, or in a forked child."""
        line, used = msgspec.json.encode(name) + b"\n", self._words[layout.TEXTS_WORD]
        if isinstance(name, RingGroup) and used + len(line) > _RANKS_UNTIL:
            line = msgspec.json.encode(name._replace(ranks=())) + b"\n"
        full = layout.NAMES_AT + used + len(line) > layout.ROWS_AT or len(self._listed) >= MOST_TEXTS
        if full or os.getpid() != self._mapped_by:
            return others
        self.memory[layout.NAMES_AT + used : layout.NAMES_AT + used + len(line)] = line
        self._words[layout.TEXTS_WORD] = used + len(line)
        number = self._listed[name] = len(self._listed) + 1
        return number

    def names(self) -> list[Any]:
        """Return what each number stands for: a text, or the fields of a group."""
        size = self._words[layout.TEXTS_WORD]
        if size > self._names_read:
            lines = bytes(self.memory[layout.NAMES_AT + self._names_read : layout.NAMES_AT + size]).splitlines()
            self._names += [msgspec.json.decode(line) for line in lines]
            self._names_read = size
        return self._names

    # --- rows --------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Where it is mapped here."""
        return int(self._rows.ctypes.data) - layout.ROWS_AT

    @property
    def written(self) -> tuple[int, int]:
        """How many steps another process has written to the record, and when the last of them began."""
        return self._words[layout.STEPS_WORD], self._words[layout.LAST_WORD]

    def note_written(self, read: int, steps: int = 0, last_start_ns: int = 0) -> None:
        """Say which row is the first that is not in the record yet; `steps`, `last_start_ns`: as in `written`."""
        self._words[layout.STEPS_WORD], self._words[layout.LAST_WORD] = steps, last_start_ns
        self._words[layout.READ_WORD] = read

    def rows_since(self, first: int) -> tuple[NDArray[Any], int]:
        """Return a copy of the rows from `first` on, as far as they were not overwritten, and the index of the first.
        Rows that are being written have kind 0; a step that ended before the copy has all of its rows in it as they are
        then, and one that ends meanwhile has not ended.
        """
        first = max(first, self.count - self.slots)
        looked = np.arange(first, self.count) % self.slots
        ends = self._rows["b"][looked]
        count = self.count
        first, ends = max(first, count - self.slots), ends[max(count - self.slots - first, 0) :]
        slot = np.arange(first, count) % self.slots
        rows = self._rows[slot]
        stamps = np.arange(first + 1, count + 1, dtype=np.uint64)
        # Looked at again: what was overwritten while it was copied has another stamp by now.
        changed = np.flatnonzero((rows["stamp"] > stamps) | (self._rows["stamp"][slot] > stamps))
        lost = int(changed[-1]) + 1 if len(changed) else 0
        rows["kind"][rows["stamp"] != stamps] = 0
        rows["b"][len(ends) :][rows["kind"][len(ends) :] == STEP] = 0
        ended = rows["b"][: len(ends)]
        ended[(rows["kind"][: len(ends)] == STEP) & (ended != ends)] = 0
        return rows[lost:], first + lost


class Part:
    """Rows of one kind in steps that are taken together, and the steps that they belong to, both in order.

    Args:
        step: of each row, as an index in `begin`.
        begin: of each step, in nanoseconds of the clock.
    """

    def __init__(self, rows: NDArray[Any], step: NDArray[np.int64], begin: NDArray[np.int64]) -> None:
        self.rows, self.step, self._begin = rows, step, begin

    @cached_property
    def _cut(self) -> list[int]:
        """Where the rows of each step begin."""
        return np.searchsorted(self.step, np.arange(len(self._begin) + 1)).tolist()  # type: ignore[no-any-return]

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Part:
        return Part(self.rows[chosen], self.step[chosen], self._begin)

    def columns(self, *names: str) -> zip[tuple[Any, ...]]:
        return zip(*(self.rows[name].tolist() for name in names), strict=True)

    def offsets(self, name: str) -> list[int]:
        """Return a column of times as nanoseconds from the begin of its step."""
        return (self.rows[name] - self.begins()).tolist()  # type: ignore[no-any-return]

    def begins(self) -> NDArray[np.int64]:
        """Return when the step of each row began."""
        return self._begin[self.step]

    def named(self, name: str, texts: Sequence[str]) -> list[str]:
        """Return the texts whose numbers are in a column."""
        return [texts[number] for number in self.rows[name].tolist()]

    def of(self, step: int) -> slice:
        """Return where the rows of a step are."""
        return slice(self._cut[step], self._cut[step + 1])

    def rows_of(self, step: int) -> NDArray[Any]:
        return self.rows[self.of(step)]
