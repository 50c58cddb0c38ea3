"""Run folders in every state a cluster leaves one in, with what is said of their health (`record_cases.json`); frames
refuse what is not declared, and ranks are joined.

A case has the `files` of a folder (a record as its `lines`, JSON, or text where it is broken) and what is expected:
`health` and the numbers of the `steps` of each rank, and words of the notes, of the problems and of the files that are
left out (`says`); or words of a `refusal`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.frames import NO_TIME, Collectives, Lane
from aorta.read.record import load_run
from aorta.read.run import NO_STEPS
from aorta.records.schema import AuxRange, ComputeRange, Stall, Wait
from tests.analysis.builders import collective, footer, header, metrics, step, write_rank

CASES = json.loads((Path(__file__).parent / "record_cases.json").read_text())
AS_THEY_ARE = ("ranks_read", "ranks_missing", "attempt", "endings", "steps_not_on_all_ranks", "gaps")
FABRIC = ("emulated_fabric_rows", "emulated_fabric_backend_slower_rows")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_health_of_a_run_folder(case: dict[str, Any], tmp_path: Path) -> None:
    for name, content in case["files"].items():
        ((form, value),) = content.items()
        lines = [f"{json.dumps(line)}\n" for line in value] if form == "lines" else []
        text = value if form == "text" else "".join(lines) if form == "lines" else json.dumps(value)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if "refusal" in case:
        with pytest.raises(InputError) as caught:
            load_run(tmp_path)
        assert [words for words in case["refusal"] if words not in str(caught.value)] == []
        return
    run = load_run(tmp_path)
    health = run.health
    told = as_json(health)
    counts = {name: len(told[name]) for name in ("files_left_out", "problems", "notes")}
    seen = {name: told[name] for name in AS_THEY_ARE} | counts | {name: told.get(name) for name in FABRIC}
    assert seen == case["health"]
    assert {str(rank): tables.steps.global_step.tolist() for rank, tables in run.ranks.items()} == case["steps"]
    said = "\n".join([*health.notes, *health.problems, *health.files_left_out])
    assert [words for words in case["says"] if words not in said] == []
    assert (run.manifest is not None) == case["manifest"]


HALF = metrics(10, 8, 4, 2)


def test_repeated_steps_and_a_wrong_footer_are_said(tmp_path: Path) -> None:
    lines = [step(loss=1.0, overlap=HALF), step(loss=9.0, overlap=HALF)]
    write_rank(tmp_path, header(), lines, footer(5))
    run = load_run(tmp_path)
    assert run.ranks[0].steps.losses["loss"].tolist() == [1.0]
    assert any("repeat a global step" in problem for problem in run.health.problems)
    assert any("counts 5 steps, 2 could be read" in problem for problem in run.health.problems)


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
def test_columns_have_the_declared_dtype_and_what_does_not_fit_is_refused(columns, error, said) -> None:
    with pytest.raises(error, match=said):
        Collectives(**ROWS | columns)
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

    said = {
        "overlap": metrics(10, 8, 0, 0),
        "aux": [AuxRange("optimizer", 9, 10)],
        "stalls": [Stall(1, 2, "hand_over")],
        "waits": [Wait("b", 0, 1, 2), Wait("a", 0, 3, 4), Wait("b", 1, 5, 6)],
    }

    def line(number: int) -> object:
        return step(0, 1, number, compute=[ComputeRange("a", "forward", number, 9)], **said)

    write_rank(tmp_path, header(0, 1), [line(2), line(0), line(1)])
    tables = load_run(tmp_path, spans=True).ranks[0]
    for spans in (tables.spans, tables.details.spans(np.arange(3))):
        assert [spans.of_step(place).of_lanes(Lane.COMPUTE).start_ns.tolist() for place in range(3)] == [[0], [1], [2]]
        mine = spans.of_step(1)
        assert mine.lane.tolist() == [Lane.COMPUTE, Lane.AUX, Lane.HAND_OVER, Lane.WAIT, Lane.WAIT, Lane.WAIT]
        assert [spans.names[name].name for name in mine.of_lanes(Lane.WAIT).name] == ["b", "a", "b"]
        assert spans.waits_known.tolist() == [True] * 3


@pytest.mark.parametrize(("field", "overlap"), [("copies", {"copy_ms": 1.0}), ("active_segments", {"bubble_ms": 1.0})])
def test_what_cannot_be_read_of_a_step_leaves_out_that_step_alone(tmp_path: Path, field: str, overlap: Any) -> None:
    said = {"overlap": metrics(10, 8, 0, 0) | overlap}
    write_rank(tmp_path, header(0, 1), [step(0, 1, number, **said) for number in range(3)])
    record = tmp_path / "rank_0_metrics.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines[2][field] = ["no row"]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = load_run(tmp_path, spans=True).ranks[0]
    assert tables.steps.global_step.tolist() == [0, 2]
    assert any(f"{record.name}:3" in problem and field in problem for problem in tables.problems)
