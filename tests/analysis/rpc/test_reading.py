"""An RPC run whose files are odd: errors that name the file, and reasons that are true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.analysis.rpc.rpc_command import rpc_report
from aorta.records.rpc_files import CALLS_FILE, Call
from tests.analysis.merge.traces import BASE_NS, text, write, x


def run(folder: Path, event: dict[str, Any], *, callers: tuple[int, ...] = (0,)) -> Path:
    """One trace, of worker 0; each caller made one call of it that was answered."""
    for caller in callers:
        call = Call(f"{caller}-1", "job", "sync", "f", caller, 0, 0, None, BASE_NS, True, BASE_NS + 5000)
        path = folder / "torch_profiler" / f"worker{caller}" / CALLS_FILE
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
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 3, "args": [1]},
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
