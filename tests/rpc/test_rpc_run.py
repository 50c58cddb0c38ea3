"""Whole RPC runs: every call of every window, whatever serves it, what is left when a worker dies, and refusals; runs
whose files are odd: errors that name the file, and reasons that are true.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from aorta.distributed.peers import Peers
from aorta.distributed.topology import read_topology
from aorta.documents.formatting import TEXT
from aorta.errors import ConfigError
from aorta.merge.sources import describe
from aorta.records.run_files import CALL_MARK, CALLS_FILE, MEMORY_KEY, RPC_FILE, Call, RpcFacts, Worker
from aorta.rpc.rpc_records import read_operators, read_run
from aorta.rpc.rpc_report import rpc_report
from aorta.rpc.rpc_run import RpcRun, run_rpc
from tests.loop import resolved
from tests.merge.traces import BASE_NS, load, problems, text, write, x
from tests.runs import HANGS_S, command, environment, job, once, succeeded, until

pytestmark = pytest.mark.dist
THREADS = (1, 16)
WINDOWS, CALLS = 6, 3
MADE = WINDOWS * CALLS
"""Of the driver's."""
MEMORY = ["profiling.record_shapes=false", "profiling.profile_memory=true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return once(tmp_path_factory, "rpc", launch)


def launch(folder: Path) -> None:
    """Windows of calls, with 1 and 16 server threads; the first on a skewed clock, the second with memory."""
    both = ["workload=rpc", f"workload.windows={WINDOWS}", f"workload.calls={CALLS}", "profiling.enabled=true"]
    both += [f"training.output_dir={folder}"]
    skew = ["clock.fake_offset_ns=123456789", "clock.fake_drift_ppm=80", "profiling.profile_memory=false"]
    for threads, own in zip(THREADS, ([*skew, "profiling.record_shapes=true"], MEMORY), strict=True):
        succeeded(job(*both, f"workload.num_worker_threads={threads}", f"label=threads{threads}", *own))


def table(said: str) -> list[dict[str, str]]:
    """The rows of the report's table, by the heads of its columns."""
    head, _, *rest = said.splitlines()
    rows = [line for line in rest if re.search(r"  worker\d", line)]
    heads = [cell for cell in re.split(r"\s{2,}", head.strip()) if cell]
    return [dict(zip(heads, re.split(r"\s{2,}", row.strip()), strict=True)) for row in rows]


@pytest.fixture
def skewed(runs) -> Path:
    return runs / "threads1"


@pytest.fixture(scope="module")
def reported(runs, tmp_path_factory) -> tuple[str, str]:
    """What the report of the skewed run says, and its trace."""
    path = tmp_path_factory.mktemp("reported") / "t.json"
    with redirect_stdout(StringIO()) as said:
        assert rpc_report([str(runs / "threads1"), "-o", str(path), "--check"]) == 0
    return said.getvalue(), path.read_text()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.spec("C5", "C6")
def test_C5_C6_every_call_of_every_window_is_seen_on_both_sides_and_workers_profile_as_asked(runs, threads):
    run = read_run(runs / f"threads{threads}")
    assert run.missing == []
    mine = [call for call in run.calls if call.caller == 0]
    assert Counter(call.window for call in mine) == dict.fromkeys(range(WINDOWS), CALLS)
    assert {call.kind for call in mine} == {"rpc_sync", "rpc_async", "rpc_remote"}
    assert {call.function for call in mine} == {"aten::add", "udf_with_torch_ops"}
    found = [(trace.rank, row) for trace in run.traces for row in read_operators(trace) if row.call_id]
    assert Counter(row.call_id for _, row in found) == Counter(call.call_id for call in run.calls)
    by_id = {call.call_id: call for call in run.calls}
    assert all(by_id[row.call_id].callee == node and by_id[row.call_id].name == row.name for node, row in found)
    for trace in (trace.path.read_text() for trace in run.traces if trace.rank):
        assert ("Input Dims" in trace) is (threads == 1 and "aten::" in trace)


@pytest.mark.spec("C6")
def test_C6_memory_of_every_remote_call_is_in_the_table_and_in_the_trace(runs, tmp_path, capsys):
    folder, tensor = runs / "threads16", 64 * 64 * 4  # bytes of what every operator of the workload makes
    assert rpc_report([str(folder), "-o", str(tmp_path / "t.json")]) == 0
    rows = table(capsys.readouterr().out)
    operators = {row["Name"]: row for row in rows if "#remote_op: aten::" in row["Name"]}
    calls = [row for row in rows if row["Name"].endswith("#remote_call")]
    assert operators
    assert calls
    for row in (*operators.values(), *calls):
        times = 3 if re.search(r"#udf_.*#remote_call$", row["Name"]) else 1
        assert row["CPU Mem"] == TEXT.size(int(row["Number of Calls"]) * times * tensor), row
    by_relu = next(row for name, row in operators.items() if name.endswith("aten::relu"))
    assert by_relu["Self CPU Mem"] == "0 B", "aten::clamp_min inside it made the tensor"
    assert {row["CPU Mem"] for row in rows if row["Node ID"] == "0"} == {"-"}, "the driver served no call"
    events = load(tmp_path / "t.json")["traceEvents"]
    served = [e for e in events if e["ph"] == "X" and e["name"].endswith("#remote_call")]
    assert len(served) == MADE
    for event in served:
        # udf_with_torch_ops makes three tensors, holds two at once and gives one back.
        whole, freed, peak = (3, 2, 2) if "#udf" in event["name"] else (1, 0, 1)
        found = [event["args"][key] / tensor for key in ("allocated_bytes", "freed_bytes", "peak_bytes")]
        assert found == [whole, freed, peak], event


@pytest.mark.spec("C4", "C6")
def test_C4_C6_the_wait_for_a_remote_value_is_no_use_of_the_cpu_and_without_memory_no_column_is_there(skewed, reported):
    said, trace = reported
    assert "Mem" not in said
    assert "allocated_bytes" not in trace
    rows = table(said)
    assert all(row["Name"] and "no name" not in row["Name"] for row in rows)
    (wait,) = (row for row in rows if row["Name"] == "RRef.to_here")
    remote = [call for call in read_run(skewed).calls if call.kind == "rpc_remote"]
    assert (int(wait["Number of Calls"]), wait["Node ID"]) == (len(remote), "0")
    assert (wait["Self CPU total"], wait["CPU total %"]) == ("0.000us", "-")
    events = json.loads(trace)["traceEvents"]
    assert sum(e["ph"] == "X" and e["name"] == "RRef.to_here" for e in events) == len(remote)
    assert not [e for e in events if not e["name"]]


@pytest.mark.spec("C1", "C15")
def test_C1_C15_the_windows_carry_the_clock_of_their_worker_and_the_manifest_its_plan(skewed):
    manifest, sync = (json.loads((skewed / name).read_text()) for name in ("run.json", "clock_sync.json"))
    assert manifest["plan"] == {"workers": ["worker0", "worker1"], "driver": "worker0"}
    assert manifest["backend"] == "tensorpipe"
    for trace in read_run(skewed).traces:
        (own,) = json.loads(bytes(trace.head["clock_sync"]))["ranks"]
        assert own["start"] == sync["ranks"][trace.rank]["start"]


@pytest.mark.spec("C4")
def test_C4_the_table_counts_every_call_on_the_node_that_made_it(skewed, reported):
    rows = table(reported[0])
    heads = ["Name", "Self CPU total %", "Self CPU total", "CPU total %", "CPU total", "CPU time avg"]
    assert list(rows[0])[:8] == [*heads, "Number of Calls", "Node ID"]
    calls = read_run(skewed).calls
    own = [row for row in rows if row["Name"].endswith(")") and row["Name"] in {call.name for call in calls}]
    for row in own:  # a call waits for its reply
        assert (row["Self CPU total %"], row["Self CPU total"], row["CPU total %"]) == ("0.00%", "0.000us", "-")
    counted = {(row["Name"], int(row["Node ID"])): int(row["Number of Calls"]) for row in own}
    assert counted == Counter((call.name, call.caller) for call in calls)
    shares = [row[head] for row in rows for head in ("Self CPU total %", "CPU total %") if row[head] != "-"]
    assert all(0 <= float(share.rstrip("%")) <= 100 for share in shares)
    assert len(shares) > len(rows) + 5
    assert any(row["Name"].endswith("(worker0 -> worker1)#remote_op: aten::mul") for row in rows)
    nodes = [int(row["Node ID"]) for row in rows]
    assert nodes == sorted(nodes)


@pytest.mark.spec("C7")
def test_C7_one_trace_with_a_process_a_worker_and_arrows(reported):
    trace = json.loads(reported[1])
    assert problems(trace) == []
    events = trace["traceEvents"]
    assert any(e["pid"] == 1 and e["name"] == "aten::add" for e in events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] in (0, 1)}
    assert names == {0: "worker0 (node 0)", 1: "worker1 (node 1)"}
    remote = [e for e in events if e["ph"] == "X" and e["name"].endswith("#remote_call")]
    assert len(remote) == trace["rpc"]["calls"] == trace["rpc"]["remote_calls"] == MADE
    assert all(e["args"]["node_id"] == e["pid"] == 1 and e["args"]["caller"] == 0 for e in remote)
    assert len({e["args"]["call_id"] for e in remote}) == MADE
    arrows = [e for e in events if e.get("cat") == "rpc" and e["ph"] in "sf"]
    assert Counter(e["ph"] for e in arrows) == {"s": 2 * MADE, "f": 2 * MADE}
    assert len({e["id"] for e in arrows}) == 2 * MADE
    assert trace["rpc"]["incomplete"] is False
    assert trace["rpc"]["causality"]["pairs"] == 2 * MADE


@pytest.mark.spec("C8", "C16")
def test_C8_C16_remote_slices_lie_inside_their_calls_only_on_one_clock(skewed, tmp_path, capsys):
    for align in ("none", "start_profile"):
        assert rpc_report([str(skewed), "-o", str(tmp_path / f"{align}.json"), "--check", "--align", align]) == 1
        assert load(tmp_path / f"{align}.json")["rpc"]["causality"]["violations"] > 0
    assert "does not account for skew" in capsys.readouterr().err


@pytest.mark.spec("C1")
def test_C1_one_process_is_refused_before_anything_is_touched(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = r"workload=rpc: rank 0 calls the .*\(WORLD_SIZE=1.*torchrun --standalone --nproc_per_node 2 train.py"
    with pytest.raises(ConfigError, match=words):
        run_rpc(resolved("workload=rpc", f"training.output_dir={tmp_path / 'none'}"))
    assert not (tmp_path / "none").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.spec("C9")
def test_C9_under_torchrun_a_killed_worker_costs_the_window_it_was_killed_in(tmp_path, capsys, victim):
    folder, windows = tmp_path / "run", 100_000
    words = ("workload=rpc", f"workload.windows={windows}", "workload.calls=5", "profiling.enabled=true")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command(3, *words, f"training.output_dir={folder}"), **pipes, env=environment())
    try:
        calls_of_fifth = folder / "torch_profiler" / f"rank{victim}" / "rpc_calls_0004.jsonl"
        until(lambda: calls_of_fifth.exists() or run.poll() is not None)
        topology = json.loads((folder / "run.json").read_text())["topology"]
        os.kill(topology[victim]["pid"], signal.SIGKILL)
        said = run.communicate(timeout=HANGS_S)[0]
    finally:
        if run.poll() is None:  # the launcher ends its ranks
            run.terminate()
            run.communicate()
    assert run.returncode == 1, said
    assert "Traceback" not in (folder / "logs" / f"rank_{1 - victim}.log").read_text()
    finished = json.loads((folder / "rpc.json").read_text())["finished_windows"]
    assert 4 <= finished < windows
    assert rpc_report([str(folder), "-o", str(tmp_path / "t.json")]) == 0
    notes = capsys.readouterr().err
    if victim:
        assert "incomplete: worker worker1 (node 1): lost: no answer within 3 s of SIGTERM: killed, or hanging" in notes
    else:
        assert "the driver worker0 (node 0) did not report its end: killed, or still running" in notes
    assert "worker worker2 (node 2)" not in notes
    assert re.search(rf"incomplete: {finished} of {windows} windows were finished", notes)
    trace = load(tmp_path / "t.json")
    assert trace["rpc"]["incomplete"] is True
    calls = read_run(folder).calls
    by_driver = Counter(call.window for call in calls if call.caller == 0)
    assert {window: by_driver[window] for window in range(finished)} == dict.fromkeys(range(finished), 5)
    assert all(call.reply_ns for call in calls if (call.window or 0) < finished)


@pytest.mark.spec("D12")
@pytest.mark.parametrize(("force", "profiled"), [("false", False), ("true", True)])
def test_D12_on_rocm_the_windows_of_remote_calls_export_nothing_unless_forced(monkeypatch, force, profiled):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    asked = resolved("workload=rpc", "profiling.enabled=true", f"profiling.chrome_trace_force={force}")
    device, peers = torch.device("cpu"), Peers(dist.HashStore(), 0, 1, timeout_s=1.0)
    assert RpcRun(asked, read_topology({}), device, peers).profiled is profiled


def run(folder: Path, event: dict[str, Any], *, callers: tuple[int, ...] = (0,), **of_trace: Any) -> Path:
    """One trace, of worker 0; each caller made one call of it that was answered."""
    for caller in callers:
        call = Call(f"{caller}-1", "job", "sync", "f", caller, 0, 0, None, BASE_NS, True, BASE_NS + 5000)
        path = folder / "torch_profiler" / f"worker{caller}" / CALLS_FILE.format(window=0)
        path.parent.mkdir(parents=True)
        path.write_bytes(msgspec.json.encode(call) + b"\n")
    path = folder / "torch_profiler" / "worker0" / "rpc_window_0000.json"
    return write(path, text([x("a", 1, 1), event], rank=0, **of_trace))


ODD = {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": 3, "dur": 1}
OF_EVENT, OF_MEMORY = "event 1: not a trace event", f"its {MEMORY_KEY} is not what a worker writes"


@pytest.mark.parametrize(
    ("event", "of_trace", "said"),
    [
        *((ODD | change, {}, OF_EVENT) for change in ({"ts": None}, {"name": 7})),
        *(({key: ODD[key] for key in ODD if key != gone}, {}, OF_EVENT) for gone in ("name", "dur", "ph")),
        *((ODD, {MEMORY_KEY: memory}, OF_MEMORY) for memory in ([], {"0-1": {"allocated_bytes": "many"}})),
    ],
)
def test_what_no_worker_writes_is_an_error_that_names_the_file(tmp_path, capsys, event, of_trace, said):
    path = run(tmp_path / "run", event, **of_trace)
    assert rpc_report([str(tmp_path / "run")]) == 2
    assert f"{path}: {said}" in capsys.readouterr().err


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
