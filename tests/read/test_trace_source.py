"""Which rank a process was, which ranges of its code are steps, and what a kernel is by its name alone (W12); tables in
`trace_source_cases.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.read.traces.interval_table import KIND_CODE, NULL, IntervalClass, NameClassifier, kind_of
from aorta.read.traces.reader import (
    Process,
    headers_in,
    headers_near,
    kernels,
    place,
    ranks_in_path,
    step_windows,
)
from tests.analysis.builders import line_of
from tests.read.test_nsys import header

CASES = json.loads(Path(__file__).with_name("trace_source_cases.json").read_text())


@pytest.mark.parametrize("case", CASES["placed"])
def test_the_best_evidence_gives_the_rank_and_what_contradicts_it_is_said(case: dict[str, Any]) -> None:
    process = Process(**{key: tuple(value) if key == "gpus" else value for key, value in case["process"].items()})
    rank, notes = NULL if case["rank"] is None else case["rank"], () if case["note"] is None else (case["note"],)
    assert place(process, [header(**told) for told in case["headers"]]) == (rank, case["world"], notes)


@pytest.mark.parametrize(("visible", "rank"), [(True, 4), (False, NULL), (None, NULL)])
def test_the_gpu_used_tells_the_rank_only_where_nothing_renumbered_gpus(visible: bool | None, rank: int) -> None:
    headers = [header(4, 70, host="n", local_rank=1), header(3, 71, host="n", local_rank=0)]
    process = Process("x.json", pid=99, host="n", gpus=(1,), all_gpus_visible=visible)
    assert place(process, headers)[0] == rank


def test_ranks_stated_by_a_path() -> None:
    assert {path: sorted(ranks_in_path(path)) for path in CASES["ranks in paths"]} == CASES["ranks in paths"]


def test_headers_are_read_and_broken_records_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_text(line_of(header(0, 7)))
    (tmp_path / "rank_1_metrics.jsonl").write_bytes(b"\xff\xfe broken")
    (tmp_path / "rank_2_metrics.jsonl").write_text("")
    assert [found.pid for found in headers_in([tmp_path, tmp_path / "nowhere"])] == [7]


def test_records_are_looked_for_beside_a_trace_and_two_folders_above(tmp_path: Path) -> None:
    trace = tmp_path / "run" / "traces" / "rank" / "7_results.json"
    trace.parent.mkdir(parents=True)
    trace.touch()
    (tmp_path / "run" / "rank_4_metrics.jsonl").write_text(line_of(header(4, 7)))
    (tmp_path / "rank_5_metrics.jsonl").write_text(line_of(header(5, 8)))
    assert [found.rank for found in headers_near(str(trace))] == [4]
    assert headers_near("s3://bucket/run") == headers_near(str(tmp_path / "nowhere")) == ()


def windows_of(*ranges: tuple[str, int, int]) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    """(step, start, end) of each window, and the notes."""
    texts, start, end = zip(*ranges, strict=True)
    found, notes, _ = step_windows(texts, np.array(start, np.int64), np.array(end, np.int64))
    return list(zip(found.step.tolist(), found.start_ns.tolist(), found.end_ns.tolist(), strict=True)), notes


def test_late_and_early_markers_of_one_step_give_the_earliest_in_whatever_order_they_stand() -> None:
    late, early, other = ("ProfilerStep#4", 90, 99), ("ProfilerStep#4", 10, 20), ("ProfilerStep#5", 20, 30)
    for ranges in ((late, early, other), (early, other, late)):
        found, notes = windows_of(*ranges)
        assert found == [(4, 10, 20), (5, 20, 30)]
        assert notes == ("1 marker(s) ProfilerStep#N repeat a step; the first of each is used",)


def test_a_marker_of_no_length_is_no_window() -> None:
    assert windows_of(("step 1", 5, 5), ("step 1", 7, 9), ("step 2", 9, 9))[0] == [(1, 7, 9)]
    assert windows_of(("step 1", 5, 5)) == ([], ("no step markers: one window from the first to the last record",))


@pytest.mark.parametrize(("texts", "steps"), CASES["steps of markers"])
def test_one_family_of_markers_counts_and_only_whole_texts(texts: list[str], steps: list[int]) -> None:
    found, _ = windows_of(*((text, 10 * place, 10 * place + 5) for place, text in enumerate(texts)))
    assert [step for step, _, _ in found] == steps


def test_the_class_and_kind_of_a_kernel_w12() -> None:
    names, span = CASES["kernels"], np.arange(len(CASES["kernels"]))
    rows = kernels("made by hand", NameClassifier(), [*names], start_ns=span, end_ns=span + 1)
    codes = [(IntervalClass[cls], KIND_CODE[kind] if kind else NULL) for cls, kind in names.values()]
    assert dict(zip(names, zip(rows.cls.tolist(), rows.kind.tolist(), strict=True), strict=True)) == dict(
        zip(names, codes, strict=True)
    )


def test_the_kind_that_a_name_tells() -> None:
    assert {name: kind_of(name) for name in CASES["kinds"]} == {
        name: KIND_CODE[kind] if kind else NULL for name, kind in CASES["kinds"].items()
    }
