"""What is given as traces, and which ranks they are: numbers of whole reports, archives, URLs, jobs of many folders."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.frames import Lane
from aorta.read.locations import load_source
from aorta.read.run import RankTables
from aorta.read.traces.files import READERS, find_units
from aorta.read.traces.load import load_traces
from aorta.report.command import overlap_report
from aorta.timeline.overlap import OF_UNKNOWN_KIND
from benchmarks.kineto_traces import Plan, write_traces
from tests.analysis.builders import simulated_run, strict_json
from tests.read.kineto_files import ALLREDUCE, document, event, kernel, step
from tests.read.nsys_files import write_nsys
from tests.runs import ROOT


def trace_of(rank: int, late: int = 0) -> str:
    """Two steps of 100 us; in each one all-reduce of 40 us, a quarter of it hidden; rank 1 waits `late` us longer."""
    events = []
    for number in range(2):
        start = number * 100
        events += [step(number + 5, start, 100), kernel("gemm", start + 10, 30, rank)]
        one = kernel(ALLREDUCE, start + 30 - late, 40 + late, rank, 20)
        one["args"] |= {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Seq": number}
        one["args"] |= {"Group size": 2, "dtype": "Float", "Process Group Name": "0"}
        events.append(one)
    groups = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
    about = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups}
    return json.dumps(document(events, distributedInfo=about, cupti_version=26))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks whose names say nothing, one compressed, and a file that is no trace."""
    found = tmp_path / "traces"
    found.mkdir()
    (found / "b.txt").write_text(trace_of(0))
    (found / "a.bin").write_bytes(gzip.compress(trace_of(1, late=8).encode()))
    (found / "notes.json").write_text('{"hello": 1}')
    return found


def test_the_table_of_sources_has_a_row_for_every_reader() -> None:
    text = (ROOT / "docs" / "traces.md").read_text()
    table = text.partition("## What each source gives")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip().replace("`", "") for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == [reader.files for reader in READERS]


def report(words: list[str], output: Path) -> dict:
    assert overlap_report([*words, "--all", "--output", str(output)]) == 0
    return strict_json(output / "summary.json")


def test_numbers_of_a_report_are_those_written_down_by_hand(folder, tmp_path):
    assert [unit.format for unit in find_units(str(folder))[0]] == ["kineto", "kineto"]
    entry = report(["--log-dir", str(folder), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    metrics, health = entry["metrics"], entry["health"]
    assert (health["ranks_read"], health["ranks_missing"]) == ([0, 1], [])
    assert entry["count"] == 4
    # Hidden: rank 0 10 of 40 us, rank 1 18 of 48 us.
    assert metrics["overlap_ratio"]["per_rank_median"] == {"0": 0.25, "1": 0.375}
    assert metrics["window_ms"]["median"] == pytest.approx(0.1)
    assert metrics["job_step_ms"]["median"] == pytest.approx(0.1)
    for name in ("aux_ms", "compute_stall_ms"):
        assert metrics[name]["median"] is None
        assert metrics[name]["reason"]
    assert metrics["copy_ms"]["median"] == 0
    (allreduce,) = entry["collectives"]
    assert (allreduce["bytes"], allreduce["group_size"], allreduce["collectives"]) == (4000, 2, 2)
    assert allreduce["transfer_ms"]["median"] == pytest.approx(0.04)
    assert allreduce["wait_ms"]["per_rank_median"] == pytest.approx({"0": 0.0, "1": 0.008})
    assert allreduce["algbw_gb_per_s"]["median"] == pytest.approx(4000 / 40e-6 / 1e9)
    assert allreduce["queued_ms"]["median"] is None
    whole = entry["traces"]["whole"]["0"]["metrics"]
    assert whole["overlap_ratio"] == 0.25
    assert whole["window_ms"] == pytest.approx(0.16)
    assert (tmp_path / "out" / "x_timeline.png").exists()


@pytest.mark.thorough
def test_traces_and_a_run_of_aortas_own_stand_side_by_side(folder, tmp_path, capsys):
    run = simulated_run(tmp_path / "run", label="own", ranks=2, steps=4, warmup=1)
    words = ["--reference", str(run), "--candidate", f"{folder}/*.*"]
    summary = report(words, tmp_path / "out")
    assert set(summary["datasets"]) == {"run", "traces"}
    assert summary["comparison"]["reference_overlap_ratio"] is not None
    assert "2 of 2 ranks" in capsys.readouterr().out


def test_a_missing_rank_is_said_and_what_needs_all_ranks_is_null(folder, tmp_path):
    (folder / "a.bin").unlink()
    entry = report(["--log-dir", str(folder), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    assert entry["health"]["ranks_missing"] == [1]
    assert entry["metrics"]["job_step_ms"]["median"] is None
    assert entry["collectives"][0]["transfer_ms"]["median"] is None


def test_the_same_trace_in_an_archive_behind_a_url_and_alone(folder, tmp_path):
    archive = tmp_path / "traces.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="deep/er")
    expected = [told(tables) for tables in load_traces(str(folder)).ranks.values()]
    for place in (str(archive), f"file://{folder}", f"file://{archive}"):
        run = load_traces(place)
        assert list(run.ranks) == [0, 1]
        assert [told(tables) for tables in run.ranks.values()] == expected
    alone = load_traces(f"file://{folder}/b.txt")
    assert list(alone.ranks) == [0]


def test_an_archive_without_a_trace_is_refused(folder, tmp_path):
    with tarfile.open(tmp_path / "none.tar.gz", "w:gz") as tar:
        tar.add(folder / "notes.json", arcname="a.txt")
    with pytest.raises(InputError, match=r"none\.tar\.gz.*without a trace"):
        load_traces(str(tmp_path / "none.tar.gz"))


def test_a_packed_run_is_refused_with_what_to_do(tmp_path):
    simulated_run(tmp_path / "run", label="x", ranks=1, steps=2)
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "run", arcname="run")
    with pytest.raises(InputError, match=r"run\.tar\.gz: holds the record of a run; unpack it \(tar xf\)"):
        load_source(tmp_path / "run.tar.gz")


def test_broken_compression_is_an_error_with_the_file_and_exit_code_2(tmp_path, capsys):
    whole = gzip.compress(trace_of(0).encode())
    path = tmp_path / "bent.gz"
    path.write_bytes(whole[:200] + b"\x00" * 40 + whole[240:])
    assert overlap_report(["--log-dir", str(path), "--label", "x", "--output", str(tmp_path / "o")]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_gzip_stream_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(trace_of(0).encode())[:-30])
    assert any("its gzip stream ends early" in note for note in load_source(path).health.notes)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "nothing that can be read"),
        (b"PK\x03\x04....", "zip archive"),
        (b"\x00" * 5000, "nothing that can be read"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none_with_a_hint(tmp_path, data, words):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=words):
        load_source(path)


def test_a_bomb_of_zeros_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    from aorta.read.traces import chrome_json
    from aorta.read.traces import open as load_open

    monkeypatch.setattr(chrome_json, "LIMIT", 1 << 20)
    monkeypatch.setattr(chrome_json, "BLOCK", 1 << 18)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (32 << 20)))
    with pytest.raises(InputError, match="MiB without a place"):
        load_traces(str(path))
    monkeypatch.setattr(load_open, "INFLATED_LIMIT", 1 << 20)
    many = b'{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1},' * 400_000
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + many))
    with pytest.raises(InputError, match="no trace is compressed that far"):
        load_traces(str(path))


def test_one_bad_file_of_a_folder_is_left_out_and_said(folder):
    (folder / "bad.json").write_text('{"schemaVersion": 1, "traceEvents": 5}')
    run = load_traces(str(folder))
    assert list(run.ranks) == [0, 1]
    assert any("bad.json" in note and "left out" in note for note in run.health.notes)


def told(tables: RankTables) -> list[object]:
    """Every column of a rank."""
    steps, rows = tables.steps, tables.collectives
    columns = (steps.global_step, steps.start_mono_ns, steps.end_mono_ns, rows.step, steps.reason)
    of_rows = (rows.name, rows.seq, rows.start_ns, rows.end_ns)
    metrics = [(name, column.tobytes()) for name, column in steps.metrics.items()]
    return [rows.names, steps.reasons, metrics, *(column.tobytes() for column in (*columns, *of_rows))]


def test_a_folder_is_read_by_several_processes_to_the_same_bytes(tmp_path):
    from aorta.read.engines import Local

    list(write_traces(Plan(ranks=2, megabytes=0.1, steps=2), tmp_path))
    one, two = load_traces(str(tmp_path)), load_traces(str(tmp_path), Local(2))
    for number in one.ranks:
        assert told(one.ranks[number]) == told(two.ranks[number])
    assert one.traces == two.traces


@pytest.mark.thorough
def test_a_process_that_reads_loads_neither_pandas_nor_matplotlib_nor_torch(folder):
    code = (
        "import sys\nfrom aorta.read.traces.files import find_units\n"
        "from aorta.read.traces.tables import read_trace_tables\n"
        "read_trace_tables(find_units(sys.argv[1])[0][0])\n"
        "print(sorted({'pandas', 'matplotlib', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_kinds_are_null_where_some_communication_is_of_unknown_kind_and_never_0_throughout(tmp_path, capsys):
    # Step 5 has an all-reduce of 40 us, step 6 communication of unknown kind, step 7 none.
    generic = kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 130, 40, 0, 20)
    events = [kernel("gemm", start, 30) for start in (10, 110, 210)]
    events += [step(5 + n, n * 100, 100) for n in range(3)] + [kernel(ALLREDUCE, 30, 40, 0, 20), generic]
    (tmp_path / "t.json").write_text(json.dumps(document(events)))
    dataset = report(["--log-dir", str(tmp_path / "t.json"), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    found = dataset["metrics"]["allreduce_ms"]
    assert (found["count"], found["nulls"], found["max"]) == (2, 1, 0.04)
    assert list(found["null_reasons"]) == [OF_UNKNOWN_KIND]
    assert (dataset["metrics"]["comm_ms"]["count"], dataset["metrics"]["comm_ms"]["nulls"]) == (3, 0)
    none = dataset["metrics"]["reducescatter_ms"]
    assert (none["max"], none["nulls"]) == (0, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "reducescatter_ms" not in said.partition("0 throughout:")[2].partition(" collectives ")[0]


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
def below(tmp_path: Path) -> Path:
    found = tmp_path / "traces"
    found.mkdir()
    for rank in (0, 1):
        (found / f"{rank}.json").write_text(trace_of(rank))
    return found


def test_a_job_step_is_that_of_known_ranks_and_null_where_none_is_known(below, tmp_path):
    # A second trace that claims to be rank 1, with steps ten times as long.
    late = json.loads(trace_of(1))
    for each in late["traceEvents"]:
        each["ts"], each["dur"] = 10 * each["ts"], 10 * each["dur"]
    (below / "z.json").write_text(json.dumps(late))
    entry = report(["--log-dir", str(below), "--label", "x"], tmp_path / "out")["datasets"]["x"]
    assert entry["metrics"]["job_step_ms"]["median"] == pytest.approx(0.1)
    write_nsys(tmp_path / "node.sqlite")  # two processes, and nothing that says which ranks they were
    entry = report(["--log-dir", str(tmp_path / "node.sqlite"), "--label", "x"], tmp_path / "o2")["datasets"]["x"]
    assert entry["metrics"]["job_step_ms"]["median"] is None
    assert entry["metrics"]["job_step_ms"]["reason"].startswith("no rank is known")


def written(below: Path, rank: int, *, since: int = 0, first: int = 0, **about: int) -> None:
    """The trace of a rank, `since` us later, with steps that are numbered from 5 + `first`."""
    made = json.loads(trace_of(rank))
    made["distributedInfo"] |= about
    for each in made["traceEvents"]:
        each["ts"] += since
        if each["name"].startswith("ProfilerStep#"):
            each["name"] = f"ProfilerStep#{int(each['name'][13:]) + first}"
    below.mkdir(parents=True, exist_ok=True)
    (below / f"{rank}.json").write_text(json.dumps(made))


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


def test_a_rank_whose_trace_holds_nothing_that_can_be_measured_is_not_read(below, tmp_path):
    absurd = json.loads(trace_of(1))
    for each in absurd["traceEvents"]:
        each["dur"] = 3_600_000_000
    (below / "1.json").write_text(json.dumps(absurd))
    run = load_traces(str(below))
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
