"""Whole RPC runs: every call of every window, whatever serves it, and what is left when a worker dies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from aorta.analysis.rpc.rpc_command import rpc_report
from aorta.analysis.rpc.rpc_records import read_run
from aorta.analysis.rpc.rpc_rows import read_rows
from tests.analysis.merge.traces import load, problems
from tests.runs import HANGS_S, ROOT, environment, job, succeeded

pytestmark = pytest.mark.dist
THREADS = (1, 4, 16)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """20 windows of 3 calls, with 1, 4 and 16 server threads; the second on a skewed clock."""
    folder = tmp_path_factory.mktemp("rpc")
    for threads in THREADS:
        words = [
            "workload=rpc",
            "workload.windows=20",
            "workload.calls=3",
            f"workload.num_worker_threads={threads}",
            "profiling.enabled=true",
            f"profiling.record_shapes={str(threads == 4).lower()}",
            f"training.output_dir={folder}",
            f"label=threads{threads}",
        ]
        if threads == 4:
            words += ["clock.fake_offset_ns=123456789", "clock.fake_drift_ppm=80"]
        succeeded(job(*words))
    return folder


@pytest.fixture
def skewed(runs) -> Path:
    return runs / "threads4"


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.spec("C5")
def test_C5_every_call_of_every_window_is_seen_on_both_sides(runs, threads):
    run = read_run(runs / f"threads{threads}")
    assert run.missing == []
    mine = [call for call in run.calls if call.caller == 0]
    assert len(mine) == 60
    assert Counter(call.window for call in mine) == dict.fromkeys(range(20), 3)
    assert {call.kind for call in mine} == {"rpc_sync", "rpc_async", "rpc_remote"}
    assert {call.function for call in mine} == {"aten::add", "udf_with_torch_ops"}
    found = [(trace.rank, row) for trace in run.traces for row in read_rows(trace).operators if row.call_id]
    assert Counter(row.call_id for _, row in found) == Counter(call.call_id for call in run.calls)
    by_id = {call.call_id: call for call in run.calls}
    assert all(by_id[row.call_id].callee == node and by_id[row.call_id].name == row.name for node, row in found)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.spec("C6")
def test_C6_workers_profile_what_the_driver_asks_for(runs, threads):
    for trace in read_run(runs / f"threads{threads}").traces:
        if trace.rank:
            assert ("Input Dims" in trace.path.read_text()) is (threads == 4 and "aten::" in trace.path.read_text())


@pytest.mark.spec("C4")
def test_C4_the_table_counts_every_call_on_the_node_that_made_it(runs, tmp_path, capsys):
    folder = runs / "threads4"
    assert rpc_report([str(folder), "-o", str(tmp_path / "t.json"), "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ["Name", "Self CPU total %", "Self CPU total", "CPU total %", "CPU total", "CPU time avg"]
    assert [head.strip() for head in lines[0].split("  ") if head.strip()][:8] == [*heads, "Number of Calls", "Node ID"]
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:] if "worker" in line[-10:]]
    calls = read_run(folder).calls
    own = [row for row in rows if row[0].endswith(")") and row[0] in {call.name for call in calls}]
    assert sum(int(row[6]) for row in own) == len(calls)
    assert all((row[1], row[2]) == ("0.00%", "0.000us") for row in own)
    counted = {(row[0], int(row[7])): int(row[6]) for row in own}
    assert counted == Counter((call.name, call.caller) for call in calls)
    names = [row[0] for row in rows]
    assert any(name.endswith("(worker0 -> worker1)#remote_op: aten::mul") for name in names)
    assert [int(row[7]) for row in rows] == sorted(int(row[7]) for row in rows)


@pytest.mark.spec("C7")
def test_C7_one_trace_with_a_process_a_worker_and_arrows(skewed, tmp_path):
    assert rpc_report([str(skewed), "-o", str(tmp_path / "t.json"), "--check"]) == 0
    trace = load(tmp_path / "t.json")
    assert problems(trace) == []
    events = trace["traceEvents"]
    assert any(e["pid"] == 1 and e["name"] == "aten::add" for e in events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] in (0, 1)}
    assert names == {0: "worker0 (node 0)", 1: "worker1 (node 1)"}
    remote = [e for e in events if e["ph"] == "X" and e["name"].endswith("#remote_call")]
    assert len(remote) == trace["rpc"]["calls"] == trace["rpc"]["remote_calls"] == 60
    assert all(e["args"]["node_id"] == e["pid"] == 1 and e["args"]["caller"] == 0 for e in remote)
    assert len({e["args"]["call_id"] for e in remote}) == 60
    arrows = [e for e in events if e.get("cat") == "rpc" and e["ph"] in "sf"]
    assert Counter(e["ph"] for e in arrows) == {"s": 120, "f": 120}
    assert len({e["id"] for e in arrows}) == 120
    assert trace["rpc"]["incomplete"] is False


@pytest.mark.spec("C8", "C16")
def test_C8_C16_remote_slices_lie_inside_their_calls_only_on_one_clock(skewed, tmp_path, capsys):
    assert rpc_report([str(skewed), "-o", str(tmp_path / "a.json"), "--check"]) == 0
    assert load(tmp_path / "a.json")["rpc"]["causality"]["pairs"] == 120
    for align in ("none", "start_profile"):
        assert rpc_report([str(skewed), "-o", str(tmp_path / f"{align}.json"), "--check", "--align", align]) == 3
        assert load(tmp_path / f"{align}.json")["rpc"]["causality"]["violations"] > 0
    assert "does not account for skew" in capsys.readouterr().err


@pytest.mark.spec("C1")
def test_C1_one_command_and_its_manifest(skewed):
    manifest = json.loads((skewed / "run.json").read_text())
    assert manifest["plan"] == {"workers": ["worker0", "worker1"], "driver": "worker0"}
    assert manifest["backend"] == "tensorpipe"


@pytest.mark.spec("C9")
def test_C9_a_worker_that_dies_before_it_saves_leaves_the_rest(tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.rpc_program", str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(
                PYTHONPATH=str(ROOT), RANK=str(r), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            ),
        )
        for r in range(3)
    ]
    said = [worker.communicate(timeout=HANGS_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, -9, 0], "\n".join(said)
    assert "worker worker1 (rank 1) gave no sign of saved/0" in said[0]
    folder = tmp_path / "dies"
    assert rpc_report([str(folder), "-o", str(tmp_path / "t.json")]) == 0
    assert "incomplete: worker worker1 (node 1): 0 of 3 traces" in capsys.readouterr().err
    trace = load(tmp_path / "t.json")
    assert trace["rpc"]["incomplete"] is True
    calls = read_run(folder).calls
    assert Counter(call.window for call in calls if call.caller == 0) == {0: 7, 1: 7, 2: 7}
    assert {call.callee for call in calls if call.window} == {2}
    # The seventh call of the first window was relayed by the worker that died: what it called ran on the other.
    (relay,) = (call for call in calls if call.function == "relay")
    nested = f"{relay.name}#remote_op: rpc_sync#udf_with_torch_ops(worker1 -> worker2)"
    rows = [
        row for trace in read_run(folder).traces if trace.rank == 2 for row in read_rows(trace).operators if row.call_id
    ]
    assert [row.name for row in rows].count(nested) == 1
    assert not (folder / "rpc.json").read_text().count('"incomplete": false')
