"""Rows of what happened on one rank, in a file mapped into its memory: `progress/ring_<rank>.bin` in the run's folder.

    ring = RingFile.create(path, facts)       # in the rank; rows are appended by compiled code (`native/ring.hpp`), or
                                              # by Python (`ring_rows.py`)
    ring.text("optimizer")                    # its number, for rows
    rows, first = ring.rows_since(index)      # anywhere: what happened since, and the index of its first row

Layout: a page of words; facts as JSON; texts and groups as JSON lines, numbered from 1 on; a ring of rows of 64 bytes.
A row's stamp is 0 while it is written, and then 1 + its index, so a reader sees torn and overwritten rows.

    kind           a, b                       x, y                       a2, b2; flags; name
    STEP           begin, end                 global step; behind rows   its first row; epoch, step; facts; why unseen
    SUMMARY        own time; its STEP         issued; outside            ahead before, after; counted; why unclear
    VALUE          when, 0                    a float's bits             ; which
    COLLECTIVE     issue; end * 2 + by wait   bytes; number              end of a long call; peer; group, op, dtype
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

where a COLLECTIVE has twice the end of its SPAN. A step of a device has its end last of all.

A step has the rows from its first one on that stand before what is behind them, and those which name it. Times are
nanoseconds of CLOCK_MONOTONIC, the clock of `time.perf_counter_ns`; an end of 0: not yet. A collective on an emulated
fabric has a LINK as well, which is filled before the collective ends. Must not import torch, or wait for anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.files import OF_THIS_PROCESS, above_streams, decode_json, open_own, whole_file
from aorta.records.schema import ClockReading, CopyDirection, Integer, Rank

MAGIC: Final = b"AORTARNG"
VERSION: Final = 3
SLOTS: Final = 65_536
COUNT_AT: Final = 512
ROWS_AT: Final = 262_144
_READ_AT: Final = 576
_TEXTS_AT: Final = 640
_OWNER_AT, _STEPS_AT, _LAST_AT = 704, 768, 776
NOBODY: Final = 0
GIVEN_UP: Final = -1
"""Owners of a ring that are no process: nobody makes its lines yet; the process that did no longer does."""
_FACTS_AT, _NAMES_AT = 1024, 8192
_WORD: Final = 8

ROW: Final = np.dtype(
    [
        *(("stamp", "<u8"), ("kind", "u1"), ("flags", "u1"), ("op", "u1"), ("dtype", "u1"), ("group", "<u2")),
        *(("name", "<u2"), ("a", "<i8"), ("b", "<i8"), ("x", "<i8"), ("y", "<i8"), ("a2", "<i8"), ("b2", "<i8")),
    ]
)
STEP, COLLECTIVE, WAIT, PASS, TAIL, STALL, AUX, PIPELINE, COMPUTE, RANGE, LEFT_OUT, VALUE, SUMMARY, LINK = range(1, 15)
SPAN, COPY, GAP, JOINED, NOTE = range(15, 20)
# Flags, by kind.
WARMUP, CONTINUES, BLIND, PHASE_SHIFT = 1, 2, 4, 3  # of STEP; the highest bits are the index in PHASES
OWN_COUNTED = 1  # of SUMMARY
BLOCKED, OVER = 1, 2  # of WAIT
BACKWARD = 1  # of PASS
BY_FUTURE, UNWATCHED = 1, 2  # of COLLECTIVE
BY_FABRIC = 1  # of LINK: the emulated fabric set its end
LOSS, GRAD_NORM, LR = range(3)  # of VALUE, and of a NOTE: values that were read later
CAPTURED, NO_COPIES, UNSEEN = range(3, 6)  # of NOTE: what it is about
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
    """A process group, by its number: how many of its collectives the backend runs at once, and whether that counts
    sends and receives.
    """

    name: str
    lanes: int
    counts_point_to_point: bool


_OTHER_GROUPS: Final = RingGroup(OTHERS, 1, False)


class RingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a rank runs: of its record, and the names of the numbers in rows.

    Attributes:
        stall_cutoff_ns: length up to which a backend's call only handed a collective over.
        no_values: why loss and norm of gradients say nothing, if so.
        no_copies: why copies are not looked at, if they are not.
        anchor_interval: training steps from one reading of the clocks to the next in the record, where another process
            may make the lines of this ring; None: the rank alone does.
        bound_ns: how long an idle device takes to reach what the host has just handed over; None: there is no device.
    """

    rank: Rank
    world_size: Integer
    anchor: ClockReading
    stall_cutoff_ns: Integer
    no_copies: str | None
    no_values: str | None
    operators: tuple[RingOperator, ...]
    dtypes: tuple[str, ...]
    boot_id: str
    anchor_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None
    bound_ns: Integer | None = None


_in_memory: Final[list[mmap.mmap]] = []
"""Rings without a file, kept to the end: compiled code may store the end of a collective in one after the recording."""


class UnreadableRing(ValueError):
    """A file is no ring, of another version, or cut off."""


class RingFile:
    """A ring, mapped. Texts and groups are the training thread's alone to add.

    Attributes:
        path: None: it is in memory, and ends with the process.
        file: its descriptor in the process that made it, which holds a lock on it; -1 where it is in memory.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None = None, file: int = -1) -> None:
        self.path, self.file = path, file
        if memory[: len(MAGIC)] != MAGIC:
            raise UnreadableRing(f"{path}: is no ring of rows")
        self._memory = memory
        self._words = memoryview(memory).cast("B")[:_FACTS_AT].cast("q")
        version, self.slots, size = self._words[1:4]
        fits = 0 < self.slots <= SLOTS and len(memory) == ROWS_AT + self.slots * ROW.itemsize
        if version != VERSION or not fits:
            raise UnreadableRing(
                f"{path}: version {version} of {len(memory)} bytes; this AORTA reads version {VERSION}"
            )
        self.facts = decode_json(memory[_FACTS_AT : _FACTS_AT + size], msgspec.json.Decoder(RingFacts))
        self._rows: NDArray[Any] = np.frombuffer(memory, ROW, self.slots, ROWS_AT)
        self._listed: dict[str | RingGroup, int] = {}
        self._names: list[Any] = [None]
        self._names_read = 0
        self._mapped_by = os.getpid()

    @classmethod
    def create(cls, path: Path | None, facts: RingFacts, slots: int = SLOTS) -> RingFile:
        """Create a new file in place of an older one, with all of its space reserved: on a full disk a later store
        would end the process. `slots`: a power of two.

        Raises:
            OSError: it cannot be created or reserved, or its file system maps no files.
        """
        size = ROWS_AT + slots * ROW.itemsize
        if path is None:
            _in_memory.append(memory := mmap.mmap(-1, size))
            return cls._made(memory, -1, facts, slots, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            file = above_streams(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                os.posix_fallocate(file, 0, size)
                with suppress(OSError):  # where the disk has no locks, nobody else touches a ring
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls._made(mmap.mmap(file, size), file, facts, slots, path)
            except OSError:
                os.close(file)
                raise

    @classmethod
    def _made(cls, memory: mmap.mmap, file: int, facts: RingFacts, slots: int, path: Path | None) -> RingFile:
        encoded = msgspec.json.encode(facts)
        if len(encoded) > _NAMES_AT - _FACTS_AT:
            raise OSError(f"the facts of rank {facts.rank} take {len(encoded)} bytes")
        memory[_FACTS_AT : _FACTS_AT + len(encoded)] = encoded
        words = memoryview(memory).cast("q")
        words[1], words[2], words[3] = VERSION, slots, len(encoded)
        memory[: len(MAGIC)] = MAGIC
        if file >= 0:
            OF_THIS_PROCESS.add(file)
        ring = cls(memory, path, file)
        ring._list(OTHERS)
        ring._list(_OTHER_GROUPS)
        return ring

    @classmethod
    def open(cls, path: Path) -> RingFile:
        """Map a ring for reading, and for saying what of it is in the record.

        Raises:
            OSError: it cannot be read or mapped, or is no file of its own (`files.open_own`).
            UnreadableRing: it is none, of another version, or cut off.
        """
        with open_own(path, existing=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= ROWS_AT:
                raise UnreadableRing(f"{path}: is cut off: {size} bytes")
            return cls(mmap.mmap(file.fileno(), size), path)

    def close(self, *, remove: bool) -> None:
        """Give up the descriptor, and the file if `remove`; what is mapped stays."""
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)
        if self.file >= 0:
            OF_THIS_PROCESS.discard(self.file)
            os.close(self.file)
            self.file = -1

    # --- names -------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Return the number of a text, which is listed if it is new."""
        return self._listed.get(text) or self._list(text, self._listed[OTHERS])

    def group(self, group: RingGroup) -> int:
        """Return the number of a group, likewise."""
        return self._listed.get(group) or self._list(group, self._listed[_OTHER_GROUPS])

    def _list(self, name: str | RingGroup, others: int = 0) -> int:
        """Return the number of a new name, or of `others` where there is no space for it, or in a forked child."""
        line, used = msgspec.json.encode(name) + b"\n", self._words[_TEXTS_AT // _WORD]
        full = _NAMES_AT + used + len(line) > ROWS_AT or len(self._listed) >= MOST_TEXTS
        if full or os.getpid() != self._mapped_by:
            return others
        self._memory[_NAMES_AT + used : _NAMES_AT + used + len(line)] = line
        self._words[_TEXTS_AT // _WORD] = used + len(line)
        number = self._listed[name] = len(self._listed) + 1
        return number

    def names(self) -> list[Any]:
        """Return what each number stands for: a text, or the fields of a group."""
        size = self._words[_TEXTS_AT // _WORD]
        if size > self._names_read:
            lines = self._memory[_NAMES_AT + self._names_read : _NAMES_AT + size].splitlines()
            self._names += [msgspec.json.decode(line) for line in lines]
            self._names_read = size
        return self._names

    # --- rows --------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> memoryview:
        """All of it, as bytes."""
        return memoryview(self._memory)

    @property
    def address(self) -> int:
        """Where it is mapped here."""
        return int(self._rows.ctypes.data) - ROWS_AT

    @property
    def count(self) -> int:
        """How many rows were appended."""
        return self._words[COUNT_AT // _WORD]

    @property
    def read(self) -> int:
        """The index of the first row that is not in the record yet."""
        return self._words[_READ_AT // _WORD]

    @property
    def written(self) -> tuple[int, int]:
        """How many steps another process has written to the record, and when the last of them began."""
        return self._words[_STEPS_AT // _WORD], self._words[_LAST_AT // _WORD]

    def note_written(self, read: int, steps: int = 0, last_start_ns: int = 0) -> None:
        """Say which row is the first that is not in the record yet; `steps`, `last_start_ns`: as in `written`."""
        self._words[_STEPS_AT // _WORD], self._words[_LAST_AT // _WORD] = steps, last_start_ns
        self._words[_READ_AT // _WORD] = read

    @property
    def owner(self) -> int:
        """The process that makes lines of its rows, and writes to the record; or `NOBODY`, `GIVEN_UP`."""
        return self._words[_OWNER_AT // _WORD]

    @owner.setter
    def owner(self, process: int) -> None:
        self._words[_OWNER_AT // _WORD] = process

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
        at = np.arange(first, count) % self.slots
        rows = self._rows[at]
        stamps = np.arange(first + 1, count + 1, dtype=np.uint64)
        # Looked at again: what was overwritten while it was copied has another stamp by now.
        changed = np.flatnonzero((rows["stamp"] > stamps) | (self._rows["stamp"][at] > stamps))
        lost = int(changed[-1]) + 1 if len(changed) else 0
        rows["kind"][rows["stamp"] != stamps] = 0
        rows["b"][len(ends) :][rows["kind"][len(ends) :] == STEP] = 0
        ended = rows["b"][: len(ends)]
        ended[(rows["kind"][: len(ends)] == STEP) & (ended != ends)] = 0
        return rows[lost:], first + lost
