"""Where a rank is in its loop, and what it has issued, by its ring: while it runs, is stuck, or is dead.

    progress = RingFile.create(path, process=facts).progress    # in the rank
    with progress.phase("checkpoint"):
        ...
    seen = read_progress(path)                  # anywhere on the host, also while the rank is stuck or dead

`progress/rank_<rank>.bin` in the run's folder is mapped into the rank's memory (`aorta.records.ring_file`): the rank
only stores there, and the kernel keeps the pages when it is killed, stopped, or holds the interpreter lock, so that
nobody in the rank has to answer. Step and phase are words of the first page, which compiled code stores
(`instrument/native/ring.hpp`); the collectives are rows. Times are nanoseconds of CLOCK_MONOTONIC, the clock of
`time.perf_counter_ns`.

Step and phase are one word, which repeats the lowest bits of the word for the time since when: so a reader sees that
they are torn. Must not import torch, load numpy before rows are read, wait for anything, or raise into a training loop
once the file is there.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, NamedTuple

import msgspec

from aorta.records.files import decode_json, open_regular
from aorta.records.schema import WORLD_LIMIT, Integer, Rank

if TYPE_CHECKING:  # loads numpy
    from numpy.typing import NDArray

    from aorta.records.ring_file import RingFacts, RingGroup

PROGRESS_DIR: Final = "progress"
PROGRESS_FILE: Final = "rank_{rank}.bin"
STACKS_FILE: Final = "rank_{rank}.stacks"
"""Where the rank's faulthandler writes its stacks, when it is asked to by a signal or dies by one."""
MAGIC: Final = b"AORTARNG"
VERSION: Final = 4
PHASES: Final = (
    *("none", "step", "data", "forward", "backward", "pipeline", "optimizer", "clip", "loss_read"),
    *("checkpoint", "evaluation", "baseline", "trace", "closing", "paused"),
)
ANNOUNCED: Final = frozenset({"checkpoint", "evaluation", "baseline", "trace", "closing"})
"""Phases that may take much longer than a step."""
KEPT: Final = 1024
"""The newest collectives of a rank, which are evidence, and stay when its rows are in the record."""
NOWHERE: Final = -1
"""In place of a step before the first."""
NOBODY: Final = 0
GIVEN_UP: Final = -1
"""Owners of a ring that are no process: nobody makes its lines yet; the process that did no longer does."""
NO_PEER: Final = 0xFFFF_FFFF
"""The lower half of a collective's `b2` where it has no peer, or none is known."""

# The first page, in words of 64 bits, and what is behind it, in bytes.
WORD: Final = 8
VERSION_WORD, SLOTS_WORD, PROCESS_WORD, FACTS_WORD = 1, 2, 3, 4
COUNT_WORD, MOVED_WORD, LOOKED_WORD = 64, 65, 66
READ_WORD, TEXTS_WORD, OWNER_WORD, STEPS_WORD, LAST_WORD = 72, 80, 88, 96, 97
STATE_WORD, SINCE_WORD, DONE_WORD, ENDED_WORD, EXIT_WORD, WHOLE_WORD = range(104, 110)
PAGE: Final = 1024
FACTS_AT, NAMES_AT, ROWS_AT = 8192, 16_384, 262_144
ROW_BYTES: Final = 64
SLOTS: Final = 65_536
"""How many rows a ring has, at most: a power of two."""
_STEP_SHIFT, _PHASE_SHIFT, _SINCE_MASK = 24, 16, 0xFFFF
"""Of the word of the state, from the highest bits on: the step; 8 bits of the phase's number; 16 bits of the time."""
LAYOUT: Final = (STATE_WORD, SINCE_WORD, DONE_WORD, _STEP_SHIFT, _PHASE_SHIFT, _SINCE_MASK)
"""As compiled code is told."""
_TRIES: Final = 10
_RETRY_S: Final = 0.001
_CHUNK: Final = 4096


class ProgressFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a rank runs, of the rank and its process.

    Attributes:
        start_ticks: of the process, as field 22 of /proc/PID/stat; tells a process from a later one of the same pid.
        pid_namespace: in which the process has that pid; 0 where it is not known.
        warmup_steps: first steps, whose pace says nothing about later ones.
        main_thread: identity of the thread that trains, as faulthandler prints it.
        stack_signal: makes the rank's faulthandler write its main thread's stack; None: none is registered.
        error_file: in which torchrun's workers leave their exception; None: there is none.
        phases: names of the numbers in the file.
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
    warmup_steps: Integer
    phases: tuple[str, ...] = PHASES
    main_thread: Integer | None = None
    stack_signal: Integer | None = None
    error_file: str | None = None


class ProgressCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, or one send or receive, as it was issued.

    Attributes:
        group: None where it is not listed.
        number: counts those of the group; of send and receive those with this peer in this direction.
        peer: rank within the group.
        on_device: its tensors are on a device, which is asked whether it has begun and completed it.
        is_unmarked: it is on a device that is not asked, as in steps that are not observed.
        has_begun: it is known that the device has begun it.
        has_completed: it is known that it has completed.
        completed_ns: when, None: that is not known.
    """

    group: RingGroup | None
    number: int
    kind: str
    dtype: str | None
    bytes: int
    peer: int | None
    issued_ns: int
    on_device: bool
    is_unmarked: bool
    has_begun: bool
    has_completed: bool
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
    """A ring as read at one moment.

    Attributes:
        collectives: the newest that the rank has issued, the oldest first. Of older ones nothing is known.
        looked_ns: when the device was looked at last, while the loop stood still; None: never. What it had begun and
            completed by then is known.
        overwritten: names of groups, where there are fewer than `KEPT` collectives because rows were overwritten.
        torn: what could not be read, if anything.
    """

    facts: ProgressFacts
    state: ProgressState
    groups: tuple[RingGroup, ...]
    collectives: tuple[ProgressCollective, ...]
    looked_ns: int | None
    overwritten: tuple[str, ...]
    torn: str | None


class UnreadableProgress(ValueError):
    """A file is no ring, of another version, or too short."""


class Progress:
    """The writer: step and phase are the training thread's alone to store.

    Args:
        words: the first page of a ring.
        path: of its file; None: nobody sees it.
    """

    enter: Callable[[str], str]
    """Note that a phase begins; returns the one it interrupts. A name that is not in `PHASES` changes nothing. May be
    set to a compiled function that does the same."""
    exit_code = 0
    """Of the recorded part of the program, if no error ends it."""

    def __init__(self, words: memoryview, path: Path | None) -> None:
        self.path, self._words = path, words
        self.enter = self._enter

    def begin_step(self, step: int) -> None:
        self._note(step, "step")

    def end_step(self) -> None:
        """End the open step, and count it."""
        self._words[DONE_WORD] += 1
        self.enter("none")

    def _enter(self, phase: str) -> str:
        if phase not in PHASES:
            return phase
        state = self._words[STATE_WORD]
        self._note(state >> _STEP_SHIFT, phase)
        return PHASES[state >> _PHASE_SHIFT & 0xFF]

    def _note(self, step: int, phase: str) -> None:
        # Two stores, each of a whole word: a step enters a dozen phases, with cold caches.
        now_ns, words = time.perf_counter_ns(), self._words
        words[SINCE_WORD] = now_ns
        words[STATE_WORD] = step << _STEP_SHIFT | PHASES.index(phase) << _PHASE_SHIFT | now_ns & _SINCE_MASK

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note a phase, a `with` block; afterwards the one before it continues. After an error it stays: for whoever
        asks where that happened.
        """
        before = self.enter(name)
        yield
        self.enter(before)

    def leave(self) -> None:
        """In a forked child: note nothing in the ring any more, which is the parent's."""
        self._words = memoryview(bytearray(PAGE)).cast("q")
        self.enter = self._enter

    def end(self, exit_code: int) -> None:
        """Note that the rank leaves the recorded part of its program."""
        self._words[EXIT_WORD] = exit_code
        self._words[ENDED_WORD] = 1


class ProgressWatch:
    """A ring whose first page is looked at again and again. It is not mapped: a mapping ends the process that reads
    behind the end of a file which somebody has cut off.

    Raises:
        OSError, UnreadableProgress: as `read_progress`.
    """

    def __init__(self, path: Path) -> None:
        file = open_regular(path, buffering=0)
        weakref.finalize(self, file.close)
        head = RingHead(path, file)
        self._words, self._file, self.facts = head.words, file.fileno(), head.process()

    def state(self) -> ProgressState:
        """Return the state as it is now, or the last one that could be read; step and phase may be of two moments that
        follow each other closely.
        """
        with suppress(OSError):
            if len(now := os.pread(self._file, PAGE, 0)) == PAGE:
                self._words = memoryview(now).cast("q")
        return _state(self._words, self.facts)


def read_progress(path: Path) -> ProgressSeen:
    """Return what a ring says now. What is being written meanwhile is read again, and named in `torn` where that does
    not help.

    Raises:
        OSError: it cannot be read.
        UnreadableProgress: it is no ring, of another version, or too short.
    """
    for _ in range(_TRIES):
        with open_regular(path, buffering=0) as file:
            seen = _seen(path, file)
        if seen.torn is None:
            break
        time.sleep(_RETRY_S)
    return seen


def progress_files(run_folder: Path) -> list[Path]:
    """Return the rings of a run, by rank; empty where there are none."""
    try:
        paths = list((run_folder / PROGRESS_DIR).glob("rank_*.bin"))
    except OSError:
        return []
    numbered = [(path.stem.removeprefix("rank_"), path) for path in paths]
    ranked = sorted((int(number), path) for number, path in numbered if number.isdecimal())
    return [path for rank, path in ranked if rank < WORLD_LIMIT]


def may_have_unread_rows(path: Path) -> bool:
    """Return whether rows of a file may lack in the record, as far as its first page says. Never raises."""
    try:
        with open_regular(path, buffering=0) as file:
            page = file.read(PAGE)
    except OSError:
        return True
    words = memoryview(page).cast("q") if len(page) == PAGE and page.startswith(MAGIC) else None
    return words is None or (words[WHOLE_WORD] == 0 and words[FACTS_WORD] != 0)


class RingHead:
    """What stands in a ring before its rows, as a file has it.

    Attributes:
        slots: how many rows the ring has; `size`: how many bytes.

    Raises:
        UnreadableProgress: it is no ring, of another version, or too short.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        data, size = file.read(ROWS_AT), os.fstat(file.fileno()).st_size
        if not data.startswith(MAGIC) and len(data) >= len(MAGIC):
            raise UnreadableProgress(f"{path}: is not a progress file")
        if len(data) < ROWS_AT:
            raise UnreadableProgress(f"{path}: is not a progress file, or is cut off: {len(data)} bytes of {ROWS_AT}")
        words = memoryview(data)[:PAGE].cast("q")
        version, slots = words[VERSION_WORD], words[SLOTS_WORD]
        if version != VERSION or not 0 < slots <= SLOTS or slots & (slots - 1):
            raise UnreadableProgress(
                f"{path}: version {version} with {slots} slots; this AORTA reads version {VERSION}"
            )
        self.size = ROWS_AT + slots * ROW_BYTES
        if size < self.size:
            raise UnreadableProgress(f"{path}: is cut off: {size} bytes of {self.size}")
        self.words, self.slots, self.data, self._path = words, slots, data, path

    def process(self) -> ProgressFacts:
        """Return whose it is.

        Raises:
            UnreadableProgress: its facts cannot be read, or there are none.
        """
        text = self.data[PAGE : PAGE + self.words[PROCESS_WORD]]
        try:
            return decode_json(text, msgspec.json.Decoder(ProgressFacts))
        except ValueError as error:
            raise UnreadableProgress(f"{self._path}: its facts cannot be read: {error}") from error

    def of_rows(self) -> RingFacts | None:
        """Return what rows mean; None: nobody said.

        Raises:
            ValueError: it cannot be read.
        """
        from aorta.records.ring_file import RingFacts

        text = self.data[FACTS_AT : FACTS_AT + self.words[FACTS_WORD]]
        return decode_json(text, msgspec.json.Decoder(RingFacts)) if text else None


def _seen(path: Path, file: BinaryIO) -> ProgressSeen:
    from aorta.records.ring_file import OTHERS, RingGroup

    head, torn = RingHead(path, file), list[str]()
    process, words, groups, facts = head.process(), head.words, dict[int, RingGroup](), None
    listed, decoder = head.data[NAMES_AT : NAMES_AT + words[TEXTS_WORD]], msgspec.json.Decoder(RingGroup)
    try:
        for number, line in enumerate(listed.splitlines(), start=1):
            if line.startswith(b"["):
                group = decode_json(line, decoder)
                if group.name != OTHERS:
                    groups[number] = group
        facts = head.of_rows()
    except ValueError as error:
        torn.append(f"groups: {error}")
    rows, lost = _newest(file, words[COUNT_WORD], head.slots)
    if lost:
        torn.append(f"{lost} of the newest rows: they were being written")
    overwritten = words[COUNT_WORD] > head.slots and len(rows) < KEPT
    if (words[STATE_WORD] ^ words[SINCE_WORD]) & _SINCE_MASK:
        torn.append("step and phase: they were being written")
    return ProgressSeen(
        facts=process,
        state=_state(words, process),
        groups=tuple(group for group in groups.values() if group.ranks),
        collectives=() if facts is None else _collectives(rows, facts, groups),
        looked_ns=words[LOOKED_WORD] or None,
        overwritten=tuple(group.name for group in groups.values()) if overwritten else (),
        torn="; ".join(torn) or None,
    )


def _state(words: memoryview, facts: ProgressFacts) -> ProgressState:
    both = words[STATE_WORD]
    return ProgressState(
        step=None if both >> _STEP_SHIFT == NOWHERE else both >> _STEP_SHIFT,
        phase=_name(facts.phases, both >> _PHASE_SHIFT & 0xFF) or "none",
        phase_since_ns=words[SINCE_WORD],
        steps_done=words[DONE_WORD],
        progress_ns=max(words[SINCE_WORD], words[MOVED_WORD]),
        exit_code=words[EXIT_WORD] if words[ENDED_WORD] else None,
    )


def _newest(file: BinaryIO, count: int, slots: int) -> tuple[NDArray[Any], int]:
    """Return the newest `KEPT` collectives among the first `count` rows, the oldest first, and how many of the rows
    that were looked at were being written.
    """
    import numpy as np

    from aorta.records.ring_file import COLLECTIVE, ROW

    chunk, stop, first = min(_CHUNK, slots), count, max(0, count - slots)
    parts, left, lost = [np.zeros(0, ROW)], KEPT, 0
    while stop > first and left > 0:
        start = max(first, (stop - 1) // chunk * chunk)
        size, begin = (stop - start) * ROW_BYTES, ROWS_AT + start % slots * ROW_BYTES
        rows, again = (np.frombuffer(os.pread(file.fileno(), size, begin), ROW) for _ in range(2))
        stamps = np.arange(start + 1, stop + 1, dtype=np.uint64)
        if not len(rows) == len(again) == len(stamps):  # it has been cut off
            return parts[0], count - first
        is_there = (rows["stamp"] == stamps) & (again["stamp"] == stamps)
        # What was overwritten meanwhile is not torn: nothing is known of rows that are so old.
        lost += int((~is_there & (rows["stamp"] <= stamps) & (again["stamp"] <= stamps)).sum())
        chosen = rows[is_there & (rows["kind"] == COLLECTIVE)][-left:]
        parts.insert(0, chosen)
        stop, left = start, left - len(chosen)
    return np.concatenate(parts), lost


def _collectives(rows: NDArray[Any], facts: RingFacts, groups: dict[int, RingGroup]) -> tuple[ProgressCollective, ...]:
    from aorta.records.ring_file import BEGUN, DONE, ON_DEVICE, UNMARKED

    collectives = []
    columns = [rows[name].tolist() for name in ("flags", "op", "dtype", "group", "a", "b", "x", "y", "b2")]
    for flags, op, dtype, group, issued_ns, both, size, number, pair in zip(*columns, strict=True):
        kind, point_to_point = facts.operators[op] if op < len(facts.operators) else ("unknown", False)
        collectives.append(
            ProgressCollective(
                group=groups.get(group),
                number=pair >> 32 if point_to_point else number,
                kind=kind,
                dtype=_name(facts.dtypes, dtype),
                bytes=size,
                peer=pair & 0xFFFF_FFFF if point_to_point and pair & 0xFFFF_FFFF != NO_PEER else None,
                issued_ns=issued_ns,
                on_device=bool(flags & ON_DEVICE),
                is_unmarked=bool(flags & UNMARKED),
                has_begun=bool(flags & (BEGUN | DONE)),
                has_completed=bool(both or flags & DONE),
                completed_ns=both >> 1 if both else None,
            )
        )
    return tuple(collectives)


def _name(names: Sequence[str], number: int) -> str | None:
    return names[number] if 0 <= number < len(names) else None
