"""Which rank a process was: the order of evidence, and what is ambiguous."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.rank_inference import Process, headers_in, headers_near, place, ranks_in_path
from tests.analysis.builders import line_of
from tests.analysis.load.test_nsys import header


def test_the_environment_beats_the_path_and_the_contradiction_is_said() -> None:
    placed = place(Process("run/rank2/1_results.db", environment_rank=3, environment_world=8))
    assert (placed.rank, placed.world_size) == (3, 8)
    assert placed.notes == (
        "run/rank2/1_results.db: taken as rank 3 (its environment says RANK 3), although its path says rank 2",
    )


def test_the_path_beats_the_process_id() -> None:
    placed = place(Process("run/rank2/7_results.json", pid=7), [header(5, 7)])
    assert placed.rank == 2
    assert "although the record with process id 7 says rank 5" in placed.notes[0]


def test_the_process_id_of_a_record_places_a_trace_of_its_host() -> None:
    headers = [header(5, 7, host="b.cluster"), header(6, 7, host="a.cluster")]
    assert place(Process("x.json", pid=7, host="a"), headers).rank == 6


def test_two_records_with_one_process_id_and_no_host_are_ambiguous() -> None:
    placed = place(Process("x.json", pid=7), [header(5, 7, host="b"), header(6, 7, host="a")])
    assert placed.rank == NULL
    assert placed.notes == ("x.json: rank not known: the record with process id 7 says rank 5, 6: ambiguous",)


@pytest.mark.parametrize(("visible", "rank"), [(True, 4), (False, NULL), (None, NULL)])
def test_the_gpu_used_tells_the_rank_only_where_nothing_renumbered_gpus(visible: bool | None, rank: int) -> None:
    headers = [header(4, 70, host="n", local_rank=1), header(3, 71, host="n", local_rank=0)]
    process = Process("x.json", pid=99, host="n", gpus=(1,), all_gpus_visible=visible)
    assert place(process, headers).rank == rank


def test_a_process_that_used_two_gpus_is_not_placed_by_them() -> None:
    process = Process("x.json", host="n", gpus=(0, 1), all_gpus_visible=True)
    placed = place(process, [header(4, 70, host="n", local_rank=1)])
    assert placed.rank == NULL
    assert "rank not known (no process id, GPU 0, 1)" in placed.notes[0]


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        ("run/rank3/5_results.json", {3}),
        ("run/rank_03/5.json", {3}),
        ("run/rank-3.sqlite", {3}),
        ("run/rank1/rank2.json", {2}),
        ("run/rank1_rank2.json", {1, 2}),
        ("run/frank3/x.json", set()),
        ("run/ranking/x.json", set()),
        ("run/rank99999999999/x.json", set()),
    ],
)
def test_ranks_stated_by_a_path(path: str, ranks: set[int]) -> None:
    assert ranks_in_path(path) == ranks


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
