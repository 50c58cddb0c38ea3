"""Many traces into one: nothing lost, nothing confused, on one clock; odd and broken ones (`corpus/`) kept or named."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aorta.merge.alignment import RankAlignment
from aorta.merge.merge_traces import merge_traces
from aorta.records.clocks import Injected, OffsetSample, RankClock
from tests.merge.traces import BASE_NS, flow, load, problems, text, write, x

T0 = BASE_NS + 4_400_000_000_000_000


def clock(rank: int, offset_ns: int = 0, drift: float = 0.0, bound: int = 0, **more) -> RankClock:
    """Measured at T0 and ten seconds later."""
    gained = round(drift * 10_000)  # ppm of ten seconds, in ns
    return RankClock(
        rank,
        f"node{rank}",
        "boot",
        OffsetSample(T0, offset_ns, 2 * bound, bound, 32),
        OffsetSample(T0 + 10**10, offset_ns + gained, 2 * bound, bound, 32),
        **more,
    )


def merge(folder: Path, *words: str, out: str = "merged.json", code: int = 0) -> dict | None:
    """Run the command on `folder`; gives the merged trace, and checks its format."""
    target = folder.parent / out
    assert merge_traces([str(folder), "-o", str(target), *words]) == code
    if not target.exists():
        return None
    merged = load(target)
    assert problems(merged) == []
    return merged


@pytest.mark.spec("C11")
def test_C11_numbers_that_meet_in_two_traces_are_kept_apart(tmp_path):
    folder = tmp_path / "run"
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python3"}},
        x("a", 1, 5, tid=5),
        x("gpu", 2, 5, pid=0, tid=7),
        x("span", 0, 9, pid="Spans", tid="PyTorch Profiler"),
        flow("s", 1, 1.5, tid=5),
        flow("f", 1, 3.5, tid=5),
        flow("s", "0x7f", 1.5, tid=5),
        flow("f", "0x7f", 3.5, tid=5),
        {"ph": "b", "cat": "async", "name": "n", "id2": {"local": 3}, "pid": 77, "tid": 5, "ts": 1},
        {"ph": "e", "cat": "async", "name": "n", "id2": {"local": 3}, "pid": 77, "tid": 5, "ts": 2},
        {"ph": "C", "name": "memory", "pid": 77, "tid": 5, "ts": 2, "args": {"bytes": 3}},
        {"ph": "i", "s": "g", "name": "mark", "pid": "", "tid": "", "ts": 2},
    ]
    for rank in (0, 1):
        write(folder / f"r{rank}.json", text(events, rank=rank))
    found = merge(folder)["traceEvents"]
    before = Counter(event["ph"] for event in events)
    for rank in (0, 1):
        mine = [e for e in found if e["pid"] // 1000 == rank + 1]
        assert {ph: n for ph, n in Counter(e["ph"] for e in mine).items() if ph != "M"} == {
            ph: n for ph, n in before.items() if ph != "M"
        }
    for key in ("pid", "tid", "id"):
        apart = [{e[key] for e in found if e["pid"] // 1000 == rank and key in e and e["ph"] != "M"} for rank in (1, 2)]
        assert not apart[0] & apart[1], key
    assert len({(e["cat"], e["id"]) for e in found if e["ph"] == "s"}) == 4
    locals_ = {e["id2"]["local"] for e in found if "id2" in e}
    assert len(locals_) == 2
    names = {(e["pid"], e["args"]["name"], e["args"]["original_pid"]) for e in found if e["name"] == "process_name"}
    assert (1000, "rank 0 (node0)", 77) in names
    assert (2000, "rank 1 (node0)", 77) in names
    assert {original for _, _, original in names} == {77, 0, "Spans", ""}
    assert {e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index" and e["pid"] == 1000} == {1000}
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert "PyTorch Profiler" in threads


spans = st.tuples(st.integers(0, 10**9), st.integers(0, 10**6))


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(spans, min_size=1, max_size=30), st.integers(-(10**9), 10**9), st.floats(-500, 500), st.integers(0, 1))
@pytest.mark.spec("C14")
def test_C14_no_order_within_a_thread_changes_and_what_was_nested_stays_nested(events, offset, drift, injected):
    more = {"injected": Injected(10**8, -drift, T0)} if injected else {}
    alignment = RankAlignment(clock(1, offset, drift, **more), "clock")
    moved = [(alignment.to_reference(T0 + a), alignment.to_reference(T0 + a + d)) for a, d in events]
    for (a, d), (begin, end) in zip(events, moved, strict=True):
        assert begin <= end
        for (b, e), (other, until) in zip(events, moved, strict=True):
            if a <= b:
                assert begin <= other
            if a <= b and b + e <= a + d:
                assert until <= end


def test_an_earlier_file_is_kept_unless_told(tmp_path, capsys):
    folder = tmp_path / "run"
    write(folder / "r0.json", text([x("a", 1, 1)], world=1))
    merge(folder)
    before = (tmp_path / "merged.json").read_bytes()
    write(folder / "r0.json", text([x("b", 1, 1)], world=1))
    merge(folder, code=2)
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "merged.json").read_bytes() == before
    merge(folder, "--overwrite")
    assert b'"b"' in (tmp_path / "merged.json").read_bytes()


def test_no_trace_at_all(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other.json").write_text(json.dumps({"a": 1}))
    assert merge(tmp_path / "run", code=2) is None
    assert "neither trace nor record in" in capsys.readouterr().err
    assert merge_traces([str(tmp_path / "none"), "-o", str(tmp_path / "m.json")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "run" / "01").mkdir()
    (tmp_path / "run" / "01" / "rank_0_metrics.jsonl").touch()
    assert merge(tmp_path / "run", code=2) is None
    assert f"there are records in {tmp_path}/run/01: give the folders of one run" in capsys.readouterr().err
    assert merge_traces([str(tmp_path)]) == 2
    assert "no file to write: give -o FILE (.json or .json.gz), as -o merged.json.gz" in capsys.readouterr().err


CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("path", sorted((CORPUS / "refused").iterdir()), ids=lambda path: path.name)
def test_a_broken_trace_is_named_and_nothing_is_written(path, tmp_path, capsys):
    shutil.copy(path, tmp_path)
    assert merge_traces([str(tmp_path / path.name), "-o", str(tmp_path / "out" / "merged.json")]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / path.name}" in said
    assert len(said) < 2000
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("path", sorted((CORPUS / "taken").iterdir()), ids=lambda path: path.name)
def test_what_names_a_process_or_thread_oddly_is_kept(path, tmp_path):
    target = tmp_path / "merged.json"
    assert merge_traces([str(path), "-o", str(target)]) == 0
    merged = load(target)
    assert problems(merged) == []
    (found,) = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert (found["name"], found["pid"], found["tid"]) == ("aten::mm", 1000, 100_000)


def test_a_thread_that_is_no_number_of_64_bits_keeps_its_digits_as_text(tmp_path):
    target = tmp_path / "merged.json"
    assert merge_traces([str(CORPUS / "taken" / "thread-of-40-digits.json"), "-o", str(target)]) == 0
    names = [event["args"] for event in load(target)["traceEvents"] if event["name"] == "thread_name"]
    assert names == [{"name": "1" * 40, "original_tid": "1" * 40}]
