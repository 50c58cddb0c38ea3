"""A pipeline of four stages, healthy or with a fault, that leaves dumps as torch with NCCL would (a program).

Enters: a folder, a fault, and `batched` or `unbatched` messages. Leaves: `timed/trace_<rank>` and `untimed/...`, dumps
with and without TORCH_NCCL_ENABLE_TIMING, and `stack_<rank>.json`, the frames of the main thread. Run by
`test_pipeline_hang`.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from aorta.distributed.topology import read_topology
from tests.autopsy.test_flight_recorder import dump, entry
from tests.simulated import device as simulated

STAGES = 4
STEPS = 3
MICROBATCHES = 3
ELEMENTS = 8
AT_FAULT = 2
"""The rank that departs in the last step."""
LONG_NS = 600_000_000_000
SETTLES_S = 1.5
"""After the last launch, for streams to come to where they stay."""


class Message(NamedTuple):
    """A send or receive of this rank."""

    sends: bool
    peer: int


class FlightRecorder:
    """Records what a rank issues in the form of torch 2.13's ProcessGroupNCCL.

    Messages of a batch have one `p2p_seq_id` and no events, so that they stay scheduled. The entry that ends the batch
    has the events and, as `initWork` takes it from the operation's type, `is_p2p` false and the `collective_seq_id` of
    the collective before it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entries: list[dict[str, Any]] = []
        self.kernels: list[str | None] = []
        self.sequence: dict[str, dict[str, int]] = defaultdict(lambda: {"collective": 0, "p2p": 0})

    def record(self, group: Any, title: str, kernel: str | None, *, is_p2p: bool, elements: int = ELEMENTS) -> None:
        """Add an entry; `kernel` is the simulated device's name of what its events stand around."""
        name, numbers = group.group_name, self.sequence[group.group_name]
        shapes = [[elements]] if elements else []
        self.entries.append(
            entry(
                len(self.entries),
                "scheduled",
                pg_id=int(name),
                process_group=(name, group.group_desc),
                collective_seq_id=numbers["collective"],
                p2p_seq_id=numbers["p2p"],
                profiling_name=f"nccl:{title}",
                time_created_ns=time.time_ns(),
                input_sizes=shapes,
                output_sizes=shapes,
                is_p2p=is_p2p,
            )
        )
        self.kernels.append(kernel)

    def all_reduce(self, group: Any, tensor: torch.Tensor) -> None:
        """All-reduce, waited for by the current stream."""
        numbers = self.sequence[group.group_name]
        numbers["collective"] += 1
        kernel = f"allreduce {numbers['collective']} of group {group.group_name}"
        self.record(group, "all_reduce", kernel, is_p2p=False)
        dist.all_reduce(tensor, group=group)

    def exchange(self, group: Any, messages: list[Message], *, batched: bool) -> None:
        """Send and receive, waited for by the current stream."""
        if not messages:
            return
        numbers, works = self.sequence[group.group_name], []
        tensors = [torch.ones(ELEMENTS, device="cuda") for _ in messages]
        for at, one in enumerate(messages):
            numbers["p2p"] += not batched or at == 0
            kind = "send" if one.sends else "recv"
            kernel = None if batched else f"{kind} {numbers['p2p']} of group {group.group_name}"
            title = f"{kind} {self.rank}{'->' if one.sends else '<-'}{one.peer}"
            self.record(group, title, kernel, is_p2p=True)
            if not batched:
                issue = dist.isend if one.sends else dist.irecv
                works.append(issue(tensors[at], one.peer, group))
        if batched:
            kernel = f"coalesced {numbers['p2p']} of group {group.group_name}"
            self.record(group, "coalesced", kernel, is_p2p=False, elements=0)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend if one.sends else dist.irecv, tensor, one.peer, group)
                    for one, tensor in zip(messages, tensors, strict=True)
                ]
            )
        for work in works:
            work.wait()

    def dump(self, device: int, groups: list[Any], *, timed: bool) -> dict[str, Any]:
        """Return the dump: an entry's state is what the simulated device says of its kernel."""
        queues = [queue for (on, _), queue in simulated.pending().items() if on == device]
        entries, status = [], {}
        for one, kernel in zip(self.entries, self.kernels, strict=True):
            state = "scheduled" if kernel is None else _state(kernel, queues)
            started = timed and state != "scheduled"
            entries.append(
                {
                    **one,
                    "state": "scheduled" if state == "started" and not timed else state,
                    "time_discovered_started_ns": one["time_created_ns"] + 1 if started else None,
                    "time_discovered_completed_ns": one["time_created_ns"] + 2 if state == "completed" else None,
                    "retired": state == "completed",
                }
            )
            if kernel is not None:  # what torch calls a work; messages and collectives overwrite each other's numbers
                is_message = kernel.startswith(("send", "recv", "coalesced"))
                number = one["p2p_seq_id" if is_message else "collective_seq_id"]
                of_group = status.setdefault(
                    str(one["pg_id"]), {f"last_{what}_collective": -1 for what in ("enqueued", "started", "completed")}
                )
                of_group["last_enqueued_collective"] = number
                if started:
                    of_group["last_started_collective"] = number
                if state == "completed":
                    of_group["last_completed_collective"] = number
        config = {
            group.group_name: {
                "name": group.group_name,
                "desc": group.group_desc,
                "ranks": str(dist.get_process_group_ranks(group)),
            }
            for group in groups
        }
        return dump(entries, pg_config=config, pg_status=status)


def _state(kernel: str, queues: list[list[str]]) -> str:
    """Return what events around a kernel say: the first of its stream's queue has started."""
    if any(queue and queue[0] == kernel for queue in queues):
        return "started"
    return "scheduled" if any(kernel in queue for queue in queues) else "completed"


def main() -> None:
    """Train; hang in the last step; leave the dumps, and end at once."""
    folder, fault, batched = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "batched"
    topology = read_topology()
    rank = topology.rank
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    stages: Any = dist.group.WORLD
    data: Any = dist.new_group(list(range(STAGES)), group_desc="dp")
    alone: Any = dist.new_group([AT_FAULT], group_desc="alone")
    groups = [stages, data, *([alone] if rank == AT_FAULT else [])]
    recorder = FlightRecorder(rank)
    arguments = (folder, rank, device, recorder, groups, threading.main_thread().ident)
    threading.Thread(target=leave, args=arguments, daemon=True).start()
    for step in range(STEPS):
        own = fault if rank == AT_FAULT and step == STEPS - 1 else "none"
        for at, messages in enumerate(schedule(rank)):
            if own == "stays_before_sending" and at == MICROBATCHES:
                time.sleep(LONG_NS / 1e9)
            if own == "does_not_send":
                messages = [one for one in messages if not (one.sends and at == MICROBATCHES)]
            if own == "does_not_receive":
                messages = [one for one in messages if one.sends or at != MICROBATCHES - 1]
            recorder.exchange(stages, messages, batched=batched)
        if own == "leaves":  # its device is busy, for which `destroy_process_group` waits
            simulated.real_delays(sleep_ns=LONG_NS)
            torch.cuda._sleep(LONG_NS)  # type: ignore[no-untyped-call]
            recorder.all_reduce(alone, torch.ones(ELEMENTS, device=device))
            dist.destroy_process_group()
        if own == "stuck_inside":
            simulated.dead_peer(data)
        if own != "skips_the_all_reduce":
            recorder.all_reduce(data, torch.ones(ELEMENTS, device=device))
        if step < STEPS - 1:
            torch.cuda.synchronize()
    time.sleep(LONG_NS / 1e9)


def schedule(stage: int) -> list[list[Message]]:
    """Return the batches of a step: each receives one microbatch and sends the one before it."""
    batches = []
    for at in range(MICROBATCHES + 1):
        receives = [Message(sends=False, peer=stage - 1)] if stage > 0 and at < MICROBATCHES else []
        sends = [Message(sends=True, peer=stage + 1)] if stage < STAGES - 1 and at > 0 else []
        batches.append(receives + sends)
    return batches


def leave(
    folder: Path, rank: int, device: torch.device, recorder: FlightRecorder, groups: list[Any], main_thread: int
) -> None:
    """Once nothing is issued or moves any more, write the dumps and end."""
    last, since = (-1, ""), time.monotonic()
    while time.monotonic() - since < SETTLES_S or not recorder.sequence:
        now = (len(recorder.entries), str(simulated.pending()))
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    meet(folder, rank, "settled")
    for name in ("timed", "untimed"):
        (folder / name).mkdir(exist_ok=True)
        content = recorder.dump(device.index, groups, timed=name == "timed")
        (folder / name / f"trace_{rank}").write_bytes(pickle.dumps(content))
    frames = traceback.extract_stack(sys._current_frames()[main_thread])
    (folder / f"stack_{rank}.json").write_text(
        json.dumps([f"{one.filename}:{one.lineno} {one.name}" for one in reversed(frames)])
    )
    meet(folder, rank, "written")
    os._exit(0)


def meet(folder: Path, rank: int, what: str) -> None:
    """Wait until all ranks have arrived."""
    (folder / f"{what}_{rank}").touch()
    while len(list(folder.glob(f"{what}_*"))) < STAGES:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
