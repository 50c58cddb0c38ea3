"""Finds out which rank a traced process was, from the most to the least reliable evidence (docs/dev/trace-readers.md).

Takes what a trace says about a process and, where available, the headers of AORTA's own records. Gives a rank, or
`NULL` and a sentence that says why; evidence that allows two ranks gives none. Must not: guess, or take ranks from the
order of process ids or of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.records.reader import header_of
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
    for folder in folders:
        for path in rank_files(folder):
            try:
                found.append(header_of(path))
            except InputError:
                continue
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
    by_pid = _by_pid(process, headers)
    evidence = [
        ("its environment says RANK", _set(process.environment_rank)),
        ("its path says rank", set() if process.shared else ranks_in_path(process.path)),
        (f"the record with process id {process.pid} says rank", {header.rank for header in by_pid}),
        (f"GPU {_list(process.gpus)} belongs to local rank of rank", _by_gpu(process, headers)),
    ]
    usable = [(words, ranks) for words, ranks in evidence if ranks]
    world = process.environment_world or next((header.world_size for header in by_pid), None)
    if not usable:
        return InferredRank(NULL, (_nothing(process),), world)
    words, ranks = usable[0]
    if len(ranks) > 1:
        return InferredRank(
            NULL, (f"{process.path}: rank not known: {words} {_list(sorted(ranks))}: ambiguous",), world
        )
    (rank,) = ranks
    against = [f"{other} {_list(sorted(found))}" for other, found in usable[1:] if rank not in found]
    notes = tuple(f"{process.path}: taken as rank {rank} ({words} {rank}), although {doubt}" for doubt in against)
    return InferredRank(rank, notes, world)


def ranks_in_path(path: str) -> set[int]:
    """Return the ranks that folder and file names state as `rank<k>`. The component nearest to the file decides;
    several different ranks in that one component are all returned.
    """
    for part in reversed(PurePath(path).parts):
        found = {int(number) for number in _RANK_IN_PATH.findall(part)}
        if found := {rank for rank in found if rank <= LARGEST_RANK}:
            return found
    return set()


def _by_pid(process: Process, headers: Sequence[Header]) -> list[Header]:
    """Return headers with this process id. Ids repeat on other machines: the host must agree where both know it."""
    return [
        header
        for header in headers
        if process.pid is not None and header.pid == process.pid and _same_host(process, header)
    ]


def _by_gpu(process: Process, headers: Sequence[Header]) -> set[int]:
    if len(process.gpus) != 1 or process.all_gpus_visible is not True or process.host is None:
        return set()
    return {h.rank for h in headers if h.local_rank == process.gpus[0] and _same_host(process, h) and h.host}


def _same_host(process: Process, header: Header) -> bool:
    if not process.host or not header.host:
        return True
    return process.host.split(".")[0] == header.host.split(".")[0]


def _set(rank: int | None) -> set[int]:
    return set() if rank is None or not 0 <= rank <= LARGEST_RANK else {rank}


def _nothing(process: Process) -> str:
    seen = [f"process {process.pid}" if process.pid is not None else "no process id"]
    if process.gpus:
        seen.append(f"GPU {_list(process.gpus)}")
    return (
        f"{process.path}: rank not known ({', '.join(seen)}): no RANK in its environment, no rank<k> in its path, no "
        "record with its process id. Give the folder of the records, or put rank<k> into the path"
    )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
