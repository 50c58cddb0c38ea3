"""Health of traces: every row that is odd is counted, and nothing is dropped without a word."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from aorta.documents.kernels import TraceEntry
from aorta.read.ledger import LANES
from aorta.read.traces.consistency import wrong_clocks
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
    rows = [row(COMPUTE, 0, 10), row(COMPUTE, 20, 20), row(COMPUTE, 40, 30)]
    odd = trace([*rows, row(COMM, 50, 51 + ABSURD_NS, kind="allreduce")])
    assert counters(odd) == {"rows": 4, "zero_duration": 1, "negative_duration": 1, "absurd_duration": 1}
    clean, _ = check_rows(odd)
    assert clean.intervals.start_ns.tolist() == [0, 20]
    assert not {"negative_duration", "absurd_duration"} & counters(clean).keys()


AROUND = [row(COMPUTE, 5, 6), row(COMPUTE, 15, 16), row(COMPUTE, 25, 26)]


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        (
            [row(UNKNOWN, 0, 1, stream=1), row(COMM, 0, 1, stream=2), row(COMM, 0, 1, kind="gather", stream=3)],
            {},
            {"unknown_class": 1, "unknown_kind": 1},
        ),
        (AROUND, {"steps": [(1, 10, 20)]}, {"outside_steps": 2}),
        (AROUND, {}, {}),
        (
            [row(COMPUTE, 0, 10, stream=4), row(COPY, 7, 12, stream=4), row(COMPUTE, 8, 9, stream=5)],
            {},
            {"same_stream_overlap": 1},
        ),
        ([row(COMPUTE, 0, 10, device=NULL, stream=4), row(COMPUTE, 2, 5, device=NULL, stream=4)], {}, {}),
        (
            [row(COMPUTE, 5, 4)],
            {"counters": {"negative_duration": 2, "kernels_unlinked": 7}},
            {"negative_duration": 3, "kernels_unlinked": 7},
        ),
    ],
)
def test_what_is_odd_is_counted_beside_what_the_reader_counted(
    rows: list[Any], more: dict[str, Any], expected: dict[str, int]
) -> None:
    assert counters(trace(rows, **more)) == {"rows": len(rows)} | expected


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


def test_missing_and_doubled_and_unknown_ranks_and_several_devices_are_said() -> None:
    rows = [row(COMPUTE, 0, 1, rank=rank) for rank in (0, 2, 2, NULL)]
    parts = [facts_of(trace([made], world_size=4, path=f"t{place}")) for place, made in enumerate(rows)]
    world, missing, said = examine(parts)
    assert (world, missing) == (4, [1, 3])
    said = [*said, *examine([facts_of(trace([rows[0], row(COMPUTE, 0, 1, device=3)]))])[2]]
    for words in ("several traces claim to be rank 2", "1 trace(s) of unknown rank", "rank 0 has rows on devices 0, 3"):
        assert any(words in note for note in said), words
    for no_world in (None, 2**31 - 1):
        assert examine([facts_of(trace([rows[0]], world_size=no_world))]) == (None, [], [])


def test_the_page_describes_every_counter() -> None:
    page = (ROOT / "docs" / "dev" / "trace-readers.md").read_text()
    assert [name for name in COUNTERS if f"`{name}`" not in page] == []


def waited(name: str, jump_us: int, threads: int = 0) -> Trace:
    """Two steps of ten kernels and a call that waits for them; from the second step on the device's clock jumps, and as
    many other threads launch while the call begins.
    """
    events = [step(1, 0, 10_000), step(2, 10_000, 10_000), event("cuda_runtime", name, 18_000, 1_000, correlation=99)]
    launches = [(at * 900, at * 900 + (jump_us if at >= 10 else 0) + 10, 800, at, 7, 7) for at in range(20)]
    launches += [(17_999, 30_000, 5, 200 + at, 50 + at, at) for at in range(threads)]
    for called, begun, length, link, stream, thread in launches:
        events.append(event("cuda_runtime", "cudaLaunchKernel", called, 5, tid=thread, correlation=link))
        events.append(kernel(GEMM, begun, length, stream=stream, correlation=link))
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
