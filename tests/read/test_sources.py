"""What is given as traces, and which ranks they are: numbers of whole reports, archives, URLs, jobs of many folders."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.engines import Local
from aorta.read.frames import Lane
from aorta.read.locations import load_source
from aorta.read.run import RankTables
from aorta.read.traces import chrome_json
from aorta.read.traces import open as load_open
from aorta.read.traces.files import READERS
from aorta.read.traces.load import load_traces
from aorta.report.command import overlap_report
from benchmarks.kineto_traces import Plan, write_traces
from tests.analysis.builders import simulated_run, strict_json
from tests.read.kineto_files import ALLREDUCE, document, kernel, step
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


@pytest.mark.thorough
def test_traces_and_a_run_of_aortas_own_stand_side_by_side(folder, tmp_path, capsys):
    run = simulated_run(tmp_path / "run", label="own", ranks=2, steps=4, warmup=1)
    words = ["--reference", str(run), "--candidate", f"{folder}/*.*", "--all", "--output", str(tmp_path / "out")]
    assert overlap_report(words) == 0
    summary = strict_json(tmp_path / "out" / "summary.json")
    assert set(summary["datasets"]) == {"run", "traces"}
    assert summary["comparison"]["reference_overlap_ratio"] is not None
    assert "2 of 2 ranks" in capsys.readouterr().out


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


def test_archives_without_a_trace_are_refused_with_what_to_do(folder, tmp_path):
    simulated_run(tmp_path / "run", label="x", ranks=1, steps=2)
    for name, inside in (("none", folder / "notes.json"), ("run", tmp_path / "run")):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(inside, arcname=name)
    with pytest.raises(InputError, match=r"none\.tar\.gz.*without a trace"):
        load_traces(str(tmp_path / "none.tar.gz"))
    with pytest.raises(InputError, match=r"run\.tar\.gz: holds the record of a run; unpack it \(tar xf\)"):
        load_source(tmp_path / "run.tar.gz")


WHOLE = gzip.compress(trace_of(0).encode())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "nothing that can be read"),
        (b"PK\x03\x04....", "zip archive"),
        (b"\x00" * 5000, "nothing that can be read"),
        (WHOLE[:200] + b"\x00" * 40 + WHOLE[240:], "x.json"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none_with_a_hint(tmp_path, data, words):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=words) as caught:
        load_source(path)
    assert caught.value.exit_code == 2


def test_a_bomb_of_zeros_is_refused_in_bounded_memory(tmp_path, monkeypatch):
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


def told(tables: RankTables) -> list[object]:
    """Every column of a rank."""
    steps, rows = tables.steps, tables.collectives
    columns = (steps.global_step, steps.start_mono_ns, steps.end_mono_ns, rows.step, steps.reason)
    of_rows = (rows.name, rows.seq, rows.start_ns, rows.end_ns)
    metrics = [(name, column.tobytes()) for name, column in steps.metrics.items()]
    return [rows.names, steps.reasons, metrics, *(column.tobytes() for column in (*columns, *of_rows))]


def test_a_folder_is_read_by_several_processes_to_the_same_bytes(tmp_path):
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
