"""A what-if as a timeline for Perfetto: each rank as it was measured, and beside it as it is replayed.

    rank 0                                       steps, compute, aux, hand-over, waits, collectives of each group
    rank 0, what if: network.bandwidth=x2        the same tracks

The chosen step begins at the same moment in both, counted from the rank that begins it first; the steps before and
behind it are shown as far as they are replayed. Must not decide when anything happens, or change what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.load import microseconds
from aorta.analysis.merge.trace_writer import PIDS_PER_RANK, TIDS_PER_RANK, named_process, named_thread, trace_file
from aorta.analysis.merge.tracks import CATEGORY
from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.tables import RankTables, Run
from aorta.analysis.whatif.program import RunProgram, What
from aorta.analysis.whatif.read_program import clock_offsets, contents_at
from aorta.analysis.whatif.replay import Times, replay, span_edges

_TRACKS: Final = ("steps", "compute", "aux", HAND_OVER, "waits")
_STEPS_AROUND: Final = 1
_EARLIER: Final = 2
"""A wait may be for a collective of that many steps ago."""


class Slice(NamedTuple):
    """One event of a rank, in nanoseconds on the common clock."""

    track: str
    name: str
    begin_ns: int
    end_ns: int
    about: dict[str, Any]


def shown_steps(program: RunProgram, index: int) -> range:
    """Return the indices of the steps that are shown round the chosen one."""
    return range(max(index - _STEPS_AROUND, 0), min(index + _STEPS_AROUND + 1, len(program.steps)))


def replayed(program: RunProgram, times: Times, index: int, column: int) -> list[Slice]:
    """Return one step of one rank as it is replayed."""
    step, kept = program.steps[index], times.kept[index]
    begin, end = int(times.begin_ns[index, column, 0]), int(times.end_ns[index, column, 0])
    found = [Slice("steps", f"step {step.global_step}", begin, end, {"global_step": step.global_step})]
    for number, (low, high) in span_edges(step, kept, column):
        found.append(Slice(program.names[number].lane, str(program.names[number]), low, high, {}))
    layout = program.layouts[step.layouts[column]]
    for place, issued in enumerate(layout.issued):
        low, high = int(kept.begin_ns[place, column, 0]), int(kept.end_ns[place, column, 0])
        found.append(_collective(issued.kind, issued.group, issued.bytes, place, min(low, high), high))
    for number, operation in enumerate(layout.operations):
        if operation.what is What.WAIT and operation.back <= index:
            before = program.steps[index - operation.back]
            kind = program.layouts[before.layouts[column]].issued[operation.place].kind
            low, high = int(kept.enter_ns[number, column, 0]), int(kept.leave_ns[number, column, 0])
            found.append(_wait(kind, operation.place, operation.back, low, high))
    return _in_order(found)


def measured(tables: RankTables, global_steps: Sequence[int], index: int, begin_ns: int) -> list[Slice]:
    """Return one step of one rank as it was recorded.

    Args:
        global_steps: those of the program, of which `index` is this one's.
        begin_ns: when it began, on the common clock.

    Raises:
        InputError: the record can no longer be read.
    """
    steps, rows = tables.steps, tables.collectives
    places = [int(np.searchsorted(steps.global_step, number)) for number in global_steps[: index + 1]]
    inside, known = contents_at(tables, places[index]), dict[tuple[str, int], tuple[str, int, int]]()
    number = global_steps[index]
    length = int(steps.length_ns[places[index]])
    found = [Slice("steps", f"step {number}", 0, length, {"global_step": number})]
    found += [Slice(name.lane, str(name), low, high, {}) for name, low, high in inside.spans]
    for back in range(min(_EARLIER, index), -1, -1):
        these = rows.take(steps.rows_of(places[index - back], places[index - back] + 1))
        for place, row in enumerate(these.name.tolist()):
            name = these.names[row]
            known[name.group, int(these.seq[place])] = name.kind, place, back
            if not back:
                low, high = int(these.start_ns[place]), int(these.end_ns[place])
                found.append(_collective(name.kind, name.group, name.bytes, place, low, high))
    for wait in inside.waits or ():
        if (wait.group, wait.seq) in known:
            found.append(_wait(*known[wait.group, wait.seq], wait.enter_ns, wait.leave_ns))
    return _in_order(
        [each._replace(begin_ns=each.begin_ns + begin_ns, end_ns=each.end_ns + begin_ns) for each in found]
    )


def _collective(kind: str, group: str, size: int, place: int, begin_ns: int, end_ns: int) -> Slice:
    about = {"group": group, "bytes": size, "position": place}
    return Slice(f"collectives {group}", f"{kind} #{place}", begin_ns, end_ns, about)


def _wait(kind: str, place: int, back: int, begin_ns: int, end_ns: int) -> Slice:
    return Slice("waits", f"wait for {kind} #{place}", begin_ns, end_ns, {"issued_steps_ago": back} if back else {})


def _in_order(slices: list[Slice]) -> list[Slice]:
    """Return what took time, in order; of what begins together the longest first, since it holds the others."""
    return sorted(
        (each for each in slices if each.begin_ns < each.end_ns),
        key=lambda each: (each.begin_ns, -each.end_ns, each.track, each.name),
    )


def write_timeline(
    path: Path,
    run: Run,
    program: RunProgram,
    changed: RunProgram,
    changes: Sequence[str],
    index: int,
    *,
    overwrite: bool,
) -> int:
    """Write the steps round one of them, measured and replayed.

    Args:
        program: of the run as it was; `changed`: with the changes made, which are named in `changes`.
        index: of the chosen step.

    Returns:
        Number of events.

    Raises:
        InputError: the file exists and may not be replaced, or cannot be written, or the record cannot be read again.
    """
    shown = shown_steps(program, index)
    times, numbers = replay(changed, set(shown)), [step.global_step for step in program.steps]
    begins = {rank: _begins(run, rank, [numbers[each] for each in shown]) for rank in program.ranks}
    chosen = shown.index(index)
    moved_ns = min(each[chosen] for each in begins.values()) - int(times.begin_ns[index, :, 0].min())
    sides: list[list[list[Slice]]] = []
    for column, rank in enumerate(program.ranks):
        was = [
            each for at, step in enumerate(shown) for each in measured(run.ranks[rank], numbers, step, begins[rank][at])
        ]
        would = [
            each._replace(begin_ns=each.begin_ns + moved_ns, end_ns=each.end_ns + moved_ns)
            for step in shown
            for each in replayed(changed, times, step, column)
        ]
        sides.append([_in_order(was), _in_order(would)])
    zero = min(each.begin_ns for side in sides for slices in side for each in slices)
    words = f"what if: {', '.join(changes)}" if changes else "replayed as it was"
    with trace_file(path, overwrite=overwrite) as file:
        for rank, side in zip(program.ranks, sides, strict=True):
            for which, slices in enumerate(side):
                label = f"rank {rank}, {words}" if which else f"rank {rank}"
                for event in _events(rank, which, label, slices, zero):
                    file.write(event)
        about = {"changes": list(changes), "aligned_at_global_step": numbers[index], "run": run.location}
        file.finish({"displayTimeUnit": "ms", "otherData": about})
    return file.count


def _begins(run: Run, rank: int, numbers: Sequence[int]) -> list[int]:
    """Return when steps of a rank began, on the clock of the program."""
    steps, offsets = run.ranks[rank].steps, clock_offsets(run)
    places = np.searchsorted(steps.global_step, numbers)
    own = steps.start_mono_ns[places] if offsets is None else steps.t_start_ns[places] + offsets[rank]
    return [int(each) for each in own]


def _events(rank: int, which: int, label: str, slices: Sequence[Slice], zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yield events of one process. Slices of a thread are disjoint or nested; others get one more thread."""
    open_ends: defaultdict[str, list[list[int]]] = defaultdict(list)
    placed = [(_thread(open_ends[each.track], each), each) for each in slices]
    tracks = sorted(open_ends, key=lambda name: (_TRACKS.index(name) if name in _TRACKS else len(_TRACKS), name))
    threads = [(name, lane) for name in tracks for lane in range(len(open_ends[name]))]
    pid, first = (rank + 1) * PIDS_PER_RANK + which, (rank + 1) * TIDS_PER_RANK + which * TIDS_PER_RANK // 2
    tids = {thread: first + number for number, thread in enumerate(threads)}
    yield from named_process(pid, label)
    for (name, lane), tid in tids.items():
        yield from named_thread(pid, tid, name.replace("_", "-") + (f" ({lane + 1})" if lane else ""), tid)
    for lane, each in placed:
        times = {"ts": each.begin_ns - zero_ns, "dur": each.end_ns - each.begin_ns}
        yield {
            "ph": "X",
            "cat": CATEGORY,
            "name": each.name,
            "pid": pid,
            "tid": tids[each.track, lane],
            **{key: msgspec.Raw(microseconds.as_text(value)) for key, value in times.items()},
            "args": each.about,
        }


def _thread(open_ends: list[list[int]], each: Slice) -> int:
    """Return the first thread of a track in which a slice fits."""
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= each.begin_ns:
            ends.pop()
        if not ends or ends[-1] >= each.end_ns:
            ends.append(each.end_ns)
            return lane
    open_ends.append([each.end_ns])
    return len(open_ends) - 1
