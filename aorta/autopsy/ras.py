"""What NCCL's RAS says of a job's processes, as evidence: from a file, or asked of its port.

    evidence = read_ras("localhost:28028")

RAS numbers ranks by communicator. The global rank of a process is its rank in the largest communicator, if that has all
ranks; else its host and pid tell, where another source names them. RAS may call a job healthy that hangs, so that
nothing follows from a process that answers but that it does. Must not change anything in the job.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from aorta.autopsy.evidence import ProcessState, RankEvidence
from aorta.autopsy.job import UNRESPONSIVE
from aorta.errors import InputError
from aorta.records.files import SMALL_BYTES, decode_json, read_small
from aorta.records.schema import Integer, Rank

_QUESTION: Final = b"SET FORMAT json\nSTATUS\n"
"""The protocol of NCCL's `ncclras` client: lines; the answer of STATUS ends with the connection."""
_ANSWER_S: Final = 30.0
"""Limit for the whole answer. RAS collects for 5 s by default, and longer where processes do not answer."""
_ADDRESS: Final = re.compile(r"[^/]{0,253}:\d{1,5}")
_MISSING_COMMA: Final = re.compile(rb'("nvml_dev": *-?\d+)(\s+"status")')
"""NCCL 2.28 leaves out a comma in `missing_ranks`."""


class _Status(msgspec.Struct):
    unresponsive: bool = False
    considered_dead: bool = False


class _Process(msgspec.Struct):
    rank: Rank
    host: str
    pid: Integer
    status: _Status = msgspec.field(default_factory=_Status)


class _Communicator(msgspec.Struct):
    hash: str
    size: Integer
    ranks: list[_Process] = []
    missing_ranks: list[_Process] = []

    @property
    def everybody(self) -> list[_Process]:
        return [*self.ranks, *self.missing_ranks]


class _Answer(msgspec.Struct):
    communicators: list[_Communicator]


_DECODER: Final = msgspec.json.Decoder(_Answer)


def read_ras(place: str, known: Sequence[RankEvidence] = ()) -> list[RankEvidence]:
    """Read RAS's answer as JSON (NCCL 2.28.7 and later).

    Args:
        place: a file, or `host:port`, which is asked.
        known: other evidence of the job, which may name hosts and pids.

    Raises:
        InputError: nobody answers there, or it is no such answer.
    """
    try:
        content = _query(place) if _ADDRESS.fullmatch(place) and not Path(place).exists() else read_small(Path(place))
    except OSError as error:
        raise InputError(f"--ras {place}: {error.strerror or error}; give a file or HOST:PORT") from error
    begin = content.find(b"{")  # the answer of SET FORMAT stands before it
    try:
        answer = decode_json(_MISSING_COMMA.sub(rb"\1,\2", content[max(begin, 0) :].rstrip(b"\0")), _DECODER)
    except ValueError as error:
        raise InputError(
            f"{place}: not RAS's JSON, which NCCL has since 2.28.7: {error}. It begins {content[:40]!r}"
        ) from error
    ranks = {(one.host, one.pid): one.rank for one in known if one.host is not None and one.pid is not None}
    world = max((one.world_size or 0 for one in known), default=0)
    largest = max(answer.communicators, key=lambda one: one.size, default=None)
    if largest is not None and (not world or largest.size == world):
        ranks = {(one.host, one.pid): one.rank for one in largest.everybody} | ranks
    found: dict[int, RankEvidence] = {}
    for communicator in answer.communicators:
        missing = {(one.host, one.pid) for one in communicator.missing_ranks}
        for one in communicator.everybody:
            rank = ranks.get((one.host, one.pid))
            if rank is None:
                continue
            absent = (one.host, one.pid) in missing
            state: ProcessState = "running" if not absent else "dead" if one.status.considered_dead else "unknown"
            if rank not in found or absent:
                found[rank] = RankEvidence(
                    rank=rank,
                    source="ras",
                    path=f"RAS of {place}",
                    host=one.host,
                    pid=one.pid,
                    state=state,
                    torn=UNRESPONSIVE if absent and state == "unknown" else None,
                )
    return [found[rank] for rank in sorted(found)]


def _query(place: str) -> bytes:
    host, _, port = place.rpartition(":")
    if not port.isdecimal():
        raise InputError(f"--ras {place}: a file, or HOST:PORT as localhost:28028")
    answer, deadline = bytearray(), time.monotonic() + _ANSWER_S
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(_QUESTION)
            while piece := connection.recv(1 << 16):
                answer += piece
                if len(answer) > SMALL_BYTES:
                    raise InputError(f"--ras {place}: the answer is longer than {SMALL_BYTES >> 20} MiB")
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"not whole after {_ANSWER_S:g} s, {len(answer)} bytes")
                connection.settimeout(left_s)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--ras {place}: no answer: {error}. RAS listens on localhost:28028 of every node with NCCL 2.24 or later, "
            "unless NCCL_RAS_ENABLE=0"
        ) from error
    return bytes(answer)
