"""K1 and K3 (docs/dev/measuring.md) on the simulated device: lengths that are known by construction, to the
nanosecond."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from aorta.analysis.dataframes import collectives_frame
from aorta.config.fabric import EmulatedFabric
from aorta.distributed.topology import Topology
from aorta.instrument.dispatcher import all_groups
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import emulated_ranks
from aorta.read.record import load_run
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.device_path.agreement import clipped, length
from tests.device_path.trainings import lengths, looped
from tests.known_answers.program import VALUES, build, recording
from tests.known_answers.test_pipeline import TABLE, flow_shop
from tests.runs import record
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
WARM_UP, STEPS = 2, 16
MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe")
C_NS, D_NS = 500_000, 300_000
LATE_NS = (0, 120_000, 700_000)
BLOCKS = 5


class Case(NamedTuple):
    """`way`: ddp (a bucket a block), after (the same buckets after backward), one (DDP with one parameter, in the block
    `owner`), or waited (a synchronous all-reduce after each block's backward). Rank 1 is late to each collective by
    `late_ns`.
    """

    way: str
    mode: InstrumentMode
    compute_ns: int
    transfer_ns: int
    blocks: int
    owner: int | None = None
    late_ns: int = 0


CASES = {  # a millisecond of the table is ten microseconds here
    f"{known.name}-{mode}": Case(known.way, mode, round(known.c * 1e4), round(known.d * 1e4), known.blocks, known.owner)
    for known, mode in product(TABLE, MODES)
} | {
    f"late-{late_ns}-{mode}": Case("waited", mode, C_NS, D_NS, BLOCKS, late_ns=late_ns)
    for late_ns, mode in product(LATE_NS, MODES)
}


def run(topology: Topology, device: torch.device, root: str, name: str) -> None:
    """Train, and leave a record. Nothing here computes what is expected."""
    case, folder, rank = CASES[name], Path(root, name), topology.rank
    folder.mkdir(parents=True, exist_ok=True)
    lengths(0, (case.transfer_ns, 0.0))
    late_ns = case.late_ns if rank == 1 else 0
    blocks, model = build(case, partial(sleep, case.compute_ns), device, partial(sleep, late_ns))
    place = (folder, device, case.mode, rank, topology.world_size)
    with recording(*place, blocks, model, native=True) as instrument:
        for step in range(WARM_UP + STEPS):
            together(device)
            with instrument.recorder.step(StepFacts(0, step, step, 0.0, step < WARM_UP)):
                model(torch.ones(VALUES, device=device, requires_grad=True)).sum().backward()


def together(device: torch.device) -> None:
    """Both ranks' devices and hosts at one moment of virtual time."""
    torch.accelerator.synchronize(device)
    now = torch.tensor([simulated.host_ns()])
    dist.all_reduce(now, dist.ReduceOp.MAX)
    simulated.advance_host(int(now) - simulated.host_ns())


def sleep(length_ns: int) -> None:
    """Put the current stream to sleep, if for any time at all."""
    if length_ns:
        torch.cuda._sleep(length_ns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, one after another in one launch."""
    root = tmp_path_factory.mktemp("known")
    on_devices(run, root, {name: (str(root), name) for name in CASES})
    return root


@pytest.mark.spec("D8")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [known.name for known in TABLE])
def test_a_pipeline_by_construction(folder: Path, name: str, mode: str) -> None:
    (known,) = [one for one in TABLE if one.name == name]
    expected = flow_shop(known.way, known.c / 100, known.d / 100, known.owner, known.blocks)
    ratio = expected.pop("overlap_ratio")
    for rank in (0, 1):
        steps = [step for step in record(folder / f"{name}-{mode}", rank).steps if not step.warmup]
        assert len(steps) == STEPS
        for step in steps:
            assert step.coverage.complete
            assert step.overlap["overlap_ratio"] == pytest.approx(ratio, abs=1e-9)
            measured = {name: step.overlap[name] for name in expected}
            assert measured == pytest.approx(expected, abs=1.1e-6, rel=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late_ns", LATE_NS)
def test_a_straggler_costs_its_peer_waiting_and_no_transfer(folder: Path, late_ns: int, mode: str) -> None:
    rows: pd.DataFrame = collectives_frame(load_run(folder / f"late-{late_ns}-{mode}"))
    rows = rows[~rows["warmup"]]
    assert len(rows) == 2 * STEPS * BLOCKS
    assert rows["transfer_ms"].to_numpy() * 1e6 == pytest.approx(D_NS, abs=1.1)
    for rank, waited_ns in enumerate((late_ns, 0)):
        waited_ms = rows.loc[rows["rank"] == rank, "wait_ms"].to_numpy()
        assert waited_ms * 1e6 == pytest.approx(waited_ns, abs=1.1)


FABRIC = EmulatedFabric(inter_latency_us=5.0, inter_bandwidth_gb_per_s=0.5)
STRATEGIES = {2: ("ddp", "fsdp", "tp", "fsdp1"), 4: ("ddp", "hsdp", "fsdp_tp")}
WAYS = [(ranks, *way) for ranks, names in STRATEGIES.items() for way in product(names, MODES)]
EMULATED_STEPS = 3
"""Behind as many that warm up."""


def emulated(topology: Topology, device: torch.device, ranks: int, strategy: str, mode: str) -> list[dict[str, Any]]:
    """On the only process: each step of a case behind the warm-up."""
    fabric = EmulatedNetwork(FABRIC, topology.rank, ranks, None)
    simulated.real_delays(sleep_ns=0)
    lengths(collective=(0, 0.0))
    words = f"parallel={strategy}", f"instrument.mode={mode}", "fabric=emulated", f"fabric.ranks={ranks}"
    lines: list[Step] = []
    with emulated_ranks(fabric, device), looped(words, topology, device, lines) as loop:
        for _ in range(EMULATED_STEPS):
            loop.step()
    slept = [(row.start_ns, row.end_ns) for row in simulated.timeline(device.index, kind="sleep")]
    return [
        {
            "overlap": line.overlap,
            "complete": line.coverage.complete,
            "loss": line.loss,
            "rows": [
                (row.start_ns, row.end_ns, fabric.cost_ns(row.kind, row.bytes, ranks_of(row.group), 0))
                for row in line.collectives
            ],
            "slept_ns": length(clipped(slept, (line.start_mono_ns, line.end_mono_ns))),
        }
        for line in lines[EMULATED_STEPS:]
    ]


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a process group."""
    return tuple(dist.get_process_group_ranks(next(group for group in all_groups() if group.group_name == name)))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By the way what the only process left; one launch for each number of ranks."""
    found = {}
    for ranks in STRATEGIES:
        cases = {str(way): way for way in WAYS if way[0] == ranks}
        found |= on_devices(emulated, tmp_path_factory.mktemp("ranks"), cases, ranks=1, emulated_ranks=ranks)
    return {name: steps for name, (steps,) in found.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_collectives_take_what_the_fabric_says(told: dict[str, Any], way: tuple[int, str, str]) -> None:
    """One process that stands for all ranks of an emulated fabric: and the streams are busy as long."""
    _, strategy, _ = way
    steps = told[str(way)]
    assert len(steps) == EMULATED_STEPS
    for step in steps:
        assert step["complete"]
        assert step["rows"]
        assert all(end_ns - start_ns == cost_ns > 0 for start_ns, end_ns, cost_ns in step["rows"])
        if way[:2] == (2, "fsdp"):  # it gathers on one stream and scatters on another, through one communicator
            assert all(end_ns <= start_ns for (_, end_ns, _), (start_ns, _, _) in pairwise(sorted(step["rows"])))
        assert step["slept_ns"] == pytest.approx(step["overlap"]["comm_ms"] * 1e6, abs=1)
        assert (step["overlap"]["overlap_ratio"] > 0.1) != (strategy == "tp")
        assert step["loss"] is None
