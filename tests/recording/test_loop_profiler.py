"""Presets in real runs of two ranks: which files, the same steps everywhere, and what the manifest says is where."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from aorta.distributed.output_folder import LOCK_FILE, RunFolder
from aorta.distributed.peers import Peers
from aorta.errors import ConfigError, FolderNotEmpty, TracesIncomplete
from aorta.merge.merge_traces import merge_traces
from aorta.recording.loop_profiler import LoopProfiler, must_be_empty
from aorta.recording.trace_accounts import NOTHING, missing_traces, publish
from tests.distributed.conftest import World, place
from tests.profiling.windows import files_below, listening, loop, numbers, preset, read
from tests.runs import attempt, record, train

ON = "profiling.enabled=true"


def manifest(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.dist
@pytest.mark.spec("A5", "A16", "E11", "E16")
def test_every_rank_has_its_own_file_of_the_same_steps_and_the_manifest_says_what_is_where(tmp_path):
    words = ("profiling.period=4", "profiling.warmup=1", "profiling.active=1", "profiling.with_stack=false")
    train(tmp_path, "profiling=d9d", ON, *words, f"profiling.remote_root=file://{tmp_path}/remote", "label=x")
    run = tmp_path / "x"
    names = {step: [f"step_{step}/rank-{rank}-coord-{rank}-trace.tar.gz" for rank in (0, 1)] for step in (4, 8)}
    here = files_below(run / "torch_profiler")
    assert here == [*names[4], *names[8]]
    for step, own in names.items():
        assert [numbers(read(run / "torch_profiler" / name)) for name in own] == [[step - 1]] * 2
    traces = manifest(run)["traces"]
    assert {entry["batch"]: entry["paths"] for entry in traces["saved_traces"]} == {
        step: [f"torch_profiler/{name}" for name in own] for step, own in names.items()
    }
    assert files_below(tmp_path / "remote") == [f"x/torch_profiler/{name}" for name in here]
    files = [file for windows in traces["ranks"].values() for window in windows for file in window["files"]]
    assert len(files) == 4
    for file in files:
        there = Path(file["uploaded_to"].removeprefix("file://"))
        assert there.read_bytes() == (run / file["path"]).read_bytes()
        assert (file["here"], file["error"], file["bytes"]) == (True, None, there.stat().st_size)
    log = (run / "logs/rank_0.log").read_text()
    assert "profiling: 4 file(s) of 2 rank(s): 4 on node 0 (" in log
    assert f"), rank 0, 1 in {run / 'torch_profiler'}; 4 uploaded" in log


@pytest.mark.dist
@pytest.mark.spec("B3", "B8")
def test_B3_B8_ranks_that_are_not_profiled_do_all_the_work(tmp_path):
    words = ("profiling=tutorial", "profiling.wait=1", "profiling.warmup=1", "profiling.active=2")
    train(tmp_path, *words, ON, "profiling.with_stack=false", "profiling.ranks=[1]")
    assert files_below(tmp_path / "torch_profiler") == ["rank1_iter3_4.json"]
    zero, one = (record(tmp_path, rank).steps for rank in (0, 1))
    assert len(zero) == len(one) == 8
    assert [step.grad_norm for step in zero] == [step.grad_norm for step in one]
    assert [entry["paths"][0] for entry in manifest(tmp_path)["traces"]["saved_traces"]] == [None]


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.spec("E8")
def test_E8_a_folder_that_is_not_empty_stops_every_rank_before_anything_is_written(tmp_path):
    there = tmp_path / "y" / "torch_traces"
    there.mkdir(parents=True)
    (there / "old.json").write_text("mine")
    done = attempt(tmp_path, "profiling=composer", ON, "label=y")
    assert done.returncode != 0
    assert "FileExistsError: " in done.stderr  # of both ranks, where the launcher does not end one before
    assert "old.json exists" in done.stderr
    assert files_below(tmp_path) == [f"y/{LOCK_FILE}", "y/torch_traces/old.json"]


@pytest.mark.spec("E8")
def test_E8_only_visible_files_count(tmp_path):
    must_be_empty(tmp_path / "none")
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for hidden in (".git/config", ".hidden"):
        (tmp_path / hidden).write_text("")
    must_be_empty(tmp_path)
    (tmp_path / "sub" / "x").write_text("")
    with pytest.raises(FolderNotEmpty, match=r"is not empty; sub/x exists\. Set profiling\.overwrite=true"):
        must_be_empty(tmp_path)
    assert issubclass(FolderNotEmpty, FileExistsError)


@pytest.mark.spec("D12")
def test_D12_on_rocm_the_manifest_says_why_there_is_no_trace_and_the_log_once(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    disabled = {"chrome_trace_disabled": "rocm"}
    for settings, facts in (({}, disabled), ({"chrome_trace_force": True}, {}), ({"enabled": False}, {})):
        assert LoopProfiler(preset("aorta", **settings), run_name="rocm").facts() == facts
    profiler = LoopProfiler(preset("aorta"), run_name="rocm")
    with listening() as said:
        profiler.check(place(), Peers(dist.HashStore(), 0, 1, timeout_s=1.0), resuming=False)
        assert said == []  # which opening says
        profiler.begin(0, tmp_path)
    assert len(said) == 1


@pytest.mark.parametrize("alone", [True, False], ids=["settled", "a peer failed"])
def test_what_is_slow_to_arrive_is_waited_for_once(tmp_path, monkeypatch, alone):
    settings = preset("aorta", upload_wait_s=0.05)
    profiler, release = loop(tmp_path / "traces", settings, 5), threading.Event()
    assert profiler.saver.drain(60)  # nothing else is under way
    profiler.saver.call(lambda: release.wait(60) and None)
    waits = []
    monkeypatch.setattr(profiler.saver, "drain", lambda limit_s: waits.append(limit_s))
    (tmp_path / "run.json").write_text("{}")
    peers = Peers(dist.HashStore(), 0, 1 if alone else 2, timeout_s=0.2)
    around = LoopProfiler(settings, run_name="cpu")
    around._topology, around._peers, around._recording = place(0, peers.world_size), peers, profiler
    ((_, paths),) = around.saved_traces  # of this rank alone, until the others are asked
    assert [path is not None for path in paths] == [True, False][: peers.world_size]
    with pytest.raises(
        TracesIncomplete, match=r"writes or uploads unfinished after profiling.upload_wait_s: rank 0: 1"
    ):
        around.settle(RunFolder(tmp_path, "run", 0))
    assert manifest(tmp_path).get("traces", {}).get("unfinished") == (1 if alone else None)
    profiler.__exit__(None, None, None)
    assert waits == []
    release.set()


@pytest.mark.spec("A7")
def test_a_rank_outside_the_mesh_ends_the_start_on_every_rank(tmp_path):
    def start(peers):
        mesh = SimpleNamespace(get_coordinate=lambda: None if peers.rank else (0,))
        profiler = LoopProfiler(preset("d9d"), folder=tmp_path / "traces", run_name="cpu", mesh=mesh)
        profiler.check(place(peers.rank, 2), peers, resuming=False)

    refused = World()(2, start)
    assert [type(error) for error in refused] == [ConfigError] * 2
    assert all(str(error).startswith("rank 1: not in the mesh ") for error in refused)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("E9")
def test_what_any_rank_lacks_is_said_with_what_is_where():
    def saved(error):
        return {**NOTHING, "windows": [{"files": [{"path": "/t.json", "here": True, "error": error}]}]}

    assert missing_traces([saved(None)] * 2) == ""
    assert missing_traces([saved(None), saved("FileExistsError: file:///r.json already exists")]) == (
        "profiling: rank 1: /t.json (still on disk): FileExistsError: file:///r.json already exists; "
        "the other 1 file(s) are complete"
    )


@pytest.mark.spec("B7", "B13", "E16")
def test_B13_the_line_and_the_list_say_on_which_node_each_rank_s_file_is(tmp_path):
    def saved(rank, folder):
        path = str(folder / f"rank{rank}.json")
        file = {"kind": "trace", "path": path, "bytes": 2, "here": True, "uploaded_to": None, "error": None}
        window = {"first_step": 2, "last_step": 3, "partial": False, "files": [file]}
        kept = [{"batch": 4, "path": path}]
        return {"node": rank, "host": f"host{rank}", "windows": [window], "kept": kept, "pending": 0}

    here, there = tmp_path / "run" / "torch_profiler", Path("/elsewhere/torch_profiler")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with listening("aorta.recording") as said:
        publish([saved(0, here), saved(1, there)], RunFolder(tmp_path / "run", "run", 0))
    assert said == [
        f"profiling: 2 file(s) of 2 rank(s): 1 on node 0 (host0), rank 0 in {here}; 1 on node 1 (host1), rank 1 in "
        f"{there}; 0 uploaded, 0 failed; the list is in {tmp_path / 'run' / 'run.json'} (traces)"
    ]
    (row,) = manifest(tmp_path / "run")["traces"]["saved_traces"]
    assert row["paths"] == ["torch_profiler/rank0.json", "/elsewhere/torch_profiler/rank1.json"]


@pytest.mark.thorough
@pytest.mark.spec("A12")
def test_A12_a_resumed_run_writes_its_windows_beside_the_earlier(tmp_path, capsys):
    words = ("profiling=d9d", ON, "profiling.period=4", "profiling.warmup=1", "profiling.active=1")
    words += ("profiling.with_stack=false", "training.checkpoint_interval=4")
    traces = tmp_path / "torch_profiler"
    train(tmp_path, *words, "training.max_steps=4", ranks=1)
    first = (traces / "step_4/trace.tar.gz").read_bytes()
    train(tmp_path, *words, "training.start_step=4", ranks=1)
    assert files_below(traces) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    assert (traces / "step_4/trace.tar.gz").read_bytes() == first
    assert record(tmp_path).header.start_step == 4
    # The record and the clocks of the first window are in history/ by now: a merge finds those of the trace's own run.
    for window, step in (("0", 3), ("1", 7)):
        target = tmp_path / f"merged{window}.json"
        assert merge_traces([str(traces), "-o", str(target), "--window", window]) == 0
        said = capsys.readouterr()
        assert "1 steps of its record; the reference clock" in said.out
        assert "offset measured once only" not in said.err
        assert f"step {step}" in [event["name"] for event in read(target)["traceEvents"] if event["ph"] == "B"]
