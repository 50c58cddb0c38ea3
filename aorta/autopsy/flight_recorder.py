"""Reads dumps of torch's Flight Recorder (torch 2.5 to 2.13, NCCL and gloo, pickles and JSON) as evidence.

A file's rank is the number at the end of its name (`comm_lib_trace_rank_3`, `nccl_trace_rank_node02_5`, `rank_3.json`).
A dump that cannot be read is evidence too: `RankEvidence.torn` says why. A dump names no moment at which it was taken,
so nothing here has an age; its file's time says when at the latest, unless it is that of a copy. Must not load torch.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.autopsy.dump_file import Dump, DumpEntry, read_dump
from aorta.autopsy.evidence import (
    DEFAULT_GROUP,
    UNKNOWN_KIND,
    CollectiveEvidence,
    CollectiveState,
    GroupEvidence,
    RankEvidence,
)
from aorta.autopsy.same_job import CLOCKS_NS, TIMEOUT_NS
from aorta.command_line import name_ranks
from aorta.errors import InputError
from aorta.records.files import open_regular
from aorta.records.progress import PROGRESS_DIR
from aorta.records.schema import WORLD_LIMIT

_MOST_NAMED: Final = 8
_RANK: Final = re.compile(r"(?<!\d)(\d{1,7})(?:\.(?:json|pkl|pickle))?$")
_KINDS: Final = {
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_v": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "ALLGATHER_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
}
"""Names that backends of torch give to the kinds of the record; other names are kinds themselves."""
_MESSAGES: Final = ("send ", "recv ")
_GLOO: Final = "gloo"
_UNDESCRIBED: Final = "undefined"
"""torch's description of a group that got none."""
_ITEM_BYTES: Final = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of an element, by torch's name of its type."""


def read_dumps(paths: Sequence[Path]) -> list[RankEvidence]:
    """Read dumps: files, and folders whose files are dumps.

    Raises:
        InputError: there is no dump, a file has no rank in its name, or two speak of one rank.
    """
    dump_files = []
    for path in paths:
        if not path.exists():
            raise InputError(no_evidence(path))
        try:
            inside = sorted(path.rglob("*")) if path.is_dir() else []
        except RecursionError as error:
            raise InputError(f"{path}: its folders lie too deep in each other; give the folder of the dumps") from error
        dump_files += [file for file in inside if file.is_file() and is_dump(file)] if path.is_dir() else [path]
    files: dict[int, Path] = {}
    for path in sorted(dump_files, key=lambda path: (path.suffix == ".json", path)):
        match = _RANK.search(path.name)
        if match is None or int(match[1]) >= WORLD_LIMIT:
            raise InputError(f"{path}: the name of a dump ends with its rank, as comm_lib_trace_rank_3; rename it")
        rank = int(match[1])
        if rank in files and files[rank].stem != path.stem:
            raise InputError(
                f"{files[rank]} and {path}: two dumps of rank {rank}. Names must end with the global rank: "
                "rename them, or give the dumps of one hang"
            )
        files.setdefault(rank, path)
    if not files:
        raise InputError(no_evidence(paths[0]))
    dumps = {rank: read_dump(path) for rank, path in files.items()}
    # Backends number the collectives of a group each for itself.
    backends = Counter(dump.backend for dump in dumps.values() if isinstance(dump, Dump) and dump.entries)
    compared = max(backends, key=lambda backend: backends[backend], default="")
    for rank, dump in dumps.items():
        if isinstance(dump, Dump) and dump.entries and dump.backend != compared:
            dumps[rank] = (
                f"{files[rank].name} is of {dump.backend}, most others are of {compared}: give the dumps of one backend"
            )
    readable = {rank: dump for rank, dump in dumps.items() if isinstance(dump, Dump)}
    # A dump of gloo names no group: of all that is listed, the highest rank is then taken for the job's last.
    listed = [rank for dump in readable.values() for group in dump.pg_config.values() for rank in map(int, group.ranks)]
    named = any(name and config.ranks for dump in readable.values() for name, config in dump.pg_config.items())
    world = max([*files, *listed]) + 1 if listed and not named else None
    whole = not any(dump.entries and (dump.oldest or dump.is_of_unfinished) for dump in readable.values())
    entries = [entry for dump in readable.values() for entry in dump.entries]
    messaging = {str(entry.process_group[0]) for entry in entries if entry.p2p_seq_id}
    # Without TORCH_NCCL_ENABLE_TIMING torch records no event at a collective's start, and says of none that the device
    # has begun it; gloo has no such events.
    begun = any(entry.state == "started" or entry.time_discovered_started_ns for entry in entries)
    # The latest moment at which dumps of one job that hangs were taken: no rank waits longer than its timeout. A later
    # time of a file is that of a copy.
    timeout_ns = max((entry.timeout_ms * 1_000_000 for entry in entries if entry.timeout_ms), default=TIMEOUT_NS)
    issued_ns = max((entry.time_created_ns or 0 for entry in entries), default=0)
    last_ns = issued_ns + timeout_ns + CLOCKS_NS if compared == _GLOO else None
    return [
        RankEvidence(rank=rank, source="flight_recorder", path=str(files[rank]), torn=dump)
        if isinstance(dump, str)
        else _evidence(rank, world, files[rank], dump, whole, begun, messaging, last_ns)
        for rank, dump in sorted(dumps.items())
    ]


def no_evidence(path: Path) -> str:
    """Return what a path without evidence lacks, and which runs are in it or beside it."""
    there = os.path.exists(path)  # noqa: PTH110 - which is no error for a word too long to be a name
    what = "neither a recorded run nor a dump of torch's Flight Recorder" if there else "no such file or folder"
    runs = [
        sorted(str(progress.parent) for progress in folder.glob(f"*/{PROGRESS_DIR}"))
        for folder in ([path, path.parent] if there else [path.parent])
    ]
    names = ", ".join(next(filter(None, runs), [])[:_MOST_NAMED])
    run = f"one of the runs {names}" if names else f"the folder of a recorded run, which holds {PROGRESS_DIR}/"
    return (
        f"{path}: {what}. Give {run}; or dumps of the Flight Recorder, with names that end with the rank, as "
        "comm_lib_trace_rank_3 (docs/autopsy.md: how to write them)"
    )


def is_dump(path: Path) -> bool:
    """Return whether a file looks like a dump: its name ends with a rank, its first byte begins pickle or object."""
    if _RANK.search(path.name) is None:
        return False
    try:
        with open_regular(path) as file:
            return file.read(1) in (b"\x80", b"{", b"")
    except OSError:
        return False


def _evidence(
    rank: int,
    world: int | None,
    path: Path,
    dump: Dump,
    whole: bool,
    begun: bool,
    messaging: set[str],
    last_ns: int | None,
) -> RankEvidence:
    # A process numbers its groups as it makes them, and `pg_config` has them by name.
    made = {str(entry.process_group[0]): entry.pg_id or 0 for entry in reversed(dump.entries)}
    groups = {
        name: _group(name, config.desc, sorted({*map(int, config.ranks)}))
        for name, config in sorted(dump.pg_config.items(), key=lambda item: made.get(item[0], len(made)))
        if name  # gloo lists one without a name, with the ranks of the last group that was made
    }
    of_all = [group.ranks for group in groups.values() if group.description == DEFAULT_GROUP and group.ranks]
    world = of_all[0][-1] + 1 if of_all else world
    for entry in dump.entries:
        name = str(entry.process_group[0])
        groups.setdefault(name, _group(name, entry.process_group[1], []))
    of_unfinished = dump.is_of_unfinished
    issued, unclear = _collectives(rank, dump, groups, whole)
    # Of a dump of unfinished work, the last finished collectives of groups. Not of gloo, which has no version and
    # counts messages too, and whose finished work is in every dump; nor of `messaging` groups, of which the status
    # has the number of the last message or collective (`WorkNCCL::seq_`).
    finished = []
    batches, skipped = {str(entry.process_group[0]) for entry in dump.entries if entry.name == "coalesced"}, False
    # A process numbers the groups that it is in; of those without an entry, only the default group's name is known.
    names = {"0": "0"} | {str(entry.pg_id): str(entry.process_group[0]) for entry in dump.entries}
    newest = {op.group: op.number for op in issued if op.peer is None}
    for key, status in dump.pg_status.items() if dump.comm_lib_version or dump.nccl_version else ():
        group, number = names.get(key), status.last_completed_collective - 1
        if group is None and of_unfinished:
            skipped |= status.last_enqueued_collective > status.last_completed_collective
        if group is None or group in messaging:
            continue
        if number > newest.get(group, -1) and (of_unfinished or (group not in newest and dump.oldest)):
            finished.append(CollectiveEvidence(group=group, number=number, kind=UNKNOWN_KIND, state="completed"))
            newest[group] = number
        # An entry is made before its work is enqueued.
        skipped |= group not in batches and status.last_enqueued_collective - 1 > newest.get(group, -1)
    notes_starts = all(entry.time_discovered_started_ns for entry in dump.entries if entry.state == "completed")
    # Finished entries are left out all together.
    holes = dump.has_holes and any(op.state in ("completed", "retired") for op in issued)
    lacking = unclear or holes or skipped or (dump.oldest and not (issued and issued[0].state == "completed"))
    times = [time for op in issued for time in (op.issued_ns, op.started_ns, op.completed_ns) if time]
    # What a rank lacks is not issued, or was issued after its dump. NCCL's status and completed collectives tell.
    not_after_ns = path.stat().st_mtime_ns
    if last_ns is not None and not_after_ns > last_ns:
        not_after_ns = max(times, default=0)
    return RankEvidence(
        rank=rank,
        world_size=world,
        source="flight_recorder",
        path=str(path),
        progress_ns=max(times, default=None),
        groups=list(groups.values()),
        collectives=[*finished, *issued],
        not_after_ns=not_after_ns,
        device_seen_ns=path.stat().st_mtime_ns if begun and notes_starts else None,
        # Entries of other groups push out the oldest, finished or not.
        overwritten=tuple(groups) if dump.oldest else (),
        from_start=not (dump.oldest or of_unfinished),
        torn=f"{path.name} lacks entries or finished work: what the rank waits for is unknown" if lacking else None,
    )


def _group(name: str, description: str, ranks: Sequence[int]) -> GroupEvidence:
    """Return a group; one that its program did not describe is called by its ranks."""
    if description == _UNDESCRIBED:
        description = f"the group of {name_ranks(ranks)}" if ranks else ""
    return GroupEvidence(name=name, description=description or None, ranks=tuple(ranks))


def _collectives(
    rank: int, dump: Dump, groups: dict[str, GroupEvidence], whole: bool
) -> tuple[list[CollectiveEvidence], bool]:
    """Return what a dump has of collectives and messages, and whether it is unclear which messages have finished."""
    # torch gives the messages of a batch no events, so that they stay scheduled for ever: the entry that ends the
    # batch has the state of all (`ProcessGroupNCCL::pointToPoint`). It does not say that it is of messages (`is_p2p` is
    # taken from the type of operation, COALESCED), and has the number of the collective before; but no collective
    # shares both numbers with a message.
    of_messages = {entry.batch for entry in dump.entries if entry.name.startswith(_MESSAGES)}
    ends = {
        entry.batch: entry
        for entry in dump.entries
        if entry.name == "coalesced" and (entry.is_p2p or entry.batch in of_messages)
    }
    of_unfinished = dump.is_of_unfinished
    unclear = {  # scheduled messages that may be of batches whose finished end is left out
        entry.record_id
        for entry in dump.entries
        if of_unfinished and entry.state == "scheduled" and entry.name.startswith(_MESSAGES) and entry.batch not in ends
    }
    collectives: list[CollectiveEvidence] = []
    merged: dict[tuple[str, int], CollectiveEvidence] = {}
    messages: dict[tuple[str, str, int], list[CollectiveEvidence]] = defaultdict(list)
    parts = Counter(entry.batch for entry in dump.entries)
    for entry in dump.entries:
        end = ends.get(entry.batch)
        # The messages of its batch are lost.
        alone = entry.p2p_seq_id > 0 and (
            entry.record_id == dump.oldest > 0 or (dump.has_holes and parts[entry.batch] == 1)
        )
        if entry.record_id in unclear or (entry.name == "coalesced" and (end is not None or alone)):
            continue
        op = _collective(entry)
        if entry.name.startswith(_MESSAGES):
            # `send 0->1` or `recv 1<-0`, whose numbers count in the group
            sides = [int(number) for number in re.findall(r"\d{1,9}", entry.name)]
            members = groups[op.group].ranks
            op.kind, op.peer = entry.name[:4], rank
            if len(sides) == 2:
                op.peer = members[sides[1]] if sides[1] < len(members) else sides[1]
            if end is not None and op.state == "issued":
                of_batch = _collective(end)
                op.state, op.started_ns, op.completed_ns = of_batch.state, of_batch.started_ns, of_batch.completed_ns
            messages[op.group, op.kind, op.peer].append(op)
            collectives.append(op)
        elif (before := merged.get((op.group, op.number))) is None:
            merged[op.group, op.number] = op
            collectives.append(op)
        else:  # several collectives issued as one, the last entry stands for all
            before.state, before.started_ns, before.completed_ns = op.state, op.started_ns, op.completed_ns
            before.bytes = None if before.bytes is None else before.bytes + (op.bytes or 0)
    # A group's collectives end one after another: an older one that is open was not looked at since.
    newest = {group: number for (group, number), op in sorted(merged.items()) if op.state == "completed"}
    for (group, number), op in merged.items():
        if number < newest.get(group, -1):
            op.state = "completed"
    for several in messages.values():
        first_open = next((index for index, op in enumerate(several) if op.state != "completed"), len(several))
        for index, op in enumerate(several):  # where older ones are lost, both sides count from what is open
            op.number = index if whole else index - first_open
    return collectives, bool(unclear)


def _collective(entry: DumpEntry) -> CollectiveEvidence:
    state: CollectiveState = "issued" if entry.state == "scheduled" else entry.state
    if entry.time_discovered_completed_ns:
        state = "completed"
    if state != "completed" and entry.retired:
        # NCCL's has timed out. gloo's work stays scheduled to its end, and is retired with an error too; what torch
        # records by its hooks for other backends may be retired as soon as it is issued.
        backend = entry.profiling_name.partition(":")[0]
        state = "retired" if backend == _GLOO else state if backend == "nccl" else "unseen"
    kind = _KINDS.get(entry.name, entry.name)
    sizes = [math.prod(shape) for shape in (entry.output_sizes if kind == "all_gather" else entry.input_sizes)]
    items = [_ITEM_BYTES.get(dtype) for dtype in entry.input_dtypes]
    known = [item for item in items if item is not None]
    whole = len(known) == len(items) == len(sizes) > 0 and max(sizes) < 2**62
    outside = (
        f"{frame.filename}:{frame.line} {frame.name}" for frame in entry.frames if "/torch/" not in frame.filename
    )
    return CollectiveEvidence(
        group=str(entry.process_group[0]),
        number=entry.collective_seq_id - 1,
        kind=kind,
        state=state,
        bytes=sum(size * item for size, item in zip(sizes, known, strict=True)) if whole else None,
        dtype=", ".join(dict.fromkeys(entry.input_dtypes)) or None,
        input_sizes=tuple(map(tuple, entry.input_sizes)) or None,
        output_sizes=tuple(map(tuple, entry.output_sizes)) or None,
        issued_ns=entry.time_created_ns or None,
        started_ns=entry.time_discovered_started_ns or None,
        completed_ns=entry.time_discovered_completed_ns or None,
        issued_by=next(outside, None),
    )
