"""Health of traces: every row that is odd is counted, and nothing is dropped without a word."""

from __future__ import annotations

import pytest
from hypothesis import given

from aorta.documents.kernels import TraceEntry
from aorta.read.ledger import LANES
from aorta.read.traces.clocks import wrong_clocks
from aorta.read.traces.health import ABSURD_NS, COUNTERS, check_rows, examine
from aorta.read.traces.interval_table import NULL, Trace
from tests.docs.pages import ROOT
from tests.read.kineto_files import GEMM, event, kernel, read, step
from tests.read.tables import COMM, COMPUTE, COPY, UNKNOWN, row, trace
from tests.strategies import stream_rows


def facts_of(given: Trace) -> TraceEntry:
    return check_rows(given)[1]


def counters(given: Trace) -> dict[str, int]:
    return {name: count for name, count in facts_of(given).counters.items() if count}


def test_odd_durations_are_counted_and_those_no_metric_can_use_are_taken_out() -> None:
    rows = [
        row(COMPUTE, 0, 10),
        row(COMPUTE, 20, 20),
        row(COMPUTE, 40, 30),
        row(COMM, 50, 51 + ABSURD_NS, kind="allreduce"),
    ]
    odd = trace(rows)
    assert counters(odd) == {"rows": 4, "zero_duration": 1, "negative_duration": 1, "absurd_duration": 1}
    clean, _ = check_rows(odd)
    assert clean.intervals.start_ns.tolist() == [0, 20]
    assert not {"negative_duration", "absurd_duration"} & counters(clean).keys()


STREAMS = [row(COMPUTE, 0, 10, stream=4), row(COPY, 7, 12, stream=4), row(COMPUTE, 8, 9, stream=5)]
NESTED = [row(COMPUTE, 0, 10, device=NULL, stream=4), row(COMPUTE, 2, 5, device=NULL, stream=4)]
AROUND = [row(COMPUTE, 5, 6), row(COMPUTE, 15, 16), row(COMPUTE, 25, 26)]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            trace([row(UNKNOWN, 0, 1, stream=1), row(COMM, 0, 1, stream=2), row(COMM, 0, 1, kind="gather", stream=3)]),
            {"rows": 3, "unknown_class": 1, "unknown_kind": 1},
        ),
        (trace(AROUND, steps=[(1, 10, 20)]), {"rows": 3, "outside_steps": 2}),
        (trace(AROUND), {"rows": 3}),
        (trace(STREAMS), {"rows": 3, "same_stream_overlap": 1}),
        (trace(NESTED), {"rows": 2}),
        (
            trace([row(COMPUTE, 5, 4)], counters={"negative_duration": 2, "kernels_unlinked": 7}),
            {"rows": 1, "negative_duration": 3, "kernels_unlinked": 7},
        ),
    ],
)
def test_what_is_odd_is_counted_beside_what_the_reader_counted(made: Trace, expected: dict[str, int]) -> None:
    assert counters(made) == expected


@given(stream_rows)
def test_same_stream_overlap_is_what_counting_pairs_gives(rows: list[tuple[int, int, int, int]]) -> None:
    rows = list(dict.fromkeys(rows))  # a row that is there twice counts once
    made = [row(COMPUTE, start, start + length, device=dev, stream=stream) for dev, stream, start, length in rows]
    facts = facts_of(trace(made))
    overlapping = 0
    ordered = sorted(rows, key=lambda each: each[2])
    for place, (device, stream, start, _) in enumerate(ordered):
        before = [each for each in ordered[:place] if each[:2] == (device, stream)]
        overlapping += any(begin + length > start for _, _, begin, length in before)
    assert facts.counters.get("same_stream_overlap", 0) == overlapping


def test_missing_and_doubled_and_unknown_ranks() -> None:
    parts = [
        facts_of(trace([row(COMPUTE, 0, 1, rank=rank)], world_size=4, path=f"t{place}"))
        for place, rank in enumerate((0, 2, 2, NULL))
    ]
    world, missing, said = examine(parts)
    assert (world, missing) == (4, [1, 3])
    notes = "\n".join(said)
    assert "several traces claim to be rank 2" in notes
    assert "1 trace(s) of unknown rank" in notes


@pytest.mark.parametrize("world", [None, 2**31 - 1])
def test_without_a_world_that_can_be_missing_ranks_are_unknown(world: int | None) -> None:
    assert examine([facts_of(trace([row(COMPUTE, 0, 1)], world_size=world))]) == (None, [], [])


def test_several_devices_of_one_rank_are_said() -> None:
    rows = [row(COMPUTE, 0, 1, device=0), row(COMPUTE, 0, 1, device=3)]
    assert any("rank 0 has rows on devices 0, 3" in note for note in examine([facts_of(trace(rows))])[2])


def test_the_page_describes_every_counter() -> None:
    page = (ROOT / "docs" / "dev" / "trace-readers.md").read_text()
    assert [name for name in COUNTERS if f"`{name}`" not in page] == []


def waited(name: str, jump_us: int, threads: int = 0) -> Trace:
    """Two steps of ten kernels and a call that waits for them; from the second step on the device's clock jumps, and as
    many other threads launch while the call begins.
    """
    events = [step(1, 0, 10_000), step(2, 10_000, 10_000), event("cuda_runtime", name, 18_000, 1_000, correlation=99)]
    for number in range(20):
        begin = number * 900 + (jump_us if number >= 10 else 0)
        events.append(event("cuda_runtime", "cudaLaunchKernel", number * 900, 5, correlation=number))
        events.append(kernel(GEMM, begin + 10, 800, correlation=number))
    for number in range(threads):
        launch = {"correlation": 200 + number}
        events.append(event("cuda_runtime", "cudaLaunchKernel", 17_999, 5, tid=number, **launch))
        events.append(kernel(GEMM, 30_000, 5, stream=50 + number, **launch))
    return read(events)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        pytest.param(waited("cudaDeviceSynchronize", 0), False, id="right"),
        pytest.param(waited("hipDeviceSynchronize", 5_000), True, id="a jump"),
        pytest.param(waited("cudaStreamSynchronize", 5_000), False, id="of one stream, which is not known"),
        pytest.param(waited("cudaDeviceSynchronize", 0, threads=2), False, id="calls of other threads"),
    ],
)
def test_rows_that_end_after_a_call_that_waited_for_them_make_all_lanes_unknown(made: Trace, wrong: bool) -> None:
    late = [gap for gap in wrong_clocks(made) if "after a call that waited for them" in gap.why]
    assert sorted(gap.lane for gap in late) == (sorted(LANES) if wrong else [])
