"""Many traces into one: nothing lost, nothing confused, on one clock; odd and broken ones (`corpus/`) kept or named."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aorta.merge.merge_traces import merge_traces
from aorta.merge.sources import RankAlignment
from aorta.records.clocks import ClockSync, Injected, OffsetSample, RankClock, encode, trace_metadata
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


def sync_of(*clocks: RankClock, run_id: str = "run-1") -> ClockSync:
    return ClockSync(1, run_id, 0, 0, "CLOCK_REALTIME", "c10d store", True, list(clocks))


def write_sync(folder: Path, *clocks: RankClock, run_id: str = "run-1") -> None:
    (folder / "clock_sync.json").write_bytes(encode(sync_of(*clocks, run_id=run_id)))


def merge(folder: Path, *words: str, out: str = "merged.json", code: int = 0) -> dict | None:
    """Run the command on `folder`; gives the merged trace, and checks its format."""
    target = folder.parent / out
    assert merge_traces([str(folder), "-o", str(target), *words]) == code
    if not target.exists():
        return None
    merged = load(target)
    assert problems(merged) == []
    return merged


def absolute(merged: dict, event: dict) -> int:
    return merged["baseTimeNanoseconds"] + round(Decimal(str(event["ts"])) * 1000)


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".tar.gz"])
@pytest.mark.spec("C10")
def test_C10_every_packing_is_read_and_the_rank_comes_from_inside_or_from_the_name(tmp_path, suffix):
    folder = tmp_path / "run"
    write(folder / f"b{suffix}", text([x("a", 1, 1)], rank=1))
    write(folder / f"rank0_window{suffix}", text([x("a", 1, 1), x("b", 3, 1)], rank=None))
    write(folder / f"c{suffix}", text([x("a", 1, 1)], rank=None, global_rank=2))
    (folder / "run.json").write_text("{}")
    merged = merge(folder, out="merged.json.gz")
    assert len({event["pid"] for event in merged["traceEvents"]}) >= 2
    assert {rank: counts["X"] for rank, counts in merged["aorta"]["events"].items()} == {"0": 2, "1": 1, "2": 1}
    assert merged["displayTimeUnit"] == "ms"


@pytest.mark.spec("C10")
def test_C10_two_traces_of_one_rank_are_refused_or_asked_for(tmp_path, capsys):
    folder = tmp_path / "run"
    write(folder / "late.json", text([x("late", 9000, 1)], trace_id="B"))
    write(folder / "early.json", text([x("early", 10, 1)], trace_id="A"))
    write(folder / "twin.json", text([x("early", 10, 1)], trace_id="A"))
    write(folder / "one.json", text([x("one", 5, 1)], rank=1, trace_id="C"))
    merge(folder, code=2)
    said = capsys.readouterr().err
    assert "rank 0 has 2 traces" in said
    assert "early.json" in said
    assert "late.json" in said
    merge(folder, "--window", "1", code=2)
    assert "rank 1 has 1 trace(s)" in capsys.readouterr().err
    (folder / "one.json").unlink()
    names = [event["name"] for event in merge(folder, "--window", "1")["traceEvents"] if event["ph"] == "X"]
    assert names == ["late"]
    merged = merge(folder, "--window", "all", out="all.json")
    assert Counter(e["name"] for e in merged["traceEvents"] if e["ph"] == "X") == {"late": 1, "early": 1}
    assert "the same capture as" in capsys.readouterr().err


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


@pytest.mark.spec("C11")
def test_C11_a_missing_rank_is_a_warning(tmp_path, capsys):
    folder = tmp_path / "run"
    for rank in (0, 2):
        write(folder / f"r{rank}.json", text([x("a", 1, 1)], rank=rank, world=4))
    assert merge(folder)["aorta"]["ranks_missing"] == [1, 3]
    assert "no trace of rank 1, 3" in capsys.readouterr().err


@pytest.mark.spec("C13")
def test_C13_every_file_has_a_base_of_its_own(tmp_path, capsys):
    folder = tmp_path / "run"
    write(folder / "r0.json", text([x("a", "4400000000000.001", "2.5")], rank=0))
    write(folder / "r1.json", text([x("a", "1000.002", "2.5")], rank=1, base=T0))
    merged = merge(folder)
    at = sorted(absolute(merged, e) for e in merged["traceEvents"] if e["ph"] == "X")
    assert at == [T0 + 1, T0 + 1_000_002]
    # Without a base the times are absolute, and the file says so; no digit is lost.
    write(folder / "r1.json", text([x("a", f"{(T0 + 1_000_002) // 1000}.002", "2.5")], rank=1, base=None))
    merge(folder, "--overwrite")
    assert "taken as absolute microseconds" in capsys.readouterr().err
    assert f'"ts":{T0 // 1000 + 1000}.002'.encode() in (tmp_path / "merged.json").read_bytes()


@pytest.mark.spec("C14")
def test_C14_offset_and_drift_are_taken_off_ends_as_well_as_beginnings(tmp_path):
    folder = tmp_path / "run"
    # Ten seconds long on a clock that gains 80 ppm and is 1 ms ahead at T0.
    for rank in (0, 1):
        write(folder / f"r{rank}.json", text([x("a", 4_400_000_000_000, 10_000_000)], rank=rank))
    write_sync(folder, clock(0), clock(1, 1_000_000, 80.0))
    merged = merge(folder)
    by_rank = {e["pid"]: e for e in merged["traceEvents"] if e["ph"] == "X"}
    assert absolute(merged, by_rank[1000]) == T0
    assert by_rank[1000]["dur"] == 10_000_000
    assert absolute(merged, by_rank[2000]) == T0 - 1_000_000
    assert by_rank[2000]["dur"] == 10_000_000 - 800
    assert merged["clockSync"]["ranks"][1]["drift_ppm"] == 80.0
    raw = merge(folder, "--align", "none", out="raw.json")
    assert {(e["ts"], e["dur"]) for e in raw["traceEvents"] if e["ph"] == "X"} == {(4_400_000_000_000, 10_000_000)}


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


@pytest.mark.spec("C15")
def test_C15_what_is_not_measured_is_said(tmp_path, capsys):
    folder = tmp_path / "run"
    for rank in (0, 1):
        write(folder / f"r{rank}.json", text([x("a", 1, 1)], rank=rank))
    merge(folder)
    assert "no clock_sync.json beside the traces" in capsys.readouterr().err
    gone = RankClock(1, "node1", "boot", OffsetSample(T0, 500, 20, 10, 32), reason="at the end: rank 1 did not answer")
    write_sync(folder, clock(0), gone)
    merged = merge(folder, "--overwrite")
    said = capsys.readouterr()
    assert "offset measured once only, no drift, bound unknown" in said.err
    assert "bound unknown, drift unknown" in said.out
    known = merged["clockSync"]["ranks"][1]
    assert (known["offset_ns"], known["drift_ppm"], known["bound_worst_ns"]) == (500, None, None)
    assert all("clock" not in key for e in merged["traceEvents"] for key in (*e, *e.get("args", {})))


@pytest.mark.spec("C15")
def test_C15_traces_alone_are_merged_by_what_they_say_of_their_clocks(tmp_path, capsys):
    folder = tmp_path / "bare"
    early = RankClock(1, "node1", "boot", OffsetSample(T0, 15_000, 20, 10, 32))
    for rank, known in enumerate((clock(0), early)):
        own = trace_metadata(sync_of(known), rank)
        write(folder / f"r{rank}.json", text([x("a", 190, 1)], rank=rank, **own))
    merged = merge(folder)
    assert {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"} == {1000: 190, 2000: 175}
    said = capsys.readouterr()
    assert "rank 1: offset measured once only" in said.err
    assert "2 ranks, aligned by clock" in said.out
    known = merged["clockSync"]
    assert (known["aligned"], known["source"], known["reference_rank"]) == (True, "the traces", 0)
    assert known["ranks"][1]["start"] == {"at_ns": T0, "offset_ns": 15_000, "rtt_ns": 20, "bound_ns": 10, "samples": 32}
    # The run's file also has the measurement at its end, so it comes first; a file of another run does not count.
    write_sync(folder, clock(0), clock(1, 100_000))
    merged = merge(folder, out="file.json")
    assert {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"} == {1000: 190, 2000: 90}
    assert merged["clockSync"]["source"] == str(folder / "clock_sync.json")
    write_sync(folder, clock(0), clock(1, 100_000), run_id="another")
    assert merge(folder, out="other.json")["clockSync"]["source"] == "the traces"
    write(folder / "r1.json", text([x("a", 1, 1)], rank=1, **trace_metadata(sync_of(early, run_id="another"), 1)))
    merge(folder, out="two.json", code=2)
    assert "traces of 2 runs" in capsys.readouterr().err


@pytest.mark.parametrize(("hosts", "aligned"), [(("node0", "node0"), True), (("localhost", "localhost"), False)])
def test_ranks_of_one_host_share_its_clock(tmp_path, capsys, hosts, aligned):
    for rank, host in enumerate(hosts):
        write(tmp_path / "bare" / f"r{rank}.json", text([x("a", 190, 1)], rank=rank, host_name=host))
    merged = merge(tmp_path / "bare")
    assert merged["clockSync"]["aligned"] is aligned
    assert [event["ts"] for event in merged["traceEvents"] if event["name"] == "a"] == [190, 190]
    said = capsys.readouterr()
    assert ("2 ranks, aligned by clock" in said.out) is aligned
    assert ("all ranks ran on node0 and share its clock" in said.err) is aligned


@pytest.mark.spec("C15")
def test_C15_traces_that_say_nothing_are_not_said_to_be_aligned(tmp_path, capsys):
    folder = tmp_path / "bare"
    for rank in (0, 1, 2):
        own = trace_metadata(sync_of(clock(rank, 500)), rank) if rank < 2 else {}
        write(folder / f"r{rank}.json", text([x("a", 190, 1)], rank=rank, world=3, **own))
    known = merge(folder)["clockSync"]
    assert (known["aligned"], known["not_aligned_ranks"]) == (False, [2])
    assert "aligned by clock, but rank 2 not aligned" in capsys.readouterr().out
    for rank in (0, 1):
        write(folder / f"r{rank}.json", text([x("a", 190, 1)], rank=rank, world=3, host_name=f"node{rank}"))
    known = merge(folder, out="none.json")["clockSync"]
    assert (known["aligned"], known["not_aligned_ranks"], known["source"]) == (False, [0, 1, 2], None)
    said = capsys.readouterr()
    assert "not aligned: every rank on its own clock" in said.out
    assert "aligned by clock" not in said.out
    assert "note: not aligned" in said.err
    write(folder / "r1.json", text([x("a", 1, 1)], rank=1, clock_sync={"run_id": "x"}))
    merge(folder, out="bad.json", code=2)
    assert f"{folder / 'r1.json'}: not the clock_sync of an AORTA run" in capsys.readouterr().err


@pytest.mark.spec("C8")
def test_C8_start_profile_moves_by_the_starts_alone(tmp_path):
    folder = tmp_path / "run"
    mark = {"ph": "i", "s": "g", "name": "Iteration Start: PyTorch Profiler", "pid": "Traces", "tid": "Trace"}
    write(folder / "r0.json", text([x("a", 150, 10), {**mark, "ts": 100}], rank=0))
    write(folder / "r1.json", text([x("a", 190, 10), {**mark, "ts": 120}], rank=1))
    write_sync(folder, clock(0), clock(1, 15_000))
    found = {e["pid"]: e["ts"] for e in merge(folder, "--align", "start_profile")["traceEvents"] if e["ph"] == "X"}
    assert found == {1000: 150, 2000: 170}
    found = {e["pid"]: e["ts"] for e in merge(folder, out="clock.json")["traceEvents"] if e["ph"] == "X"}
    assert found == {1000: 150, 2000: 175}


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


def test_several_folders_make_one_file_and_runs_are_not_mixed(tmp_path, capsys):
    for rank in (0, 1):
        write(tmp_path / f"node{rank}" / "t.json", text([x("a", 1, 1)], rank=rank))
    write_sync(tmp_path / "node0", clock(0), clock(1, 1000))
    both = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    assert merge_traces([*both, "-o", str(tmp_path / "m.json")]) == 0
    assert len(load(tmp_path / "m.json")["aorta"]["merged_from"]) == 2
    write_sync(tmp_path / "node1", clock(0), run_id="run-2")
    assert merge_traces([*both, "-o", str(tmp_path / "n.json")]) == 2
    assert "traces of 2 runs" in capsys.readouterr().err


def test_what_the_report_of_remote_calls_wrote_is_no_further_trace(tmp_path, capsys):
    folder = tmp_path / "run"
    write(folder / "torch_profiler" / "rank0" / "t.json", text([x("a", 1, 1)], world=1))
    write(folder / "rpc_trace.json.gz", text([x("a", 1, 1)], rank=None))
    (folder / "rpc.json").write_text("{}")
    assert len(merge(folder)["aorta"]["merged_from"]) == 1
    assert "left out" not in capsys.readouterr().err


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


def test_a_name_with_two_ranks_is_not_guessed_from(tmp_path, capsys):
    bad = write(tmp_path / "run" / "rank1_of_rank0.json", text([x("a", 1, 1)], rank=None))
    assert merge(tmp_path / "run", code=2) is None
    assert f"{bad}: which rank is this?" in capsys.readouterr().err


@pytest.mark.parametrize("align", ["clock", "start_profile"])
def test_a_time_in_quotes_is_a_time(tmp_path, align):
    body = text([x("a", "@", 1)], world=1).replace(b'"ts": @', b'"ts": "150.5"')
    write(tmp_path / "run" / "t.json", body)
    (found,) = [e for e in merge(tmp_path / "run", "--align", align)["traceEvents"] if e["ph"] == "X"]
    assert found["ts"] == 150.5


def test_only_the_nearest_clock_measurement_of_a_trace_is_that_of_its_run(tmp_path):
    other = ClockSync(1, "run-2", 0, 0, "CLOCK_REALTIME", "c10d store", True, [clock(0), clock(1, 9_000_000)])
    (tmp_path / "clock_sync.json").write_bytes(encode(other))
    folder = tmp_path / "run"
    for rank in (0, 1):
        write(folder / f"rank{rank}" / "t.json", text([x("a", 150, 1)], rank=rank))
    write_sync(folder, clock(0), clock(1, 10_000))
    found = {e["pid"]: e["ts"] for e in merge(folder)["traceEvents"] if e["ph"] == "X"}
    assert found == {1000: 150, 2000: 140}


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


def test_many_missing_ranks_are_counted_and_not_all_named(tmp_path, capsys):
    bad = write(tmp_path / "t.json", text([x("a", 1, 1)], world=5000))
    assert merge_traces([str(bad), "-o", str(tmp_path / "merged.json")]) == 0
    assert "1022, 1023, 1024 and 3975 more" in capsys.readouterr().err
    assert len(load(tmp_path / "merged.json")["aorta"]["ranks_missing"]) == 4999
