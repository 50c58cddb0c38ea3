"""Evidence of a run or of dumps, whatever there is, and the report on it in the run's folder; and evidence as dumps of
torch's Flight Recorder, which `torchfrtrace` reads.

    write_verdict(folder, verdict_on_run(folder))    # autopsy/autopsy.json and autopsy/autopsy.txt
    write_dumps(evidence, Path("dumps"))             # then: torchfrtrace dumps

torchfrtrace aligns ranks by the first record of each dump, and takes for missing what one rank has dropped and another
has not: each group is written from the first collective that nobody has dropped, and records are counted anew. Sends
and receives are left out: it fails on those outside of a batch. Must not change or wake a rank, or load torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.autopsy.evidence import CollectiveEvidence, RankEvidence
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.job import Channel, JobEvidence, Rank
from aorta.autopsy.joining import join
from aorta.autopsy.judge import judge
from aorta.autopsy.progress_evidence import progress_evidence
from aorta.autopsy.verdict import Verdict, verdict_text
from aorta.errors import InputError
from aorta.records.files import decode_json, json_text, read_small, write_whole
from aorta.records.progress_file import PROGRESS_DIR
from aorta.records.run_files import AUTOPSY_DIR

STUCK_AFTER_S: Final = 10.0
"""A recorded rank that made progress within so many seconds is not stuck: the watchdog's least timeout."""
WATCHED_AFTER_S: Final = 1.0
"""The same of evidence that a watchdog saved when its timeout, which may be shorter than that, was over."""
JSON_FILE: Final = "autopsy.json"
TEXT_FILE: Final = "autopsy.txt"

_VERDICT: Final = msgspec.json.Decoder(Verdict)


def evidence_of(paths: Sequence[Path], *, live: bool = False) -> list[RankEvidence]:
    """Return the evidence of a run folder, or of dumps of torch's Flight Recorder.

    Args:
        paths: a run folder with progress files; or dumps, and folders of dumps.
        live: ask the running ranks of this host for their stacks.

    Raises:
        InputError: there is no evidence, or several runs.
    """
    runs = [path for path in paths if (path / PROGRESS_DIR).is_dir()]
    if not runs:
        if live:
            raise InputError(f"{paths[0]}: no {PROGRESS_DIR}/ in it: --live looks at a recorded run of this host")
        return read_dumps(paths)
    if len(runs) > 1:
        raise InputError(f"{runs[0]} and {runs[1]}: an autopsy is of one run")
    found = progress_evidence(runs[0], stacks=live, saved=not live)
    others = [path for path in paths if path != runs[0]]
    return [*found, *(read_dumps(others) if others else [])]


def verdict_on(evidence: Sequence[RankEvidence], *, watched: bool, stuck_after_s: float | None = None) -> Verdict:
    """Judge evidence. Where it has ages, a rank that moved shortly before shows that nothing is stuck.

    Args:
        watched: the evidence was saved by a watchdog, which has waited already, unless a rank ended.
        stuck_after_s: what is shortly; None: `STUCK_AFTER_S`, or of evidence that was waited for `WATCHED_AFTER_S`.
    """
    waited = watched and all(one.state != "dead" and one.exit is None for one in evidence)
    usual_s = WATCHED_AFTER_S if waited else STUCK_AFTER_S
    return judge(evidence, stuck_after_s=usual_s if stuck_after_s is None else stuck_after_s)


def has_saved_evidence(folder: Path) -> bool:
    """Return whether a watchdog has saved evidence in a run's folder."""
    return any((folder / AUTOPSY_DIR).glob("rank_*.json"))


def verdict_on_run(folder: Path) -> Verdict:
    """Judge what there is of a run.

    Raises:
        InputError: there is no evidence in the folder.
    """
    return verdict_on(evidence_of([folder]), watched=has_saved_evidence(folder))


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict into a run's folder, as JSON and as text.

    Raises:
        OSError: it cannot be written.
    """
    output = folder / AUTOPSY_DIR
    output.mkdir(exist_ok=True)
    write_whole(output / JSON_FILE, as_json(verdict).decode())
    write_whole(output / TEXT_FILE, f"{verdict_text(verdict, stacks=True)}\n")


def read_autopsy(folder: Path) -> Verdict | None:
    """Return the report that `write_verdict` left in a run's folder; None where there is none.

    Raises:
        InputError: it cannot be read; names the file.
    """
    path = folder / AUTOPSY_DIR / JSON_FILE
    try:
        return decode_json(read_small(path), _VERDICT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; move it away to read the run without it") from error


def as_json(verdict: Verdict) -> bytes:
    """Return the document that `docs/schemas/autopsy-1.schema.json` describes."""
    return json_text(msgspec.to_builtins(verdict)).encode()


VERSION: Final = "2.10"
"""Of the format: torch 2.13's."""
PREFIX: Final = "comm_lib_trace_rank_"
_TIMEOUT_MS: Final = 600_000
_STATES: Final = {"issued": "scheduled", "started": "started", "completed": "completed"}
_OPERATIONS: Final = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier"}
)
"""Kinds that torchfrtrace knows by the same name."""
_TYPES: Final = {
    "float64": ("Double", 8),
    "float32": ("Float", 4),
    "float16": ("Half", 2),
    "bfloat16": ("BFloat16", 2),
    "int64": ("Long", 8),
    "int32": ("Int", 4),
    "int16": ("Short", 2),
    "int8": ("Char", 1),
    "uint8": ("Byte", 1),
    "bool": ("Bool", 1),
}
"""Name of a type in the record -> torch's name in C++, bytes of an element."""


def write_dumps(evidence: Sequence[RankEvidence], folder: Path) -> list[Path]:
    """Write a dump of each rank whose collectives are known; returns the files.

    Raises:
        InputError: the folder holds dumps already, or cannot be written.
    """
    job = join(evidence)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dumps := sorted(folder.glob(f"{PREFIX}*")):
            raise InputError(f"{dumps[0]}: {folder} holds dumps already; give a new folder")
        paths = []
        for rank in job.ranks.values():
            if rank.complete:
                paths.append(folder / f"{PREFIX}{rank.rank}")
                write_whole(paths[-1], pickle.dumps(_dump(job, rank)))
    except OSError as error:
        raise InputError(f"{folder}: dumps cannot be written: {error.strerror or error}") from error
    return paths


def _dump(job: JobEvidence, rank: Rank) -> dict[str, Any]:
    groups = {name: group for name, group in job.groups.items() if rank.rank in group.ranks}
    first = {}  # from which on no rank has dropped a collective of the group
    for name in groups:
        issued = [other.channels.get(Channel(name)) for other in job.ranks.values()]
        first[name] = max((min(numbers) for numbers in issued if numbers), default=0)
    kept = [
        one
        for one in rank.collectives
        if one.peer is None and one.kind in _OPERATIONS and one.number >= first.get(one.group, 0)
    ]
    status = {}
    for name in groups:
        of_group = [one for one in kept if one.group == name]
        started = [one.number + 1 for one in of_group if one.state != "issued"]
        completed = [one.number + 1 for one in of_group if one.state == "completed"]
        status[name] = {
            "last_enqueued_collective": max((one.number + 1 for one in of_group), default=-1),
            "last_started_collective": max(started, default=-1),
            "last_completed_collective": max(completed, default=-1),
        }
    number_of = {name: at for at, name in enumerate(sorted(job.groups))}
    return {
        "version": VERSION,
        "pg_config": {
            name: {"name": name, "desc": group.description or "undefined", "ranks": str(list(group.ranks))}
            for name, group in groups.items()
        },
        "comm_lib_version": "",
        "pg_status": {str(number_of[name]): of_group for name, of_group in status.items()},
        "entries": [_entry(job, at, one, number_of[one.group]) for at, one in enumerate(kept)],
    }


def _entry(job: JobEvidence, at: int, one: CollectiveEvidence, group_number: int) -> dict[str, Any]:
    group = job.groups[one.group]
    dtype, sizes = _shapes(one, len(group.ranks))
    filled = dict.fromkeys(("input", "output"), [dtype] if sizes[0] else [])
    return {
        "record_id": at,
        "pg_id": group_number,
        "process_group": (one.group, group.description or "undefined"),
        "thread_id": "0",
        "thread_name": "",
        "collective_seq_id": one.number + 1,  # torch counts from 1
        "p2p_seq_id": 0,
        "op_id": one.number + 1,
        "profiling_name": f"nccl:{one.kind}",
        "time_created_ns": one.issued_ns or 0,
        "input_sizes": sizes[0],
        "input_dtypes": filled["input"],
        "output_sizes": sizes[1],
        "output_dtypes": filled["output"],
        "state": _STATES[one.state],
        "time_discovered_started_ns": one.started_ns,
        "time_discovered_completed_ns": one.completed_ns,
        "retired": one.state == "completed",
        "timeout_ms": _TIMEOUT_MS,
        "is_p2p": False,
        "frames": [],
    }


def _shapes(one: CollectiveEvidence, ranks: int) -> tuple[str, tuple[list[list[int]], list[list[int]]]]:
    """Return the type and shapes of inputs and outputs: as they are known, or one dimension that has the bytes."""
    dtype, item = _TYPES.get(one.dtype or "", (one.dtype or "Byte", 1))
    if one.input_sizes is not None and one.output_sizes is not None:
        return dtype, ([list(shape) for shape in one.input_sizes], [list(shape) for shape in one.output_sizes])
    if one.bytes is None or one.kind == "barrier":
        return dtype, ([], [])
    whole = one.bytes // item
    shard = -(-whole // max(ranks, 1))
    if one.kind in ("all_gather", "reduce_scatter"):
        whole = shard * ranks  # torch's analyzer refuses shards that do not add up, as rounded bytes may not
    before = shard if one.kind == "all_gather" else whole
    after = shard if one.kind == "reduce_scatter" else whole
    return dtype, ([[before]], [[after]])
