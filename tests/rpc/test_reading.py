"""An RPC run whose files are odd: errors that name the file, and reasons that are true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.merge.sources import describe
from aorta.records.run_files import CALL_MARK, CALLS_FILE, MEMORY_KEY, RPC_FILE, Call, RpcFacts, Worker
from aorta.rpc.rpc_report import read_operators, rpc_report
from tests.merge.traces import BASE_NS, text, write, x


def run(folder: Path, event: dict[str, Any], *, callers: tuple[int, ...] = (0,)) -> Path:
    """One trace, of worker 0; each caller made one call of it that was answered."""
    for caller in callers:
        call = Call(f"{caller}-1", "job", "sync", "f", caller, 0, 0, None, BASE_NS, True, BASE_NS + 5000)
        path = folder / "torch_profiler" / f"worker{caller}" / CALLS_FILE.format(window=0)
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(call) + b"\n")
    return write(folder / "torch_profiler" / "worker0" / "rpc_window_0000.json", text([x("a", 1, 1), event], rank=0))


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 3, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": 3},
        {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": None, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": 7, "pid": 1, "tid": 1, "ts": 3, "dur": 1},
        {"cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": 3, "dur": 1},
    ],
)
def test_an_odd_event_is_an_error_that_names_the_file(tmp_path, capsys, event):
    path = run(tmp_path / "run", event)
    assert rpc_report([str(tmp_path / "run")]) == 2
    assert f"{path}: event 1: not a trace event" in capsys.readouterr().err


def test_an_answered_call_of_a_caller_without_a_trace_is_not_said_to_be_unanswered(tmp_path, capsys):
    run(tmp_path / "run", x("b", 3, 1), callers=(0, 1))
    assert rpc_report([str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "no trace of its caller" in said
    assert "without an answer" not in said


@pytest.mark.spec("C4")
def test_C4_waiting_for_a_call_of_its_own_is_no_self_time_of_what_a_worker_runs(tmp_path):
    outer = x(f"rpc_sync#f(w0 -> w1){CALL_MARK}0-1", 10, 100)
    path = write(tmp_path / "t.json", text([outer, x("mine", 20, 70), x("aten::add", 85, 2)], rank=1))

    def nested(kind: str, begin_us: int, end_us: int) -> Call:
        begin, end = (BASE_NS + us * 1000 for us in (begin_us, end_us))
        return Call(f"1-{begin_us}", "inner", kind, "g", 1, 0, 0, "0-1", begin, True, end)

    calls = [nested("rpc_sync", 30, 80), nested("rpc_async", 82, 84), nested("rpc_sync", 95, 500)]
    rows = {row.name: row for row in read_operators(describe(path), calls)}
    assert {name: row.self_ns for name, row in rows.items()} == {
        "rpc_sync#f(w0 -> w1)": 30_000,
        "mine": 18_000,
        "aten::add": 2_000,
    }
    assert rows["aten::add"].serves == "rpc_sync#f(w0 -> w1)"


def facts(folder: Path, **of: Any) -> None:
    about: dict[str, Any] = {"windows": 4, "profiled": False, "incomplete": True, "lost": {}, "cut_short": None, **of}
    found = RpcFacts(1, [Worker(0, "w0"), Worker(1, "w1")], driver=0, **about)
    (folder / RPC_FILE).write_bytes(msgspec.json.encode(found))


@pytest.mark.spec("C9")
def test_C9_of_a_run_that_says_nothing_of_its_end_the_finished_windows_are_shown(tmp_path, capsys):
    folder = tmp_path / "run"
    run(folder, x("b", 3, 1), callers=(0, 1))
    facts(folder, ended=False, finished_windows=1)
    assert rpc_report([str(folder), "--overwrite"]) == 0
    said = capsys.readouterr()
    assert "the driver w0 (node 0) did not report its end: killed, or still running" in said.err
    assert "1 of 4 windows were finished" in said.err
    assert "lists of the calls" not in said.err, "both workers wrote what was finished"
    assert sum("job" in line for line in said.out.splitlines()) == 2
    lists = folder / "torch_profiler" / "worker0"
    (lists / CALLS_FILE.format(window=1)).write_bytes(b"")
    facts(folder, ended=False, finished_windows=2)
    assert rpc_report([str(folder), "--overwrite"]) == 0
    assert "worker w1 (node 1): 1 of 2 lists of the calls it made" in capsys.readouterr().err


@pytest.mark.parametrize("memory", [[], {"0-1": {"allocated_bytes": "many"}}])
def test_broken_memory_figures_are_an_error_that_names_the_file(tmp_path, capsys, memory):
    path = tmp_path / "run" / "torch_profiler" / "worker0" / "rpc_window_0000.json"
    write(path, text([x("a", 1, 1)], rank=0, **{MEMORY_KEY: memory}))
    assert rpc_report([str(tmp_path / "run")]) == 2
    assert f"{path}: its {MEMORY_KEY} is not what a worker writes" in capsys.readouterr().err
