"""Evidence of a recorded run: its progress files, what the watchdog saved, /proc, and how its ranks ended.

    progress_evidence(Path("artifacts/cuda"))    # also while the job hangs, and after all of it died

Must not change or wake a rank, unless stacks are asked for.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.autopsy.evidence import CollectiveEvidence, GroupEvidence, ProcessState, RankEvidence, RankExit, ThreadStack
from aorta.autopsy.processes import exit_of_zombie, fatal_in, pid_namespace, process_state, stacks_of
from aorta.errors import SIGNAL_EXIT_BASE
from aorta.records.clocks import boot_id
from aorta.records.files import decode_json, open_regular, read_small
from aorta.records.progress_file import (
    STACKS_FILE,
    WHEN_UNKNOWN,
    ProgressCollective,
    ProgressFacts,
    ProgressSeen,
    UnreadableProgress,
    progress_files,
    read_progress,
)
from aorta.records.record_file import decode_line
from aorta.records.run_files import AUTOPSY_DIR, RANK_FILE
from aorta.records.schema import Footer

_EVIDENCE: Final = msgspec.json.Decoder(RankEvidence)
_ERROR: Final = msgspec.json.Decoder(dict[str, Any])
EVIDENCE_FILE: Final = "rank_{rank}.json"
_TAIL_BYTES: Final = 1 << 20
_KINDS: Final = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


def progress_evidence(run_folder: Path, *, stacks: bool = False, saved: bool = True) -> list[RankEvidence]:
    """Return the evidence of each rank that has a progress file in `run_folder`, by rank; empty where there is none.

    Args:
        stacks: ask running ranks of this host for their stacks.
        saved: where the watchdog saved evidence and the rank has made no progress since, take that: the launcher may
            have ended the rank meanwhile.
    """
    return [_evidence(run_folder, path, stacks=stacks, saved=saved) for path in progress_files(run_folder)]


def _evidence(run_folder: Path, path: Path, *, stacks: bool, saved: bool) -> RankEvidence:
    rank = int(path.stem.removeprefix("rank_"))
    try:
        seen = read_progress(path)
        if seen.facts.rank != rank:
            raise UnreadableProgress(f"{path}: it is of rank {seen.facts.rank}")
        taken_ns = time.perf_counter_ns()  # before stacks are asked for, which takes its time
    except (OSError, UnreadableProgress) as error:
        return RankEvidence(rank=rank, source="progress", path=str(path), torn=str(error))
    facts, loop = seen.facts, seen.state
    earlier = saved_evidence(run_folder, rank) if saved else None
    if earlier is not None and earlier.pid == facts.pid and earlier.progress_ns == loop.progress_ns:
        return earlier
    state = state_of_rank(path, facts)
    left = 0 < (loop.exit_code or 0) < SIGNAL_EXIT_BASE  # with an error
    ended, at_end = _exit(run_folder, path, seen) if state == "dead" or left else (None, [])
    taken: list[ThreadStack] = []
    if stacks and state == "running" and loop.exit_code is None:
        taken = stacks_of(facts, path, stacks_file(path))
    return RankEvidence(
        rank=facts.rank,
        world_size=facts.world_size,
        source="progress",
        path=str(path),
        clock=f"CLOCK_MONOTONIC of {facts.host}, boot {facts.boot_id}",
        host=facts.host,
        pid=facts.pid,
        state=state,
        exit=ended,
        taken_ns=taken_ns if _is_on_this_host(facts) else None,
        progress_ns=loop.progress_ns,
        step=loop.step,
        phase=None if loop.phase == "none" else loop.phase,
        phase_since_ns=loop.phase_since_ns,
        groups=[GroupEvidence(name=group.name, ranks=tuple(sorted(group.ranks))) for group in seen.groups],
        collectives=[_collective(row) for row in seen.collectives],
        lost=seen.issued - len(seen.collectives),
        completed_late=facts.completed_late,
        stacks=taken or at_end,
        torn=seen.torn,
    )


def saved_evidence(run_folder: Path, rank: int) -> RankEvidence | None:
    """Return what the watchdog saved of a rank; None where there is nothing, or it cannot be read."""
    try:
        found = decode_json(read_small(run_folder / AUTOPSY_DIR / EVIDENCE_FILE.format(rank=rank)), _EVIDENCE)
        return found if found.rank == rank else None
    except (OSError, ValueError):
        return None


def stacks_file(progress_file: Path) -> Path:
    """Return where the rank of a progress file writes its stacks."""
    return progress_file.with_name(STACKS_FILE.format(rank=progress_file.stem.removeprefix("rank_")))


def _collective(row: ProgressCollective) -> CollectiveEvidence:
    group = row.group
    peer = row.peer
    if group is not None and peer is not None:
        peer = group.ranks[peer] if 0 <= peer < len(group.ranks) else None
    return CollectiveEvidence(
        group="" if group is None else group.name,
        number=row.number,
        kind=_KINDS.get(row.kind, row.kind),
        state="issued" if row.completed_ns is None else "completed",
        bytes=row.bytes,
        dtype=row.dtype,
        peer=peer,
        issued_ns=row.issued_ns,
        completed_ns=None if row.completed_ns == WHEN_UNKNOWN else row.completed_ns,
    )


def _is_on_this_host(facts: ProgressFacts) -> bool:
    return facts.host == socket.gethostname() and facts.boot_id == boot_id()


def is_visible(facts: ProgressFacts) -> bool:
    return _is_on_this_host(facts) and facts.pid_namespace == pid_namespace()


def state_of_rank(path: Path, facts: ProgressFacts) -> ProcessState:
    """Return the state of the process that has this progress file; unknown where it cannot be seen from here."""
    if is_visible(facts):
        return process_state(facts.pid, facts.start_ticks)
    if facts.host != socket.gethostname() or facts.boot_id == boot_id():
        return "unknown"
    # Its host was started again, and the process is gone; unless another host has the same name.
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return "dead" if path.stat().st_mtime < booted_s else "unknown"


def _exit(run_folder: Path, path: Path, seen: ProgressSeen) -> tuple[RankExit | None, list[ThreadStack]]:
    """Return how a rank ended, from whoever says so, and its stacks at that moment where it left them."""
    facts = seen.facts
    ended, stacks = fatal_in(stacks_file(path), facts.main_thread)
    if ended is not None:
        return ended, stacks
    earlier = saved_evidence(run_folder, facts.rank)
    for found in (
        _exit_in_record(run_folder, facts.rank),
        exit_of_zombie(facts.pid, facts.start_ticks) if is_visible(facts) else None,
        earlier.exit if earlier is not None and earlier.pid == facts.pid else None,
        _exit_in_error_file(facts),
    ):
        if found is not None:
            return found, []
    return None if seen.state.exit_code is None else RankExit(exit_code=seen.state.exit_code), []


def _exit_in_record(run_folder: Path, rank: int) -> RankExit | None:
    """Return what the footer of the rank's record says; None where the record ends without one."""
    try:
        with open_regular(run_folder / RANK_FILE.format(rank=rank)) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            last = decode_line(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    if type(last) is not Footer:
        return None
    # 0 beside an error: the disk was full, and the loop went on to its end.
    return RankExit(signal=last.signal, exit_code=last.exit_code, exception=last.error if last.exit_code else None)


def _exit_in_error_file(facts: ProgressFacts) -> RankExit | None:
    """Return the exception in the file that torchrun names in TORCHELASTIC_ERROR_FILE (torch.distributed.elastic)."""
    try:
        message = decode_json(read_small(Path(facts.error_file or "")), _ERROR)["message"]
    except (OSError, ValueError, KeyError):
        return None
    text = str(message.get("message") if isinstance(message, dict) else message).strip()
    return RankExit(exception=text.splitlines()[0]) if text else None
