"""The evidence of a run, of dumps and of NCCL's RAS, whatever there is, and the verdict on it as text and in the run's
folder.

    evidence = [*evidence_of([folder]), *read_ras("localhost:28028")]
    write_verdict(folder, verdict_on_run(folder))    # autopsy/autopsy.json and autopsy/autopsy.txt

The text has 80 columns: the answer, who is accused and why, who waits for whom, what every rank does (those that do the
same share a line), and what to do next. Must not change or wake a rank unless its stacks are asked for, or load torch.
"""

from __future__ import annotations

import re
import socket
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from aorta.autopsy.evidence import (
    ENDED_IN_ORDER,
    UNRESPONSIVE,
    ProcessState,
    RankDoing,
    RankEvidence,
    Verdict,
    WaitingRanks,
)
from aorta.autopsy.flight_recorder import no_evidence, read_dumps
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.command_line import name_ranks, rounded_time
from aorta.errors import SIGNAL_EXIT_BASE, InputError
from aorta.records.files import SMALL_BYTES, decode_json, json_text, read_small, write_whole
from aorta.records.progress import PROGRESS_DIR
from aorta.records.run_files import AUTOPSY_DIR
from aorta.records.schema import Integer, Rank
from aorta.terminal_style import LEAST_WIDTH, PLAIN, Style

STUCK_AFTER_S: Final = 10.0
"""A recorded rank that made progress within so many seconds is not stuck: the watchdog's least timeout."""
WATCHED_AFTER_S: Final = 1.0
"""The same of evidence that a watchdog saved when its timeout, which may be shorter than that, was over."""
JSON_FILE: Final = "autopsy.json"
TEXT_FILE: Final = "autopsy.txt"
_VERDICT: Final = msgspec.json.Decoder(Verdict)
_MOST_LINES: Final = 6
"""Of waits, and of ranks: more are counted, and in the JSON."""
_GOOD: Final = ("not_stuck", "slow")


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
            raise InputError(f"{no_evidence(paths[0])} (--live looks at a recorded run of this host)")
        return read_dumps(paths)
    if len(runs) > 1:
        raise InputError(f"{runs[0]} and {runs[1]}: two runs; give one")
    evidence = progress_evidence(runs[0], stacks=live, saved=not live)
    others = [path for path in paths if path != runs[0]]
    return [*evidence, *(read_dumps(others) if others else [])]


def verdict_on(evidence: Sequence[RankEvidence], *, watched: bool) -> Verdict:
    """Judge evidence. Where it has ages, a rank that moved shortly before shows that nothing is stuck.

    Args:
        watched: the evidence was saved by a watchdog, which has waited already, unless a process ended or failed.
    """
    waited = watched and not any(map(_is_reported_at_once, evidence))
    return judge(evidence, stuck_after_s=WATCHED_AFTER_S if waited else STUCK_AFTER_S)


def _is_reported_at_once(entry: RankEvidence) -> bool:
    """Return whether the process ended or failed, but not in order or as a signal asked it to."""
    code = None if entry.exit is None else entry.exit.exit_code
    asked = (code or 0) >= SIGNAL_EXIT_BASE
    return not asked and (entry.state == "dead" or (entry.exit is not None and code != 0))


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
    write_whole(output / JSON_FILE, as_json(verdict))
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


def as_json(verdict: Verdict) -> str:
    """Return the document that `docs/schemas/autopsy-1.schema.json` describes."""
    return json_text(msgspec.to_builtins(verdict))


def verdict_text(verdict: Verdict, style: Style = PLAIN, *, stacks: bool = False) -> str:
    """Return the text for the terminal.

    Args:
        stacks: show the stacks of each rank that left some, those of its main thread first.
    """

    def wrapped(text: str, indent: str = "  ") -> list[str]:
        return textwrap.wrap(text, LEAST_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")

    def limited(sentences: Sequence[str]) -> list[str]:
        shown = [line for sentence in sentences[:_MOST_LINES] for line in wrapped(sentence)]
        more = [f"  and {len(sentences) - _MOST_LINES} more; see --json"]
        return shown + (more if len(sentences) > _MOST_LINES else [])

    word = verdict.kind.replace("_", " ")
    lines = [style.bold(word) if verdict.kind in _GOOD else style.error(word), *wrapped(verdict.summary)]
    accused = list[str]()
    for culprit in verdict.culprits:
        aspect = f" of {culprit.aspect}" if culprit.aspect else ""
        accused += wrapped(f"rank {culprit.rank}: {culprit.kind.replace('_', ' ')}{aspect} (rule {culprit.rule})")
        accused += [line for sentence in culprit.evidence for line in wrapped(sentence, "    ")]
    alike: dict[tuple[str, str, int | None], list[RankDoing]] = {}
    for rank in verdict.ranks:
        alike.setdefault((rank.doing, rank.state, rank.step), []).append(rank)
    ranks = []
    for (doing, state, step), several in alike.items():
        # How a rank ended says more than that its process is gone.
        parts = [doing] if state in ("unknown", doing) or doing == ENDED_IN_ORDER else [state, doing]
        parts += [f"step {step}"] if step is not None else []
        since_s = max((rank.since_s for rank in several if rank.since_s is not None), default=None)
        ranks.append(f"{name_ranks([rank.rank for rank in several])}: {', '.join(parts)}{_time(since_s)}")
    blocks = {
        "accused": accused,
        "waiting": limited([waiting_sentence(wait) for wait in verdict.waits]),
        "ranks": limited(ranks) + ([f"  no evidence of {name_ranks(verdict.missing)}"] if verdict.missing else []),
        "sources disagree": [line for sentence in verdict.contradictions for line in wrapped(sentence)],
        "limits": [line for sentence in verdict.notes for line in wrapped(sentence)],
        "next": [line for sentence in verdict.next for line in wrapped(sentence)],
        "stacks": list[str](),
    }
    for rank in verdict.ranks if stacks else ():
        threads = [(f"rank {rank.rank}", rank.stack)] if rank.stack else []
        threads += [(f"rank {rank.rank}, thread {stack.name}", list(stack.frames)) for stack in rank.other_stacks]
        for thread, frames in threads:
            blocks["stacks"] += [f"  {thread}", *(f"    {frame}" for frame in frames)]
    for heading, block in blocks.items():
        lines += [heading, *block] if block else []
    return "\n".join(lines)


def waiting_sentence(wait: WaitingRanks) -> str:
    """Return who waits for whom, in which collective, and for how long."""
    for_whom = f" for {name_ranks(wait.for_ranks)}" if wait.for_ranks else ""
    verb = "waits" if len(wait.ranks) == 1 else "wait"
    size = "" if wait.collective.bytes is None else f" ({wait.collective.bytes:,} bytes)"
    return f"{name_ranks(wait.ranks)} {verb}{for_whom} in {wait.collective}{size}{_time(wait.since_s)}"


def _time(seconds: float | None) -> str:
    return f", for {rounded_time(seconds)}" if seconds is not None else ""


_QUESTION: Final = b"SET FORMAT json\nSTATUS\n"
"""The protocol of NCCL's `ncclras` client: lines; the answer of STATUS ends with the connection."""
_ANSWER_S: Final = 30.0
"""Limit for the whole answer. RAS collects for 5 s by default, and longer where processes do not answer."""
_ADDRESS: Final = re.compile(r"[^/]{0,253}:\d{1,5}")
_MISSING_COMMA: Final = re.compile(rb'("nvml_dev": *-?\d+)(\s+"status")')
"""NCCL 2.28 leaves out a comma in `missing_ranks`."""


class _RasStatus(msgspec.Struct):
    considered_dead: bool = False


class _RasProcess(msgspec.Struct):
    rank: Rank
    host: str
    pid: Integer
    status: _RasStatus = msgspec.field(default_factory=_RasStatus)


class _Communicator(msgspec.Struct):
    size: Integer
    ranks: list[_RasProcess] = []
    missing_ranks: list[_RasProcess] = []


class _Answer(msgspec.Struct):
    communicators: list[_Communicator]


_RAS_ANSWER: Final = msgspec.json.Decoder(_Answer)


def read_ras(source: str, known: Sequence[RankEvidence] = ()) -> list[RankEvidence]:
    """Read what NCCL's RAS says of a job's processes, as JSON (NCCL 2.28.7 and later).

    RAS numbers ranks by communicator. The global rank of a process is its rank in the largest communicator, if that has
    all ranks; else its host and pid tell, where another source names them. RAS may call a job healthy that hangs, so
    that a process which answers shows no more than that it does.

    Args:
        source: a file, or `host:port`, which is asked.
        known: other evidence of the job, which may name hosts and pids.

    Raises:
        InputError: there is no answer, or it is not RAS's.
    """
    try:
        content = (
            _query(source) if _ADDRESS.fullmatch(source) and not Path(source).exists() else read_small(Path(source))
        )
    except OSError as error:
        raise InputError(f"--ras {source}: {error.strerror or error}; give a file or HOST:PORT") from error
    begin = content.find(b"{")  # the answer of SET FORMAT stands before it
    try:
        answer = decode_json(_MISSING_COMMA.sub(rb"\1,\2", content[max(begin, 0) :].rstrip(b"\0")), _RAS_ANSWER)
    except ValueError as error:
        raise InputError(
            f"{source}: not RAS's JSON, which NCCL has since 2.28.7: {error}. It begins {content[:40]!r}"
        ) from error
    ranks = {(entry.host, entry.pid): entry.rank for entry in known if None not in (entry.host, entry.pid)}
    world = max((entry.world_size or 0 for entry in known), default=0)
    largest = max(answer.communicators, key=lambda communicator: communicator.size, default=None)
    if largest is not None and (not world or largest.size == world):
        for process in largest.ranks + largest.missing_ranks:
            ranks.setdefault((process.host, process.pid), process.rank)
    by_rank: dict[int, RankEvidence] = {}
    for communicator in answer.communicators:
        absent = {(process.host, process.pid) for process in communicator.missing_ranks}
        for process in communicator.ranks + communicator.missing_ranks:
            at = process.host, process.pid
            if at in ranks and (ranks[at] not in by_rank or at in absent):
                without_answer: ProcessState = "dead" if process.status.considered_dead else "unknown"
                entry = RankEvidence(rank=ranks[at], source="ras", path=f"RAS of {source}", host=at[0], pid=at[1])
                entry.state = without_answer if at in absent else "running"
                entry.torn = UNRESPONSIVE if entry.state == "unknown" else None
                by_rank[entry.rank] = entry
    return [by_rank[rank] for rank in sorted(by_rank)]


def _query(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    answer, deadline = bytearray(), time.monotonic() + _ANSWER_S
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(_QUESTION)
            while piece := connection.recv(1 << 16):
                answer += piece
                if len(answer) > SMALL_BYTES:
                    raise InputError(f"--ras {address}: the answer is longer than {SMALL_BYTES >> 20} MiB")
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"incomplete after {_ANSWER_S:g} s, {len(answer)} bytes")
                connection.settimeout(left_s)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--ras {address}: no answer: {error}. RAS listens on localhost:28028 of every node with NCCL 2.24 or "
            "later, unless NCCL_RAS_ENABLE=0"
        ) from error
    return bytes(answer)
