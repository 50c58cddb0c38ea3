"""K1 and K3 (docs/dev/measuring.md) on the simulated device: lengths that are known by construction, to the
nanosecond."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from aorta.analysis.dataframes import collectives_frame
from aorta.distributed.topology import Topology
from aorta.read.record import load_run
from aorta.records.schema import InstrumentMode
from aorta.records.step_line import StepFacts
from aorta.report.files import write_report
from tests.device_path.trainings import lengths
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
    `owner`), waited (a synchronous all-reduce after each block's backward), or queued (all-reduces issued one after
    another, and waited for together). Rank 1 is late to each collective by `late_ns`.
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
    f"{way}-{late_ns}-{mode}": Case(way, mode, C_NS, D_NS, BLOCKS, late_ns=late_ns)
    for way, late_ns, mode in product(("waited", "queued"), LATE_NS, MODES)
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
                if case.way == "queued":
                    queued(case, late_ns, device)
                else:
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


def queued(case: Case, late_ns: int, device: torch.device) -> None:
    """One all-reduce behind the other, none waited for before the last is issued."""
    tensors = [torch.ones(VALUES, device=device) for _ in range(case.blocks)]
    works = []
    for tensor in tensors:
        sleep(case.compute_ns)
        sleep(late_ns)
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()


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


def expected_durations(way: str, late_ns: int) -> list[tuple[int, int]]:
    """What each rank's collectives must last: by recursion over a link that serves one at a time, in order."""
    durations, free, ready = [], 0, [0, 0]
    for _ in range(BLOCKS):
        ready = [ready[0] + C_NS, ready[1] + C_NS + late_ns]
        starts = [max(moment, free) for moment in ready]
        free = max(*ready, free) + D_NS
        durations.append((free - starts[0], free - starts[1]))
        if way == "waited":
            ready = [free, free]
    return durations


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late_ns", LATE_NS)
@pytest.mark.parametrize("way", ["waited", "queued"])
def test_a_straggler_costs_its_peer_waiting_and_no_transfer(folder: Path, way: str, late_ns: int, mode: str) -> None:
    rows: pd.DataFrame = collectives_frame(load_run(folder / f"{way}-{late_ns}-{mode}"))
    rows = rows[~rows["warmup"]]
    expected = expected_durations(way, late_ns)
    assert rows["transfer_ms"].to_numpy() * 1e6 == pytest.approx(D_NS, abs=1.1)
    for rank in (0, 1):
        of_rank = rows[rows["rank"] == rank].sort_values(["global_step", "seq"])
        waited = of_rank["wait_ms"].to_numpy() * 1e6
        wanted = [duration[rank] - D_NS for duration in expected]
        assert waited == pytest.approx(wanted * STEPS, abs=1.1)


@pytest.mark.parametrize("mode", MODES)
def test_the_report_names_the_straggler_and_nobody_in_an_even_run(folder: Path, tmp_path: Path, mode: str) -> None:
    runs = {name: folder / f"waited-{late_ns}-{mode}" for name, late_ns in (("even", 0), ("late", LATE_NS[-1]))}
    datasets = write_report(runs, tmp_path).summary["datasets"]
    nobody, found = (datasets[name]["stragglers"] for name in runs)
    assert nobody["ranks"] == []
    assert nobody["reason"]
    (straggler,) = found["ranks"]
    assert straggler["rank"] == 1, found
    assert straggler["late_ms"] == pytest.approx(LATE_NS[-1] / 1e6, abs=1e-5)
