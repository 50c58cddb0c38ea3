"""Records of the first AORTA: what they hold, and what they cannot know."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from aorta.analysis.load.aorta_2025 import UNSEEN, read_aorta_2025
from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass, Trace
from aorta.errors import InputError


def a_range(stream: str, start: float, end: float, tag: str = "t", **metadata: str) -> dict[str, Any]:
    return {
        "stream": stream,
        "tag": tag,
        "start_ms": start,
        "end_ms": end,
        "duration_ms": end - start,
        "metadata": metadata,
    }


def line(step: int, total: float, ranges: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "world_size": 2,
        "epoch": 0,
        "step": step,
        "global_step": step,
        "loss": 1.5,
        "grad_norm": None,
        "lr": 0.1,
        "profile": {
            "index": step,
            "total_ms": total,
            "ranges": ranges,
            "markers": [],
            "overlap": {"per_stream_ms": {}},
        },
    } | more


FIRST = [
    a_range("compute", 1.0, 9.0, "forward"),
    a_range("allreduce", 8.0, 8.5, "all_reduce", function="all_reduce"),
    a_range("aux", 0.5, 0.75, "all_gather", function="all_gather_into_tensor"),
    a_range("aux", 9.0, 10.0, "optimizer"),
]


def read(*lines: dict[str, Any], tail: bytes = b"") -> Trace:
    text = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    return read_aorta_2025(io.BytesIO(text + tail), "rank_00_metrics.jsonl")


def test_ranges_become_rows_and_iterations_are_laid_end_to_end() -> None:
    trace = read(line(0, 10.0, FIRST), line(1, 5.0, [a_range("reducescatter", 1.0, 2.0)]))
    table = trace.intervals
    assert trace.windows.step.tolist() == [0, 1]
    assert trace.windows.start_ns.tolist() == [0, 10_000_000]
    assert trace.windows.end_ns.tolist() == [10_000_000, 15_000_000]
    assert table.start_ns.tolist() == [1_000_000, 8_000_000, 500_000, 9_000_000, 11_000_000]
    assert table.end_ns.tolist() == [9_000_000, 8_500_000, 750_000, 10_000_000, 12_000_000]
    assert table.step.tolist() == [0, 0, 0, 0, 1]
    assert (trace.ranks, trace.world_size, trace.clock, trace.format) == ((0,), 2, "unknown", "aorta-2025")


def test_w8_all_gathers_are_communication_although_their_stream_was_aux() -> None:
    table = read(line(0, 10.0, FIRST)).intervals
    assert table.cls.tolist() == [IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COMM, IntervalClass.AUX]
    assert table.kind.tolist() == [NULL, KIND_CODE["allreduce"], KIND_CODE["allgather"], NULL]


def test_what_it_cannot_know_is_said() -> None:
    trace = read(line(0, 10.0, FIRST))
    assert trace.unseen == UNSEEN
    assert not trace.copies_observed
    assert any("upper bound" in note for note in trace.notes)
    assert any("laid end to end" in note for note in trace.notes)


def test_a_last_line_cut_off_by_a_kill_is_left_out_and_said() -> None:
    trace = read(line(0, 10.0, FIRST), tail=b'{"rank": 0, "prof')
    assert len(trace.windows) == 1
    assert "rank_00_metrics.jsonl:2: cut off in mid-line; ignored" in trace.notes


def test_ranges_beyond_their_iteration_are_cut_and_counted() -> None:
    trace = read(line(0, 10.0, [a_range("compute", -1.0, 11.0)]), line(1, 5.0, []))
    assert trace.intervals.end_ns.tolist() == [10_000_000]
    assert any("1 range(s) reach beyond their iteration" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"rank": "0"}, r"rank_00_metrics\.jsonl:2: .*Expected `int`, got `str` - at `\$\.rank`"),
        ({"profile": {"total_ms": 1.0}}, "missing required field `ranges`"),
        ({"profile": {"total_ms": -1.0, "ranges": []}}, r"at `\$\.profile\.total_ms`"),
        ({"profile": {"total_ms": 1e300, "ranges": []}}, r"at `\$\.profile\.total_ms`"),
        ({"rank": 1}, "lines of 2 ranks; one file holds one rank"),
    ],
)
def test_broken_lines_are_refused_with_their_place(broken: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(line(0, 10.0, FIRST), line(1, 10.0, []) | broken)


def test_nan_is_no_number() -> None:
    with pytest.raises(InputError, match=r"rank_00_metrics\.jsonl:1: not an iteration of the first AORTA"):
        read(line(0, float("nan"), []))


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InputError, match="no iterations in it"):
        read()


def test_a_repeated_iteration_is_left_out_and_said() -> None:
    again = read(line(0, 10.0, FIRST), line(1, 12.0, FIRST), line(1, 99.0, FIRST))
    once = read(line(0, 10.0, FIRST), line(1, 12.0, FIRST))
    assert again.intervals.end_ns.tolist() == once.intervals.end_ns.tolist()
    assert again.windows.end_ns.tolist() == once.windows.end_ns.tolist()
    assert any("1 iteration(s) repeat a global step" in note for note in again.notes)
