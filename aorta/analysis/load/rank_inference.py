"""Finds out which rank a traced process was, from the most to the least reliable evidence (docs/dev/trace-readers.md).

Takes what a trace says about a process and, where available, the headers of AORTA's own records. Gives a rank, or
`NULL` and a sentence that says why; evidence that allows two ranks gives none. Must not: guess, or take ranks from the
order of process ids or of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.records.record_file import header_of
from aorta.records.run_files import rank_files
from aorta.records.schema import Header

_RANK_IN_PATH: Final = re.compile(r"(?<![a-z])rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
LARGEST_RANK: Final = 2**31 - 1


@dataclass(frozen=True)
class Process:
    """What a trace says about one process; None is unknown.

    Attributes:
        path: of its file, used in messages. Where `shared`, the file holds several, so its path names no rank.
        gpus: the GPUs it used, numbered over all GPUs of the machine (rocprofv3's `logical_node_type_id`).
        all_gpus_visible: no `*_VISIBLE_DEVICES` renumbered them for this process, as far as the trace says.
    """

    path: str
    pid: int | None = None
    host: str | None = None
    environment_rank: int | None = None
    environment_world: int | None = None
    gpus: tuple[int, ...] = ()
    all_gpus_visible: bool | None = None
    shared: bool = False


@dataclass(frozen=True)
class InferredRank:
    """The rank of a process. `rank` is `NULL` where it is unknown; `notes` say why, or which evidence was overruled."""

    rank: int
    notes: tuple[str, ...] = ()
    world_size: int | None = None


def headers_in(folders: Iterable[Path]) -> tuple[Header, ...]:
    """Return headers of the records directly in some folders; files that cannot be read are left out."""
    found = []
    for path in (path for folder in folders for path in rank_files(folder)):
        with suppress(InputError):
            found.append(header_of(path))
    return tuple(found)


def headers_near(location: str) -> tuple[Header, ...]:
    """Return the headers of the records in the folder of a local file (or the folder itself) and the two above it: a
    trace is often kept below the run it belongs to. A URL or a glob has none.
    """
    path = Path(location)
    if "://" in location or not path.exists():
        return ()
    own = path.absolute() if path.is_dir() else path.absolute().parent
    return headers_in([own, *own.parents[:2]])


def place(process: Process, headers: Sequence[Header] = ()) -> InferredRank:
    """Return the rank of one process: from its environment, then `rank<k>` in its path, then the record with its
    process id, then the one GPU it used where local ranks and GPUs correspond.
    """
    pid, gpus, host = process.pid, process.gpus, process.host and process.host.split(".")[0]
    # Process ids and GPUs repeat on other machines: the host must agree where both know it.
    here = [each for each in headers if not host or not each.host or each.host.split(".")[0] == host]
    by_pid = [each for each in here if pid is not None and each.pid == pid]
    by_gpu = [each for each in here if each.host and len(gpus) == 1 and each.local_rank == gpus[0]]
    told = process.environment_rank
    evidence = (
        ("its environment says RANK", {told} if told is not None and 0 <= told <= LARGEST_RANK else set[int]()),
        ("its path says rank", set() if process.shared else ranks_in_path(process.path)),
        (f"the record with process id {pid} says rank", {each.rank for each in by_pid}),
        (
            f"GPU {_list(gpus)} belongs to local rank of rank",
            {each.rank for each in by_gpu} if process.all_gpus_visible and host else set(),
        ),
    )
    usable = [(words, ranks) for words, ranks in evidence if ranks]
    world = process.environment_world or next((header.world_size for header in by_pid), None)
    if not usable:
        seen = [f"process {pid}" if pid is not None else "no process id", *([f"GPU {_list(gpus)}"] if gpus else [])]
        why = (
            f"{process.path}: rank not known ({', '.join(seen)}): no RANK in its environment, no rank<k> in its path, "
            "no record with its process id. Give the folder of the records, or put rank<k> into the path"
        )
        return InferredRank(NULL, (why,), world)
    words, ranks = usable[0]
    if len(ranks) > 1:
        why = f"{process.path}: rank not known: {words} {_list(sorted(ranks))}: ambiguous"
        return InferredRank(NULL, (why,), world)
    (rank,) = ranks
    against = [f"{other} {_list(sorted(found))}" for other, found in usable[1:] if rank not in found]
    notes = tuple(f"{process.path}: taken as rank {rank} ({words} {rank}), although {doubt}" for doubt in against)
    return InferredRank(rank, notes, world)


def ranks_in_path(path: str) -> set[int]:
    """Return the ranks that folder and file names state as `rank<k>`. The component nearest to the file decides;
    several different ranks in that one component are all returned.
    """
    for part in reversed(PurePath(path).parts):
        if found := {rank for text in _RANK_IN_PATH.findall(part) if (rank := int(text)) <= LARGEST_RANK}:
            return found
    return set()


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
