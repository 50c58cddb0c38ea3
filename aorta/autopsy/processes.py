"""Ranks of recorded runs: their progress files, their processes as /proc shows them, and how they ended.

    progress_evidence(Path("artifacts/cuda"))    # also while the job hangs, and after all of it died

Must not end or stop a process, or wake a rank unless its stacks are asked for.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from aorta.autopsy.evidence import (
    CollectiveEvidence,
    CollectiveState,
    GroupEvidence,
    ProcessState,
    RankEvidence,
    RankExit,
    ThreadStack,
)
from aorta.autopsy.stacks import fatal_ending, stacks_of
from aorta.records.clocks import boot_id
from aorta.records.files import decode_json, open_regular, read_small
from aorta.records.process import pid_namespace, process_facts
from aorta.records.progress import (
    STACKS_FILE,
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

EVIDENCE_FILE: Final = "rank_{rank}.json"
_EVIDENCE: Final = msgspec.json.Decoder(RankEvidence)
_ERROR_FILE: Final = re.compile(r"attempt_\d+/\d+/error\.json$")
"""The end of the path that torchrun gives its workers (torch.distributed.elastic.agent.server.local_elastic_agent)."""
_TAIL_BYTES: Final = 1 << 20
_LOOKED_WITHIN_NS: Final = 2_000_000_000
"""A device of which the newest look is older is not known: ranks look four times a second (`native/marks.hpp`)."""


class _Extra(msgspec.Struct):
    timestamp: str | int


class _Message(msgspec.Struct):
    message: str
    extra: _Extra = msgspec.field(name="extraInfo")


class _Error(msgspec.Struct):
    """A file of torchrun's (torch.distributed.elastic.multiprocessing.errors.ErrorHandler)."""

    message: _Message


_ERROR: Final = msgspec.json.Decoder(_Error)
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
    evidence = []
    for path in progress_files(run_folder):
        rank = int(path.stem.removeprefix("rank_"))
        try:
            seen = read_progress(path)
            if seen.facts.rank != rank:
                raise UnreadableProgress(f"{path}: it is of rank {seen.facts.rank}")
            taken_ns = time.perf_counter_ns()  # before stacks are asked for, which takes its time
        except (OSError, UnreadableProgress) as error:
            evidence.append(RankEvidence(rank=rank, source="progress", path=str(path), torn=str(error)))
            continue
        facts, loop = seen.facts, seen.state
        earlier = saved_evidence(run_folder, rank) if saved else None
        if earlier is not None and earlier.pid == facts.pid and earlier.progress_ns == loop.progress_ns:
            evidence.append(earlier)
            continue
        state = state_of_rank(path, facts)
        is_here = _is_on_this_host(facts)
        # Of a clock of another host it is not known how long ago that was.
        seen_ns = seen.looked_ns if is_here and taken_ns - (seen.looked_ns or 0) < _LOOKED_WITHIN_NS else None
        ended, taken = _exit(run_folder, path, seen) if state == "dead" or loop.exit_code is not None else (None, [])
        if stacks and state == "running" and loop.exit_code is None:
            taken = stacks_of(facts, path, stacks_file(path))
        entry = RankEvidence(
            rank=facts.rank,
            world_size=facts.world_size,
            source="progress",
            path=str(path),
            host=facts.host,
            pid=facts.pid,
            state=state,
            exit=ended,
            taken_ns=taken_ns if is_here else None,
            progress_ns=loop.progress_ns,
            step=loop.step,
            phase=None if loop.phase == "none" else loop.phase,
            phase_since_ns=loop.phase_since_ns,
            groups=[GroupEvidence(name=group.name, ranks=tuple(sorted(group.ranks))) for group in seen.groups],
            device_seen_ns=seen_ns,
            overwritten=seen.overwritten,
            stacks=taken,
            torn=seen.torn,
        )
        for row in seen.collectives:
            peer = row.peer
            if row.group is not None and peer is not None:
                peer = row.group.ranks[peer] if peer < len(row.group.ranks) else None
            entry.collectives.append(
                CollectiveEvidence(
                    group="" if row.group is None else row.group.name,
                    number=row.number,
                    kind=_KINDS.get(row.kind, row.kind),
                    state=_state_of(row, seen_ns),
                    bytes=row.bytes,
                    dtype=row.dtype,
                    peer=peer,
                    issued_ns=row.issued_ns,
                    completed_ns=None if row.on_device else row.completed_ns,
                )
            )
        evidence.append(entry)
    return evidence


def _state_of(row: ProgressCollective, seen_ns: int | None) -> CollectiveState:
    """Return the state of a collective, whose rank's device was seen at `seen_ns`, if it was."""
    if row.has_completed:
        return "completed"
    if not row.on_device:  # begun as it is issued, which says more only beside those on a device
        return "issued" if seen_ns is None else "started"
    if row.is_unmarked or seen_ns is None or seen_ns < row.issued_ns:
        return "unseen"
    return "started" if row.has_begun else "issued"


def saved_evidence(run_folder: Path, rank: int) -> RankEvidence | None:
    """Return what the watchdog saved of a rank; None where there is nothing, or it cannot be read."""
    try:
        saved = decode_json(read_small(run_folder / AUTOPSY_DIR / EVIDENCE_FILE.format(rank=rank)), _EVIDENCE)
        return saved if saved.rank == rank else None
    except (OSError, ValueError):
        return None


def stacks_file(progress_file: Path) -> Path:
    """Return where the rank of a progress file writes its stacks."""
    return progress_file.with_name(STACKS_FILE.format(rank=progress_file.stem.removeprefix("rank_")))


def _is_on_this_host(facts: ProgressFacts) -> bool:
    return facts.host == socket.gethostname() and facts.boot_id == boot_id()


def is_visible(facts: ProgressFacts) -> bool:
    """Return whether this process sees that of a progress file in its /proc."""
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
    """Return how a rank ended, from whichever source says so, and its stacks at that moment where it left them."""
    facts = seen.facts
    if (fatal := fatal_ending(stacks_file(path), facts.main_thread)) is not None:
        return fatal
    earlier = saved_evidence(run_folder, facts.rank)
    for ending in (
        exit_in_record(run_folder, facts.rank),
        exit_of_zombie(facts.pid, facts.start_ticks) if is_visible(facts) else None,
        earlier.exit if earlier is not None and earlier.pid == facts.pid else None,
        _exit_in_error_file(facts),
        None if seen.state.exit_code is None else RankExit(exit_code=seen.state.exit_code),
    ):
        if ending is not None:
            return ending, []
    return None, []


def exit_in_record(run_folder: Path, rank: int) -> RankExit | None:
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
    """Return the exception in the file that torchrun names in TORCHELASTIC_ERROR_FILE. A progress file may name any: no
    other file is read, and nothing of it is shown unless torchrun's worker wrote it.
    """
    if not _ERROR_FILE.search(facts.error_file or ""):
        return None
    try:
        text = decode_json(read_small(Path(facts.error_file or "")), _ERROR).message.message.strip()
    except (OSError, ValueError):
        return None
    return RankExit(exception=text.splitlines()[0]) if text else None


def process_state(pid: int, start_ticks: int) -> ProcessState:
    """Return the state of a process of this host and namespace. A later process with the same pid does not count."""
    facts = process_facts(pid)
    if facts is None:
        with suppress(OSError, OverflowError):  # there is no /proc, or it hides the processes of other users
            os.close(os.pidfd_open(pid))
            return "unknown"
    if facts is None or facts.state in "ZX" or facts.start_ticks != start_ticks:
        return "dead"
    return "stopped" if facts.state in "Tt" else "running"


def exit_of_zombie(pid: int, start_ticks: int) -> RankExit | None:
    """Return how a process ended whose parent has not asked yet; None where that is not to be known."""
    facts = process_facts(pid)
    if facts is None or facts.state not in "ZX" or facts.start_ticks != start_ticks:
        return None
    code = os.waitstatus_to_exitcode(facts.exit_code)
    if code >= 0:
        return RankExit(exit_code=code)
    try:
        return RankExit(signal=signal.Signals(-code).name)
    except ValueError:
        return RankExit(signal=f"signal {-code}")
