"""Why a job hangs on a device: what was scheduled is told from what has started, and no healthy rank is accused.

As a program (`python -m`) two ranks hang by one fault after another, and rank 0 takes the evidence while they do.
Enters: a folder. Leaves, in a folder for each fault, `evidence.json`, of the progress files, and a dump of each rank,
in the shape of NCCL's Flight Recorder, whose states are the device's own account.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

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
FAULTS = ("never_enqueued", "stuck_before", "stuck_inside")
"""Of rank 1; the last one of both, whose group stays stuck."""
SETTLES_S = 1.0
"""After the last launch, for streams to come to where they stay."""
Hung = dict[str, tuple[Verdict, Verdict]]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Hung:
    """By fault what the progress files lead to, taken while two ranks hung; and these with the rings."""
    verdicts, root = {}, tmp_path_factory.mktemp("hang")
    launched("tests.device_path.test_hang", str(root))
    for fault in FAULTS:
        evidence = msgspec.json.decode((root / fault / "evidence.json").read_bytes(), type=list[RankEvidence])
        assert [one.state for one in evidence] == ["running"] * 2
        assert all(one.device_seen_ns is not None for one in evidence)
        rings = read_dumps([root / fault / f"trace_{rank}" for rank in range(2)])
        verdicts[fault] = judge(evidence), judge([*evidence, *rings])
    return verdicts


def test_a_rank_that_never_enqueues_is_accused(hung: Hung) -> None:
    for verdict in hung["never_enqueued"]:
        (one,) = verdict.culprits
        assert (one.rank, one.kind, one.rule) == (1, "stuck_outside", "behind_its_peers")
        assert one.collective is not None
        assert one.collective.number == 3
    assert [(wait.ranks, wait.for_ranks) for wait in verdict.waits] == [([0], [1])]
    assert verdict.contradictions == []


def test_a_rank_whose_kernel_waits_on_its_stream_for_another_is_accused(hung: Hung) -> None:
    for verdict in hung["stuck_before"]:
        (one,) = verdict.culprits
        assert (one.rank, one.kind) == (1, "rank_did_not_join")
        assert "its device has not begun it; rank 0 began it" in one.reason
        assert [(wait.ranks, wait.for_ranks) for wait in verdict.waits] == [([0], [1])]


def test_a_kernel_that_is_stuck_on_all_ranks_accuses_nobody(hung: Hung) -> None:
    for verdict in hung["stuck_inside"]:
        assert (verdict.kind, verdict.culprits, verdict.contradictions) == ("stuck_inside", [], [])
    assert [wait.collective.number for wait in verdict.waits] == [3]


Issued = list[tuple[int, int]]
"""Of each all-reduce of all ranks torch's number, and when the host issued it."""


def main(root: Path) -> None:
    """Train, and hang in the last step, by one fault after another; end at once."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    alone = dist.new_group([1])
    model = nn.Linear(ELEMENTS, ELEMENTS).to(device)
    issued: Issued = []
    for fault in FAULTS:
        all_reduce(torch.ones(ELEMENTS, device=device), issued)  # before AORTA counts
        with aorta.record(root / fault / "run", model=model, watchdog_timeout_s=0) as recording:
            for step in range(STEPS):
                y = model(torch.ones(ELEMENTS, device=device)).detach()
                if step < STEPS - 1:
                    all_reduce(y, issued)
                else:
                    hang(fault, topology.rank, y, alone, root / fault, issued)
                torch.cuda.synchronize()
                recording.step()


def hang(fault: str, rank: int, y: torch.Tensor, alone: Any, folder: Path, issued: Issued) -> None:
    """Join an all-reduce unless rank 1, or each, has something else to do; leave the evidence, and go on.

    Args:
        alone: the group of rank 1 by itself.
    """
    is_late, is_behind = (rank == 1 and fault == name for name in FAULTS[:2])
    if fault == "stuck_inside":
        simulated.dead_peer()
    elif is_behind:  # a kernel before it on its stream does not end; nobody sees that
        simulated.dead_peer(alone)
        alone._get_backend(y.device).allreduce([torch.ones_like(y)]).wait()
    if not is_late:
        all_reduce(y, issued)
    leave(folder, rank, y.device, issued)
    if fault == "stuck_inside":
        os._exit(0)
    if is_behind:
        alone._get_backend(y.device).abort()
    if is_late:
        all_reduce(y, issued)


def all_reduce(y: torch.Tensor, issued: Issued) -> None:
    """One that NCCL's ring would have a row of."""
    issued_ns = simulated.host_ns()
    dist.all_reduce(y)
    group: Any = dist.group.WORLD
    issued.append((int(group._get_backend(y.device)._get_sequence_number_for_group()), issued_ns))


def leave(folder: Path, rank: int, device: torch.device, issued: Issued) -> None:
    """Once both hosts are where they stay, and nothing moves, write the evidence."""
    meet(folder, rank, "issued")
    time.sleep(SETTLES_S)
    queues = [queue for (on, _), queue in simulated.pending().items() if on == device.index]
    rows = []
    for sequence, issued_ns in issued:
        state = state_of(f"allreduce {sequence} of group 0", queues)
        sizes = {"input_sizes": [[ELEMENTS]], "output_sizes": [[ELEMENTS]]}
        rows.append(entry(sequence - 1, state, time_created_ns=issued_ns, **sizes))
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump(rows)))
    if rank == 0:
        evidence = progress_evidence(folder / "run", saved=False)
        (folder / "evidence.json").write_bytes(msgspec.json.encode(evidence))
    meet(folder, rank, "written")


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
    main(Path(sys.argv[1]))
