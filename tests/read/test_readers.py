"""A run folder in every state a cluster leaves one in; frames refuse what is not declared, and ranks are joined."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from aorta.documents import as_json
from aorta.documents.dataset import GapEntry
from aorta.errors import InputError
from aorta.read.frames import NO_TIME, PHASES, Collectives, Lane
from aorta.read.record import load_run
from aorta.read.run import NO_STEPS
from aorta.records.schema import AuxRange, ComputeRange, EndSource, Phase, Stall, Wait
from tests.analysis.builders import (
    collective,
    footer,
    header,
    line_of,
    metrics,
    step,
    write_manifest,
    write_rank,
)

HALF = metrics(10, 8, 4, 2)


def two_steps(rank: int, world_size: int = 2) -> list:
    return [step(rank, world_size, number, overlap=HALF) for number in range(2)]


def test_a_clean_run_has_nothing_to_note(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, header(rank, 2), two_steps(rank))
    write_manifest(tmp_path, world_size=2)
    run = load_run(tmp_path)
    assert list(run.ranks) == [0, 1]
    assert run.health.notes == []
    assert run.health.endings == {"0": "completed", "1": "completed"}


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 3):
        write_rank(tmp_path, header(rank, 4), two_steps(rank, 4))
    health = load_run(tmp_path).health
    assert health.ranks_missing == [1, 2]
    assert any("2 of 4 ranks missing: 1, 2" in note for note in health.notes)


def test_two_runs_in_one_folder_are_refused_by_name(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2, run_id="monday"), [])
    write_rank(tmp_path, header(1, 2, run_id="tuesday"), [])
    with pytest.raises(InputError, match=r"rank_0_metrics.jsonl.*'monday'.*rank_1_metrics.jsonl.*'tuesday'"):
        load_run(tmp_path)


def test_unequal_world_sizes_are_refused(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [])
    write_rank(tmp_path, header(1, 4), [])
    with pytest.raises(InputError, match=r"rank_0_metrics.jsonl says world size 2, rank_1_metrics.jsonl says 4"):
        load_run(tmp_path)


def test_only_the_last_attempt_is_used(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2, attempt=0), two_steps(0))
    write_rank(tmp_path, header(1, 2, attempt=1), two_steps(1))
    health = load_run(tmp_path).health
    assert (health.attempt, health.ranks_read, health.ranks_missing) == (1, [1], [0])
    assert health.files_left_out == ["rank_0_metrics.jsonl: attempt 0, the last attempt of this run is 1"]


def test_the_history_is_not_read(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [step(overlap=HALF)])
    (tmp_path / "history" / "old").mkdir(parents=True)
    write_rank(tmp_path / "history" / "old", header(run_id="old"), [])
    assert load_run(tmp_path).health.files_left_out == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        (line_of(header(1, 2)) + line_of(header(1, 2, run_id="other")), "two runs are mixed in one file"),
    ],
)
def test_a_bad_file_is_counted_and_said(tmp_path: Path, content: str, said: str) -> None:
    write_rank(tmp_path, header(0, 2), two_steps(0))
    (tmp_path / "rank_1_metrics.jsonl").write_text(content)
    health = load_run(tmp_path).health
    assert health.ranks_missing == [1]
    (sentence,) = health.files_left_out
    assert sentence.startswith("rank_1_metrics.jsonl")
    assert said in sentence
    assert any(said in note for note in health.notes)


def test_the_plainly_named_file_wins_over_a_padded_one(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [step(overlap=HALF)], name="rank_00_metrics.jsonl")
    write_rank(tmp_path, header(), [])
    run = load_run(tmp_path)
    assert len(run.ranks[0].steps) == 0
    assert run.health.files_left_out == [
        "rank_00_metrics.jsonl: a second record of rank 0, rank_0_metrics.jsonl is used"
    ]


def test_a_file_named_after_another_rank_is_left_out(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [])
    write_rank(tmp_path, header(0, 2), [], name="rank_1_metrics.jsonl")
    (sentence,) = load_run(tmp_path).health.files_left_out
    assert "its header says rank 0" in sentence


def test_repeated_steps_and_a_wrong_footer_are_said(tmp_path: Path) -> None:
    lines = [step(loss=1.0, overlap=HALF), step(loss=9.0, overlap=HALF)]
    write_rank(tmp_path, header(), lines, footer(5))
    run = load_run(tmp_path)
    assert run.ranks[0].steps.losses["loss"].tolist() == [1.0]
    assert any("repeat a global step" in problem for problem in run.health.problems)
    assert any("counts 5 steps, 2 could be read" in problem for problem in run.health.problems)


def test_signals_errors_and_partial_steps_are_said(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), two_steps(0), footer(2, 2, reason="signal", exit_code=143, signal="SIGTERM"))
    write_rank(tmp_path, header(1, 2), two_steps(1)[:1], footer(1, 2, reason="error", exit_code=5, error="boom"))
    health = load_run(tmp_path).health
    assert health.endings == {"0": "stopped by SIGTERM, exit code 143", "1": "ended by an error, exit code 5: boom"}
    assert health.steps_not_on_all_ranks == [1]
    assert sum("rank" in note for note in health.notes) == 3


def test_incomplete_coverage_is_counted_with_its_reason(tmp_path: Path) -> None:
    hole = {"coverage": {"seen": 3, "issued": 4, "complete": False, "reason": "one was not seen"}}
    line = json.loads(line_of(step(overlap=HALF))) | hole
    path = write_rank(tmp_path, header(), [], foot=None)
    path.write_text(path.read_text() + json.dumps(line) + "\n" + line_of(footer(1)))
    assert load_run(tmp_path).health.gaps == [
        GapEntry(0, ["comm"], "coverage not complete: one was not seen", observed=False, steps=1)
    ]


def test_an_emulated_fabric_is_the_first_thing_said(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [])
    write_manifest(tmp_path, {"fabric": {"kind": "emulated", "latency_us": 5}})
    notes = load_run(tmp_path).health.notes
    assert notes[0].startswith("EMULATED FABRIC: ")


@pytest.mark.parametrize(
    ("interceptor", "said"),
    [
        ("python: not built", "collectives were timed from Python (not built; steps of DDP were 4 to 7 % longer"),
        ("python: instrument.native=false", None),
        ("native", None),
    ],
)
def test_the_cost_of_timing_collectives_from_python_is_said(tmp_path: Path, interceptor: str, said: str | None) -> None:
    write_rank(tmp_path, header(platform="cpu"), [])
    write_manifest(tmp_path, topology=[{"rank": 0, "interceptor": interceptor}])
    notes = [note for note in load_run(tmp_path).health.notes if "from Python" in note]
    assert len(notes) == (said is not None)
    assert all(note.startswith(said or "") for note in notes)


@pytest.mark.parametrize(
    ("sources", "rows", "slower", "said"),
    [
        (["emulated"] * 3, 6, 0, "the emulation decided all 6 collectives"),
        (["emulated", "future", "wait", "emulated"], 8, 4, "in 4 of 8 collectives (50 %) the backend was slower"),
        (["event"], 2, None, "on a device they come on top of the backend's own times"),
        ([None], 0, 0, "no collective was seen"),
    ],
)
def test_how_far_the_emulation_held_is_counted_without_warm_up(
    tmp_path: Path, sources: list[EndSource | None], rows: int, slower: int | None, said: str
) -> None:
    # Two steps count; the first is warm-up and would add slow ones.
    found = [collective(seq=n, end_ms=1.0 if source else None, end_source=source) for n, source in enumerate(sources)]
    lines = [
        step(overlap=HALF, warmup=True, collectives=[collective(end_source="future")]),
        *(step(global_step=number, overlap=HALF, collectives=found) for number in (1, 2)),
    ]
    write_rank(tmp_path, header(), lines)
    write_manifest(tmp_path, {"fabric": {"kind": "emulated"}})
    health = load_run(tmp_path).health
    assert said in health.notes[0]
    told = as_json(health)
    assert (told["emulated_fabric_rows"], told["emulated_fabric_backend_slower_rows"]) == (rows, slower)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no run.json"),
        ("[1, 2]", "not a JSON object"),
        ('{"run_id": "other", "schema_version": 1}', "belongs to run 'other', the records to 'run-1'"),
        ('{"run_id": "run-1", "schema_version": 3}', "schema version 3, this AORTA reads 2"),
    ],
)
def test_without_a_usable_manifest_the_headers_serve_and_it_is_said(
    tmp_path: Path, text: str | None, said: str
) -> None:
    write_rank(tmp_path, header(), [])
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    run = load_run(tmp_path)
    assert run.manifest is None
    assert any(said in note and "emulated is not known" in note for note in run.health.notes)


def test_a_folder_with_nothing_points_at_records_below(tmp_path: Path) -> None:
    for below in ("a/b/cuda", "a/c"):
        (tmp_path / below).mkdir(parents=True)
        write_rank(tmp_path / below, header(), [])
    listed = f"there are some in {tmp_path}/a/b/cuda, {tmp_path}/a/c. Give the folder of one run"
    with pytest.raises(InputError, match=re.escape(f"no rank_<rank>_metrics.jsonl in this folder; {listed}")):
        load_run(tmp_path)


def test_no_folder_a_file_and_only_bad_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a folder"):
        load_run(tmp_path / "file")
    (tmp_path / "rank_0_metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="its record cannot be read"):
        load_run(tmp_path)


@pytest.mark.parametrize("now", ["", '"record":"stp",'])
def test_a_step_that_no_longer_says_what_it_is_is_not_taken_for_one(tmp_path: Path, now: str) -> None:
    path = write_rank(tmp_path, header(), [step(overlap=HALF), step(global_step=1, overlap=HALF)])
    record = load_run(tmp_path).ranks[0]
    assert record.step_intervals(1) is not None
    assert record.step_intervals(2) is None
    before, after = path.read_text().rsplit('"record":"step",', 1)
    path.write_text(before + now + after)
    with pytest.raises(InputError, match=r"global step 1, at byte .* cannot be read again"):
        record.step_intervals(1)


def test_the_phases_of_the_tables_are_those_of_the_schema() -> None:
    assert get_args(Phase) == PHASES


ROWS = {name: np.zeros(2, np.int64) for name in ("step", "name", "seq", "issue_ns", "start_ns", "end_ns")}


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"wait_ns": np.zeros(2, np.int64)}, TypeError, "wait_ns"),
        ({"seq": np.zeros(3, np.int64)}, ValueError, "different lengths"),
        ({"name": np.array([0, 2**40])}, ValueError, "name: int64 does not fit int32"),
        ({"issue_ns": np.array([0.5, 1.0])}, ValueError, "issue_ns: float64 does not fit int64"),
    ],
)
def test_a_column_that_is_not_declared_or_does_not_fit_is_refused(columns, error, said) -> None:
    with pytest.raises(error, match=said):
        Collectives(**ROWS | columns)


def test_columns_have_the_declared_dtype() -> None:
    rows = Collectives(**ROWS)
    assert (rows.step.dtype, rows.end_ns.dtype, rows.backend_end_ns) == (np.int32, np.int64, None)


def test_ranks_that_differ_are_joined(tmp_path: Path) -> None:
    """Rank 0 gathers and has no bounds; rank 1 does neither, and its communication is unknown in its second step."""
    gathers = metrics(10, 8, 4, 2, allgather_ms=3.0, compute_allgather_ms=1.0, exposed_allgather_ms=2.0)
    unknown = metrics(10, 8, 4, 2, comm_ms=None, allreduce_ms=None)
    rows = [collective(seq=number, backend_end_ns=number) for number in range(2)]
    write_rank(tmp_path, header(0, 2), [step(0, 2, 0, overlap=gathers, collectives=rows)], footer(1, 2))
    lines = [step(1, 2, number, overlap=overlap) for number, overlap in enumerate([metrics(10, 8, 4, 2), unknown])]
    write_rank(tmp_path, header(1, 2), lines, footer(2, 2))
    run = load_run(tmp_path)
    assert run.rank_of_step.tolist() == [0, 1, 1]
    assert run.steps.metrics["allgather_ms"].tolist()[:2] == [3.0, 0.0]
    assert np.isnan(run.steps.metrics["allgather_ms"][2])
    assert run.collectives.backend_end_ns is not None
    assert run.collectives.backend_end_ns.tolist() == [NO_TIME if number is None else number for number in (0, 1)]
    assert [len(tables.collectives) for tables in run.ranks.values()] == [2, 0]
    assert run.ranks[0].isolated.global_step.tolist() == NO_STEPS.global_step.tolist()


def test_spans_of_steps_out_of_order_are_those_of_their_step(tmp_path: Path) -> None:
    """In the order of lanes, waits in the order of time whichever their group; read with the steps or again."""

    def line(number: int) -> object:
        return step(
            0,
            1,
            number,
            overlap=metrics(10, 8, 0, 0),
            compute=[ComputeRange("a", "forward", number, 9)],
            aux=[AuxRange("optimizer", 9, 10)],
            stalls=[Stall(1, 2, "hand_over")],
            waits=[Wait("b", 0, 1, 2), Wait("a", 0, 3, 4), Wait("b", 1, 5, 6)],
        )

    write_rank(tmp_path, header(0, 1), [line(2), line(0), line(1)])
    tables = load_run(tmp_path, spans=True).ranks[0]
    for spans in (tables.spans, tables.details.spans(np.arange(3))):
        assert [spans.of_step(place).of_lanes(Lane.COMPUTE).start_ns.tolist() for place in range(3)] == [[0], [1], [2]]
        mine = spans.of_step(1)
        assert mine.lane.tolist() == [Lane.COMPUTE, Lane.AUX, Lane.HAND_OVER, Lane.WAIT, Lane.WAIT, Lane.WAIT]
        assert [spans.names[name].name for name in mine.of_lanes(Lane.WAIT).name] == ["b", "a", "b"]
        assert spans.waits_known.tolist() == [True] * 3
