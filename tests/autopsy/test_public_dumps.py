"""Dumps of the Flight Recorder with fields that torch never updates, each with who holds up the job by construction.

NCCL's fields are as `ProcessGroupNCCL` writes them: messages of a batch share a `p2p_seq_id`, have no events and stay
scheduled; an entry named `coalesced` ends the batch and is updated.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy.evidence import ThreadStack
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from tests.autopsy.test_flight_recorder import dump, entry

Json = dict[str, Any]


class Ring:
    """What one rank issued, in order. `timed`: TORCH_NCCL_ENABLE_TIMING is set."""

    def __init__(self, *, timed: bool = True, backend: str = "nccl") -> None:
        self.entries: list[Json] = []
        self._timed, self._backend = timed, backend
        self._collectives = self._messages = 0

    def _add(self, title: str, state: str, **other: Any) -> None:
        if not self._timed and state == "started":
            state = "scheduled"
        numbers = {"collective_seq_id": self._collectives, "p2p_seq_id": self._messages}
        one = entry(len(self.entries), state, profiling_name=f"{self._backend}:{title}", **numbers)
        if not self._timed:
            one["time_discovered_started_ns"] = None
        self.entries.append({**one, **other})

    def reduced(self, state: str = "completed", **other: Any) -> Ring:
        self._collectives += 1
        self._add("all_reduce", state, **other)
        return self

    def exchanged(self, *messages: str, state: str = "completed") -> Ring:
        """A batch of sends and receives."""
        self._messages += 1
        for text in messages:
            self._add(text, "scheduled", is_p2p=True, retired=False)
        self._add("coalesced", state)
        return self

    def gathered(self, state: str = "completed") -> Ring:
        """Three all-gathers as one: their own events are never recorded, so that they seem to have ended at once."""
        self._collectives += 1
        for _ in range(3):
            self._add("_all_gather_base", "completed")
        self._add("coalesced", state)
        return self

    def dumped(self, ranks: int, **other: Any) -> Json:
        return dump(self.entries, ranks, **other)


@dataclass
class DumpCase:
    """Dumps of all ranks, and the right answer.

    Attributes:
        dumps: one per rank.
        kind: of the verdict.
        culprits: rank -> why.
        stacks: rank -> the innermost frames of its main thread.
    """

    name: str
    dumps: Sequence[Json]
    kind: str
    culprits: dict[int, str]
    stacks: dict[int, tuple[str, ...]] | None = None

    def wrong(self) -> str | None:
        """Return what is wrong with AORTA's answer; None where it is right."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, one in enumerate(self.dumps):
                (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(one))
            evidence = read_dumps([Path(folder)])
        for rank, frames in (self.stacks or {}).items():
            evidence[rank].stacks = [ThreadStack(name="MainThread", frames=frames)]
        verdict = judge(evidence)
        seen = {one.rank: one.reason for one in verdict.culprits}
        right = verdict.kind == self.kind and seen == self.culprits
        return None if right else f"{verdict.kind} {seen}"


_TO, _BOTH, _FROM = ("send 0->1",), ("recv 1<-0", "send 1->2"), ("recv 2<-1",)
"""A batch of each of three stages."""


def _stages(*batches: int, last: str = "completed", timed: bool = True) -> list[Ring]:
    """Three stages that issued so many batches; the newest of all is in the state `last`."""
    rings = [Ring(timed=timed) for _ in batches]
    for ring, messages, count in zip(rings, (_TO, _BOTH, _FROM), batches, strict=True):
        for number in range(count):
            ring.exchanged(*messages, state=last if number == max(batches) - 1 else "completed")
    return rings


def _around(*, skips: int | None) -> list[Ring]:
    """Four ranks that exchange halos with both neighbours; one does not issue the third exchange."""
    rings = []
    for rank in range(4):
        ring, up, down = Ring(), (rank + 1) % 4, (rank - 1) % 4
        for number in range(3):
            waits = number == 2 and skips in (up, down)
            if number < 2 or rank != skips:
                texts = (f"send {rank}->{up}", f"recv {rank}<-{down}", f"send {rank}->{down}", f"recv {rank}<-{up}")
                ring.exchanged(*texts, state="started" if waits else "completed")
        rings.append(ring.reduced("started") if rank != skips and skips not in (up, down) else ring)
    return rings


def _all(rings: Sequence[Ring], **other: Any) -> list[Json]:
    return [ring.dumped(len(rings), **other) for ring in rings]


def _behind(rings: list[Ring], *, skips: int) -> list[Ring]:
    return [ring if rank == skips else ring.reduced("started") for rank, ring in enumerate(rings)]


def _gloo(*, skips: int | None) -> list[Json]:
    """Gloo has no version, and its work stays scheduled; `retired` says that it has ended."""
    rings = [Ring(backend="gloo", timed=False) for _ in range(3)]
    for rank, ring in enumerate(rings):
        for _ in range(4):
            ring.reduced("scheduled", retired=True)
        if skips is not None and rank != skips:
            ring.reduced("scheduled", retired=False)
    return _all(rings, comm_lib_version="", pg_status={})


def _without_entries(number: int) -> Json:
    """A dump of unfinished work alone, of a rank that has none: the status has the number of its last message."""
    return dump([], 2, pg_status={"0": {"last_completed_collective": number}})


_RING = "/torch/distributed/distributed_c10d.py:2200 destroy_process_group"
DUMPS = [
    DumpCase("batches that have ended", _all(_stages(4, 4, 4)), "not_stuck", {}),
    DumpCase(
        "an all-reduce behind ended batches is not issued",
        _all(_behind(_stages(2, 2, 2), skips=1)),
        "rank_did_not_join",
        {1: "has not issued all_reduce 0 of the default group"},
    ),
    DumpCase(
        "a stage sends no third batch",
        _all(_stages(2, 3, 3, last="started")),
        "rank_did_not_join",
        {0: "has not issued send 2 of the default group (to rank 1)"},
    ),
    DumpCase(
        "an exchange with both neighbours is not issued",
        _all(_around(skips=2)),
        "rank_did_not_join",
        {2: "has not issued recv 2 of the default group (from rank 1)"},
    ),
    DumpCase(
        "all-gathers issued as one, whose own events are never recorded",
        _all([Ring().gathered().gathered("started"), Ring().gathered(), Ring().gathered().gathered("started")]),
        "rank_did_not_join",
        {1: "has not issued all_gather 1 of the default group"},
    ),
    DumpCase("starts that no rank notes", _all(_stages(3, 3, 3, last="started", timed=False)), "stuck_inside", {}),
    DumpCase(
        "starts that one rank notes",
        _all([Ring().reduced().reduced("started"), *(Ring(timed=False).reduced().reduced("started") for _ in "ab")]),
        "stuck_inside",
        {},
    ),
    DumpCase(
        "gloo's work that stays scheduled",
        _gloo(skips=2),
        "rank_did_not_join",
        {2: "has not issued all_reduce 4 of the default group"},
    ),
    DumpCase(
        "a status that counts messages",
        [Ring().exchanged("send 0->1").reduced("started").dumped(2), _without_entries(9)],
        "rank_did_not_join",
        {1: "has not issued all_reduce 0 of the default group"},
    ),
    DumpCase(
        "a rank in destroy_process_group",
        _all(_behind([Ring().reduced() for _ in range(3)], skips=0)),
        "stuck_outside",
        {0: "is in destroy_process_group and has not issued all_reduce 1 of the default group"},
        stacks={0: (_RING, "/home/me/train.py:9 main")},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in DUMPS])
def test_the_verdict_is_right(case: DumpCase) -> None:
    assert case.wrong() is None
