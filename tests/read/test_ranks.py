"""Which traces count as ranks, which collectives of them are the same, and what ran inside their steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.frames import Lane
from aorta.read.traces.load import load_traces
from tests.read.kineto_files import ALLREDUCE, document, event, kernel, step
from tests.read.nsys_files import write_nsys
from tests.read.test_sources import report, trace_of


def test_only_the_busiest_device_of_a_rank_is_in_steps_and_medians(tmp_path):
    """Device 0 works 10 us and hides all of 5; device 1 works 4 us, and hides 2 of 8 us."""
    path = tmp_path / "t.json"
    rows = [
        kernel("gemm", 0, 4, 1),
        kernel(ALLREDUCE, 2, 6, 1),
        kernel("gemm", 0, 10, 0),
        kernel(ALLREDUCE, 0, 5, 0, 20),
    ]
    path.write_text(json.dumps(document(rows)))
    run = load_traces(str(path))
    assert {number: whole["metrics"]["overlap_ratio"] for number, whole in run.traces.whole.items()} == {
        "0": 1.0,
        "-1": 1 / 3,
    }
    assert list(run.ranks) == [0]
    assert any("device 1 is not the busiest of its trace: -1 in traces.whole" in note for note in run.health.notes)
    entry = report(["--log-dir", str(path), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    assert entry["metrics"]["overlap_ratio"]["median"] == 1.0
    assert entry["metrics"]["job_step_ms"]["median"] == pytest.approx(0.01)
    assert entry["metrics"]["job_step_ms"]["count"] == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "traces"
    found.mkdir()
    for rank in (0, 1):
        (found / f"{rank}.json").write_text(trace_of(rank))
    return found


def test_a_job_step_is_that_of_known_ranks_and_null_where_none_is_known(folder, tmp_path):
    # A second trace that claims to be rank 1, with steps ten times as long.
    late = json.loads(trace_of(1))
    for each in late["traceEvents"]:
        each["ts"], each["dur"] = 10 * each["ts"], 10 * each["dur"]
    (folder / "z.json").write_text(json.dumps(late))
    entry = report(["--log-dir", str(folder), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    assert entry["metrics"]["job_step_ms"]["median"] == pytest.approx(0.1)
    write_nsys(tmp_path / "node.sqlite")  # two processes, and nothing that says which ranks they were
    entry = report(["--log-dir", str(tmp_path / "node.sqlite"), "--label", "x"], tmp_path / "o2")["datasets"]["x"]
    assert entry["metrics"]["job_step_ms"]["median"] is None
    assert entry["metrics"]["job_step_ms"]["reason"].startswith("no rank is known")


def written(folder: Path, rank: int, *, since: int = 0, first: int = 0, **about: int) -> None:
    """The trace of a rank, `since` us later, with steps that are numbered from 5 + `first`."""
    made = json.loads(trace_of(rank))
    made["distributedInfo"] |= about
    for each in made["traceEvents"]:
        each["ts"] += since
        if each["name"].startswith("ProfilerStep#"):
            each["name"] = f"ProfilerStep#{int(each['name'][13:]) + first}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{rank}.json").write_text(json.dumps(made))


def test_traces_of_several_jobs_below_one_folder_are_refused_with_their_list(tmp_path: Path) -> None:
    for rank in (0, 1):
        written(tmp_path / "x/ddp", rank)
        written(tmp_path / "x/fsdp", rank, since=10**6)
    said = (
        f"NOT COMPARABLE: the traces in {tmp_path} are of several jobs:\n"
        f"  {tmp_path}/x/ddp: ranks 0-1\n  {tmp_path}/x/fsdp: ranks 0-1\n"
        "Report on the folder of one job"
    )
    with pytest.raises(InputError, match=re.escape(said)):
        load_traces(str(tmp_path))


def test_jobs_of_other_sizes_are_refused_whatever_their_steps_are(tmp_path: Path) -> None:
    written(tmp_path / "small", 0)
    written(tmp_path / "large", 0, since=10**6, first=10, world_size=4)
    with pytest.raises(InputError, match=r"large: rank 0\n.*small: rank 0"):
        load_traces(str(tmp_path))


def test_folders_of_nodes_and_of_windows_are_one_job(tmp_path: Path) -> None:
    for window in (0, 10):
        for rank in (0, 1):
            written(tmp_path / f"iteration_{window}/node_{rank}", rank, since=window * 10**5, first=window)
    run = load_traces(str(tmp_path))
    assert [tables.steps.global_step.tolist() for tables in run.ranks.values()] == [[5, 6, 15, 16]] * 2


def test_a_rank_whose_trace_holds_nothing_that_can_be_measured_is_not_read(folder, tmp_path):
    absurd = json.loads(trace_of(1))
    for each in absurd["traceEvents"]:
        each["dur"] = 3_600_000_000
    (folder / "1.json").write_text(json.dumps(absurd))
    run = load_traces(str(folder))
    assert (run.health.ranks_read, run.health.ranks_missing) == ([0], [1])


def test_unnumbered_collectives_match_by_their_order_only_where_the_counts_agree(tmp_path):
    def traced(rank: int, counts: tuple[int, int]) -> str:
        events = []
        for number, count in enumerate(counts):
            events.append(event("user_annotation", f"ProfilerStep#{number}", number * 100, 100, 1, 1))
            for place in range(count):
                start = number * 100 + place * 20 + rank
                made = event("user_annotation", "gloo:all_reduce", start, 10 - rank, 1, 9)
                made["args"] = {"Input Dims": [[10]], "Input type": ["float"]}
                events.append(made)
        groups = [{"pg_name": "0", "ranks": [0, 1]}]
        about = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": groups}
        return json.dumps(document(events, deviceProperties=[], distributedInfo=about))

    (tmp_path / "0.json").write_text(traced(0, (3, 2)))
    (tmp_path / "1.json").write_text(traced(1, (3, 1)))
    (row,) = report(["--log-dir", str(tmp_path), "--label", "x"], tmp_path / "out")["datasets"]["x"]["collectives"]
    assert row["transfer_ms"]["count"] == 3  # those of the step in which both ranks have three
    assert row["transfer_ms"]["median"] == pytest.approx(0.009)
    assert row["transfer_ms"]["nulls"] == 3


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, "the trace does not number it"),
        ({"Process_Group_Name": "9"}, "the ranks of its group are not known"),
        ({"Collective_name": "unheard_of"}, "its kind is not known"),
    ],
)
def test_collectives_of_a_device_are_not_matched_by_their_order_and_the_reason_is_true(tmp_path, about, words):
    """Rank 1's device is one collective behind at both marks: steps hold as many, and not the same."""
    groups = [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [0]}]
    known = {"Collective_name": "allreduce", "In_msg_nelems": 9, "Out_msg_nelems": 9, "dtype": "Float"}
    generic = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    for rank in (0, 1):
        name = generic if "Collective_name" in about else ALLREDUCE
        events = [step(number, number * 100, 100) for number in (1, 2)]
        events += [
            kernel(
                name, at + rank * 50, 10, rank, 20, **{**known, "Process_Group_Name": "0", "External_id": at, **about}
            )
            for at in (110, 160, 210)
        ]
        facts = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups}
        (tmp_path / f"{rank}.json").write_text(json.dumps(document(events, distributedInfo=facts, cupti_version=26)))
    rows = report(["--log-dir", str(tmp_path), "--label", "x"], tmp_path / "out")["datasets"]["x"]["collectives"]
    assert sum(row["rows"] for row in rows) == 6
    for row in rows:
        assert row["transfer_ms"]["median"] is None
        assert words in row["transfer_ms"]["reason"]


def test_steps_whose_windows_overlap_keep_their_own_segments(tmp_path: Path) -> None:
    # Step 5 was marked from 0 to 30 us, step 2 from 20 to 60 us: in the order of their numbers 2 comes first.
    rows = [step(5, 0, 30), step(2, 20, 40), kernel("gemm", 2, 10), kernel(ALLREDUCE, 25, 10, 0, 20)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document(rows)))
    tables = load_traces(str(path)).ranks[0]
    assert tables.steps.global_step.tolist() == [2, 5]
    spans = tables.details.spans(np.arange(2)).of_lanes(Lane.COMPUTE)
    assert np.bincount(spans.step, spans.end_ns - spans.start_ns, 2).tolist() == [0, 10_000]
    assert "steps overlap" in tables.steps.reasons[tables.steps.reason[0]]["compute_ms"]
    for place in range(2):
        found = tables.details.step(place)
        assert found.length_ns == tables.steps.length_ns[place]
        assert [part.end_ns for part in found.segments[:-1]] == [part.start_ns for part in found.segments[1:]]
        active = {name: sum(end - start for start, end in spans) for name, spans in found.active().items()}
        assert active == [{"allreduce": 10_000}, {"compute": 10_000, "allreduce": 5000}][place]
