"""K2 (docs/dev/measuring.md) on the simulated device: record and Kineto trace about the same steps of DDP and FSDP2.

In virtual time both are exact, so the bounds are: 1 us for each start and end, 0.001 for the ratio. The trace is made
of the device's own timeline (`tests.simulated.kineto`) and read by AORTA's own reader of Kineto traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from aorta.read.traces.interval_table import KIND_CODE, IntervalClass, Trace
from aorta.read.traces.kineto.trace import read_kineto
from aorta.read.traces.reader import TraceInput
from aorta.read.traces.tables import device_timelines
from aorta.records.schema import Step
from aorta.timeline.arrays import IntervalArray
from aorta.timeline.overlap import Overlap
from tests.device_path.launch import launched
from tests.device_path.program_kineto import STEPS
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STRATEGIES = ("ddp", "fsdp")
NEAR_NS, NEAR_RATIO = 1_000, 0.001
CASES = [(strategy, rank) for strategy in STRATEGIES for rank in (0, 1)]
Row = tuple[str, int, int]
"""Kind, start and end; in nanoseconds of the Unix epoch."""


@dataclass(frozen=True)
class Seen:
    """The same steps of one rank, by both."""

    lines: list[Step]
    trace: Trace
    path: Path

    def steps(self) -> list[tuple[Step, Overlap, list[Row]]]:
        """Each step: its line, what the reader makes of its window, and the reader's collectives in it."""
        (device,) = device_timelines(self.trace)
        windows = IntervalArray(self.trace.windows.start_ns, self.trace.windows.end_ns)
        return [
            (line, overlap, self.collectives(int(start), int(end)))
            for line, overlap, start, end in zip(self.lines, device.measure(windows), *windows, strict=True)
        ]

    def collectives(self, start_ns: int, end_ns: int) -> list[Row]:
        table, kinds = self.trace.intervals, {code: kind for kind, code in KIND_CODE.items()}
        chosen = (table.cls == IntervalClass.COMM) & (table.start_ns >= start_ns) & (table.start_ns < end_ns)
        own = table.take(chosen)
        rows = zip(own.kind.tolist(), own.start_ns.tolist(), own.end_ns.tolist(), strict=True)
        return sorted(((kinds[kind], low, high) for kind, low, high in rows), key=lambda row: row[1:])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Seen]:
    folder = tmp_path_factory.mktemp("crosscheck")
    launched("tests.device_path.program_kineto", str(folder), ",".join(STRATEGIES))
    found = {}
    for strategy, rank in CASES:
        path = folder / strategy / f"rank{rank}.pt.trace.json"
        lines = msgspec.json.decode((folder / strategy / f"rank_{rank}.json").read_bytes(), type=list[Step])
        with path.open("rb") as stream:
            found[strategy, rank] = Seen(lines, next(iter(read_kineto(TraceInput({str(path): stream})))), path)
    return found


def in_record(line: Step) -> list[Row]:
    origin = line.t_start_ns
    rows = [(row.kind, origin + row.start_ns, origin + row.end_ns) for row in line.collectives]
    return sorted(rows, key=lambda row: row[1:])


@pytest.mark.parametrize(("strategy", "rank"), CASES)
def test_both_see_the_same_collectives(seen: dict[tuple[str, int], Seen], strategy: str, rank: int) -> None:
    one = seen[strategy, rank]
    assert one.trace.rank == rank
    assert len(one.lines) == STEPS
    for line, _, rows in one.steps():
        assert line.coverage.complete, line.coverage.reason
        own = in_record(line)
        assert [kind for kind, *_ in rows] == [kind for kind, *_ in own]
        for record, trace in zip(own, rows, strict=True):
            assert abs(record[1] - trace[1]) <= NEAR_NS
            assert abs(record[2] - trace[2]) <= NEAR_NS


@pytest.mark.parametrize(("strategy", "rank"), CASES)
def test_both_see_the_same_overlap(seen: dict[tuple[str, int], Seen], strategy: str, rank: int) -> None:
    for line, measured, _ in seen[strategy, rank].steps():
        own, theirs = line.overlap["overlap_ratio"], measured.overlap_ratio
        assert own is not None
        assert theirs is not None
        assert 0.02 < theirs < 0.98  # something is hidden and something is not
        assert abs(own - theirs) <= NEAR_RATIO
        count = len(line.collectives)
        for name, theirs_ns in (
            ("comm_ms", measured.comm_ns),
            ("compute_comm_ms", measured.hidden_ns),
            ("exposed_comm_ms", measured.comm_ns - measured.hidden_ns),
        ):
            own_ms = line.overlap[name]
            assert abs(own_ms * 1e6 - theirs_ns) <= count * NEAR_NS, name
