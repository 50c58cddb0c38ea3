"""Why a job hangs on a device: what was scheduled is told from what has started, and no healthy rank is accused.

As a program (`python -m`) two ranks hang by a named fault, and rank 0 takes the evidence while they do. Enters: a
folder, and the fault of rank 1. Leaves: `evidence.json`, of the progress files, and a dump of each rank, in the shape
of NCCL's Flight Recorder, whose states are the device's own account.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.autopsy.evidence import RankEvidence, Verdict
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.distributed.topology import read_topology
from tests.autopsy.test_flight_recorder import dump, entry
from tests.simulated import device as simulated
from tests.simulated.programs import launched, needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
STEPS = 4
ELEMENTS = 8
LONG_NS = 600_000_000_000
SETTLES_S = 1.0
"""After the last launch, for streams to come to where they stay."""


def hung(fault: str, folder: Path) -> tuple[Verdict, Verdict]:
    """What the progress files lead to, taken while two ranks hung; and these with the rings."""
    launched("tests.device_path.test_hang", str(folder), fault)
    evidence = msgspec.json.decode((folder / "evidence.json").read_bytes(), type=list[RankEvidence])
    assert [one.state for one in evidence] == ["running"] * 2
    assert all(one.device_seen_ns is not None for one in evidence)
    rings = read_dumps([folder / f"trace_{rank}" for rank in range(2)])
    return judge(evidence), judge([*evidence, *rings])


def test_a_rank_that_never_enqueues_is_accused(tmp_path: Path) -> None:
    files, both = hung("never_enqueued", tmp_path)
    for verdict in (files, both):
        (one,) = verdict.culprits
        assert (one.rank, one.kind, one.rule) == (1, "stuck_outside", "behind_its_peers")
        assert one.collective is not None
        assert one.collective.number == 3
    assert [(wait.ranks, wait.for_ranks) for wait in both.waits] == [([0], [1])]
    assert both.contradictions == []


def test_a_rank_whose_kernel_waits_on_its_stream_for_another_is_accused(tmp_path: Path) -> None:
    for verdict in hung("stuck_before", tmp_path):
        (one,) = verdict.culprits
        assert (one.rank, one.kind) == (1, "rank_did_not_join")
        assert "its device has not begun it; rank 0 began it" in one.reason
        assert [(wait.ranks, wait.for_ranks) for wait in verdict.waits] == [([0], [1])]


def test_a_kernel_that_is_stuck_on_all_ranks_accuses_nobody(tmp_path: Path) -> None:
    files, both = hung("stuck_inside", tmp_path)
    assert (files.kind, files.culprits) == ("stuck_inside", [])
    assert (both.kind, both.culprits, both.contradictions) == ("stuck_inside", [], [])
    assert [wait.collective.number for wait in both.waits] == [3]


class Issued(NamedTuple):
    """An all-reduce of all ranks: torch's number, and when the host issued it."""

    sequence: int
    issued_ns: int


def main(folder: Path, fault: str) -> None:
    """Train; hang in the last step; leave the evidence, and end at once."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = nn.Linear(ELEMENTS, ELEMENTS).to(device)
    issued: list[Issued] = []
    threading.Thread(target=leave, args=(folder, topology.rank, device, fault, issued), daemon=True).start()
    all_reduce(torch.ones(ELEMENTS, device=device), issued)  # before AORTA counts
    with aorta.record(folder / "run", model=model, watchdog_timeout_s=0) as recording:
        for step in range(STEPS):
            y = model(torch.ones(ELEMENTS, device=device)).detach()
            if step == STEPS - 1:
                hang_before(fault, topology.rank)
            all_reduce(y, issued)
            if step == STEPS - 1:
                time.sleep(600)
            torch.cuda.synchronize()
            recording.step()


def hang_before(fault: str, rank: int) -> None:
    """What rank 1, or each, does in place of joining in order."""
    if fault == "stuck_inside":
        simulated.dead_peer()
    elif rank == 1 and fault == "never_enqueued":
        time.sleep(600)
    elif rank == 1:  # a kernel before it on its stream does not end
        simulated.real_delays(sleep_ns=LONG_NS)
        torch.cuda._sleep(LONG_NS)  # type: ignore[no-untyped-call]


def all_reduce(y: torch.Tensor, issued: list[Issued]) -> None:
    """One that NCCL's ring would have a row of."""
    issued_ns = simulated.host_ns()
    dist.all_reduce(y)
    group: Any = dist.group.WORLD
    issued.append(Issued(int(group._get_backend(y.device)._get_sequence_number_for_group()), issued_ns))


def leave(folder: Path, rank: int, device: torch.device, fault: str, issued: list[Issued]) -> None:
    """Once both hosts are where they stay, and nothing moves, write the evidence and end."""
    last = STEPS if (fault, rank) == ("never_enqueued", 1) else 1 + STEPS
    while len(issued) < last:
        time.sleep(0.05)
    meet(folder, rank, "issued")
    time.sleep(SETTLES_S)
    queues = [queue for (on, _), queue in simulated.pending().items() if on == device.index]
    rows = []
    for one in issued:
        state = state_of(f"allreduce {one.sequence} of group 0", queues)
        sizes = {"input_sizes": [[ELEMENTS]], "output_sizes": [[ELEMENTS]]}
        rows.append(entry(one.sequence - 1, state, time_created_ns=one.issued_ns, **sizes))
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump(rows)))
    if rank == 0:
        evidence = progress_evidence(folder / "run", saved=False)
        (folder / "evidence.json").write_bytes(msgspec.json.encode(evidence))
    meet(folder, rank, "written")
    os._exit(0)


def state_of(kernel: str, queues: list[list[str]]) -> str:
    """What a kernel is for NCCL's ring: the first of its stream's queue has started."""
    if any(queue[0] == kernel for queue in queues):
        return "started"
    return "scheduled" if any(kernel in queue for queue in queues) else "completed"


def meet(folder: Path, rank: int, what: str) -> None:
    """Wait until both ranks have arrived."""
    (folder / f"{what}_{rank}").touch()
    while len(list(folder.glob(f"{what}_*"))) < 2:
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
