"""Records beside traces: their tracks, and whether effects follow their causes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aorta.merge.merge_traces import Causality, check_collectives, merge_traces
from aorta.merge.tracks import MergedCollective
from aorta.records.clocks import ClockSync, Injected, OffsetSample, RankClock, WallTime, encode
from aorta.records.schema import (
    ActiveSegment,
    Anchor,
    AuxRange,
    ClockReading,
    ComputeRange,
    Copy,
    DeviceSample,
    Stall,
    UserRange,
    Wait,
)
from tests.analysis.builders import CLOCK, MS, collective, footer, header, metrics, step, write_rank
from tests.merge.traces import load, problems, text, write, x

# Wall clock of monotonic 0 in these records.
ZERO_NS = CLOCK.realtime_ns - CLOCK.monotonic_ns
BASE_NS = ZERO_NS // 10**9 * 10**9
STEP_NS = 2 * 10**9  # start of step 1, monotonic


def us(monotonic_ns: int) -> float:
    """`ts` of an instant in a trace with BASE_NS."""
    return (ZERO_NS + monotonic_ns - BASE_NS) / 1e3


def run_folder(folder, *, fake: Injected | None = None, late_ms: float = 0.0, sync: bool = True):
    """Two ranks, three steps of 100 ms a second apart; the traces cover step 1. Both issue their all-reduces at 10
    and 20 ms and end 8 ms later; rank 1 issues `late_ms` later, which is more than an end only if it is impossible.
    """
    for rank in (0, 1):
        shift = late_ms if rank else 0.0
        rows = [collective(seq=s, start_ms=10.0 + 10 * s + shift, end_ms=18.0 + 10 * s) for s in (0, 1)]
        overlapping = collective(seq=2, start_ms=12.0, end_ms=25.0)
        ends_ms = ((0, 10, 0b1), (10, 20, 0b11), (20, 30, 0b10), (30, 100, 0))
        said = {"active_segments": [ActiveSegment(begin * MS, end * MS, lanes) for begin, end, lanes in ends_ms]}
        said |= {"overlap": metrics(100, 20, 20, 10)}
        of_step = {1: [*rows, overlapping]}
        lines = [step(rank, 2, number, collectives=of_step.get(number, []), **said) for number in range(3)]
        write_rank(folder, header(rank, 2), lines)
        body = text([x("a", us(STEP_NS), 90_000), x("b", us(STEP_NS + 90 * MS), 1)], rank=rank, base=BASE_NS)
        write(folder / f"r{rank}.json", body)
    if sync:
        at = ZERO_NS + STEP_NS
        write_sync(folder, [0, 0] if fake is None else [fake.shown(at + n) - at - n for n in (0, 2 * 10**9)], fake=fake)
    return folder


def write_sync(folder, offsets_ns, *, run_id: str = "run-1", fake: Injected | None = None) -> None:
    """Clocks measured when step 1 began and two seconds later: rank 1 was so far ahead, within 1 us."""
    at = [ZERO_NS + STEP_NS, ZERO_NS + STEP_NS + 2 * 10**9]
    samples = [OffsetSample(ns + offset, offset, 2000, 1000, 32) for ns, offset in zip(at, offsets_ns, strict=True)]
    zero = [OffsetSample(ns, 0, 0, 0, 32) for ns in at]
    clocks = [RankClock(0, "node0", "b", *zero), RankClock(1, "node0", "b", *samples, injected=fake)]
    found = ClockSync(1, run_id, 0, 0, "CLOCK_REALTIME", "s", True, clocks)
    (folder / "clock_sync.json").write_bytes(encode(found))


def merge(folder, *words, code: int = 0):
    target = folder.parent / "merged.json"
    assert merge_traces([str(folder), "-o", str(target), "--overwrite", *words]) == code
    merged = load(target)
    assert problems(merged) == []
    return merged


def test_of_a_record_the_steps_that_the_traces_cover_become_tracks(tmp_path):
    """Collectives that overlap have a track each; complete events stay those of the traces."""
    found = merge(run_folder(tmp_path / "run"))["traceEvents"]
    assert sum(e["ph"] == "X" for e in found) == 4
    (pid,) = {e["pid"] for e in found if e["ph"] == "B" and e["pid"] < 2000}
    own = [e for e in found if e["pid"] == pid]
    assert [e["args"]["name"] for e in own if e["name"] == "process_name"] == ["rank 0 (node0): AORTA record"]
    tracks = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
    ends = {e["name"]: round(e["ts"] - us(STEP_NS)) for e in own if e["ph"] == "E"}
    begun = [(tracks[e["tid"]], e["name"], round(e["ts"] - us(STEP_NS))) for e in own if e["ph"] == "B"]
    assert sorted((*row, ends[row[1]]) for row in begun) == [
        ("collectives world", "allreduce#0", 10_000, 18_000),
        ("collectives world", "allreduce#1", 20_000, 28_000),
        ("collectives world (2)", "allreduce#2", 12_000, 25_000),
        ("lane allreduce", "allreduce", 10_000, 30_000),
        ("lane compute", "compute", 0, 20_000),
        ("steps", "step 1", 0, 100_000),
    ]


@pytest.mark.spec("C16")
def test_C16_an_injected_skew_is_caught_raw_and_gone_when_aligned(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", fake=Injected(123_456_789, 80.0, ZERO_NS))
    found = merge(folder, "--check")["aorta"]["causality"]
    assert (found["pairs"], found["violations"], found["unknown_bounds"], found["not_checked"]) == (3, 0, 0, {})
    assert "no violation" in capsys.readouterr().out
    merged = merge(folder, "--check", "--align", "none", code=1)
    assert merged["aorta"]["causality"]["violations"] == 3
    said = capsys.readouterr()
    # Rank 0 ends at 18 ms; rank 1 seems to issue at 10 ms + 123.457 ms + 80 ppm of 2 s.
    assert "allreduce#0 of group world: rank 0 ends before rank 1 begins: 115617.6 us too early" in said.out
    assert "INJECTED CLOCK SKEW on rank 1: 123456789 ns and 80.0 ppm" in said.err


@pytest.mark.parametrize(("late_ms", "code"), [(8.0005, 0), (8.00105, 0), (8.00115, 1), (8.0020, 1)])
@pytest.mark.spec("C16")
def test_C16_only_what_exceeds_the_bounds_is_a_violation(tmp_path, late_ms, code):
    # The bound is 1 us of the clocks and twice the 50 ns of the anchors: rank 0 ends at 18 ms whatever rank 1 does.
    merged = merge(run_folder(tmp_path / "run", late_ms=late_ms), "--check", code=code)
    assert merged["aorta"]["causality"]["worst_lead_ns"] == round((late_ms - 8) * MS)


@pytest.mark.spec("C16")
def test_C16_what_cannot_be_checked_is_said_and_no_pass(tmp_path, capsys):
    """A bound that nobody measured, a killed rank, whose groups are not guessed, and traces without records."""
    folder = run_folder(tmp_path / "run", sync=False)
    assert merge(folder, "--check")["aorta"]["causality"]["unknown_bounds"] == 3
    assert "the bound of 3 pairs is unknown and was taken as 0" in capsys.readouterr().out
    records = [folder / f"rank_{rank}_metrics.jsonl" for rank in (0, 1)]
    records[1].write_bytes(b"".join(records[1].read_bytes().splitlines(keepends=True)[:-1]))
    found = merge(folder)["aorta"]["causality"]
    assert (found["pairs"], found["not_checked"]) == (
        0,
        {
            "the group's ranks are not in the record (no footer)": 3,
            "not seen on every rank of its group": 3,
        },
    )
    for record in records:
        record.unlink()
    merge(folder, "--check", code=4)
    assert "nothing to check" in capsys.readouterr().err


def test_a_record_alone_has_a_track_of_everything_that_it_holds(tmp_path, capsys):
    """Slices are (begin, end) in ms after the start of the step; the lanes are compute, copy and bubble."""
    folder = tmp_path / "run"
    folder.mkdir()
    said = {
        "compute": [ComputeRange("layer.0", "forward", 0, 4 * MS), ComputeRange("layer.0", "backward", 6 * MS, 9 * MS)],
        "stalls": [Stall(9 * MS, 10 * MS, "wait")],
        "waits": [Wait("world", 0, 9 * MS, 10 * MS)],
        "aux": [AuxRange("optimizer", 12 * MS, 14 * MS)],
        "copies": [Copy("h2d", 4096, 0, MS), Copy("d2h", 4, None, None)],
        "ranges": [UserRange("epoch", 0, 0, -MS, 15 * MS), UserRange("fetch", 0, 1, 0, MS, "OSError")],
        "active_segments": [ActiveSegment(0, 4 * MS, 0b001), ActiveSegment(4 * MS, 5 * MS, 0b100)],
        "collectives": [collective(start_ms=7.0, end_ms=10.0, issue_ns=6 * MS), collective(seq=1, end_ms=None)],
        "device": [DeviceSample(STEP_NS, STEP_NS + 2 * MS, 51.0, None, 1200, None, 80, 2**30, [])],
    }
    made = step(0, 1, 1, overlap=metrics(20, 4, 3, 0), **said)
    write_rank(folder, header(lanes=("compute", "copy", "bubble")), [made, step(0, 1, 2, overlap=metrics(20, 0, 0, 0))])
    merged = merge(folder)
    names = {e["tid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in merged["traceEvents"] if e["name"] == "thread_sort_index"}
    ends = iter([e for e in merged["traceEvents"] if e["ph"] == "E"])
    zero_ns = merged["baseTimeNanoseconds"] - (ZERO_NS + STEP_NS)
    found = [
        (names[e["tid"]], e["name"], *(round(end["ts"] / 1e3 + zero_ns / MS, 3) for end in (e, next(ends))))
        for e in merged["traceEvents"]
        if e["ph"] == "B"
    ]
    assert sorted(found) == [
        ("blocks", "layer.0 backward", 6, 9),
        ("blocks", "layer.0 forward", 0, 4),
        ("collectives world", "allreduce#0", 7, 10),
        ("copies", "h2d", 0, 1),
        ("lane bubble", "bubble", 4, 5),
        ("lane compute", "compute", 0, 4),
        ("other work", "optimizer", 12, 14),
        ("ranges of thread 0", "epoch", -1, 15),
        ("ranges of thread 0, level 2", "fetch", 0, 1),
        ("stalls", "wait", 9, 10),
        ("steps", "step 1", 0, 20),
        ("steps", "step 2", 1000, 1020),
        ("waits", "wait for collective#0 of group world", 9, 10),
    ]
    shown = sorted(names.values(), key=lambda name: order[next(tid for tid in names if names[tid] == name)])
    assert shown[:5] == ["steps", "ranges of thread 0", "ranges of thread 0, level 2", "blocks", "lane compute"]
    counters = {e["name"]: e for e in merged["traceEvents"] if e["ph"] == "C"}
    values = {"temp_c": 51.0, "sclk_mhz": 1200, "util_pct": 80, "mem_used_bytes": 2**30}
    assert {name: event["args"][name] for name, event in counters.items()} == values
    assert [event["ts"] / 1e3 + zero_ns / MS for event in counters.values()] == pytest.approx([1.0] * 4)
    assert "rank 0: 2 steps of its record; clock not measured" in capsys.readouterr().out


@pytest.mark.parametrize("late_ns", [0, 900, -900])
def test_records_alone_stand_on_one_clock_within_the_bound_that_is_said(tmp_path, capsys, late_ns):
    """The clock of rank 1 is 5 ms ahead, which was measured with an error of `late_ns` and a bound of 1 us. Both ranks
    end the collective at the same instant.
    """
    folder, ahead_ns = tmp_path / "run", 5 * MS
    folder.mkdir()
    for rank, shift in ((0, 0), (1, ahead_ns)):
        own = ClockReading(CLOCK.realtime_ns + shift, 0, CLOCK.monotonic_ns, CLOCK.uncertainty_ns)
        rows = {number: [collective(seq=number, start_ms=10.0, end_ms=18.0)] for number in (1, 2)}
        lines = [step(rank, 2, number, overlap=metrics(100, 0, 8, 0), collectives=rows[number]) for number in rows]
        write_rank(folder, header(rank, 2, clock=own), lines, footer(2, 2, clock=own))
    write_sync(folder, [ahead_ns + late_ns] * 2)

    def apart_ns(merged):
        ends = [e["ts"] for e in merged["traceEvents"] if e["ph"] == "E" and e["name"].startswith("allreduce#")]
        return [abs(round((first - second) * 1e3)) for first, second in zip(ends[:2], ends[2:], strict=True)]

    merged = merge(folder, "--check")
    # The record's own clocks were read together within 50 ns.
    assert merged["aorta"]["record_bounds_ns"] == {"0": 50, "1": 1050}
    assert apart_ns(merged) == [abs(late_ns)] * 2
    assert "times of the records: within 1.1 us of the reference clock" in capsys.readouterr().out
    assert merged["clockSync"]["aligned"] is True
    assert apart_ns(merge(folder, "--align", "none")) == [ahead_ns] * 2
    # A measurement of another run says nothing of these clocks.
    write_sync(folder, [ahead_ns + late_ns] * 2, run_id="run-2")
    merged = merge(folder)
    assert (merged["clockSync"]["source"], merged["aorta"]["record_bounds_ns"]) == (None, {"0": None, "1": None})
    assert "within an unknown bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": -5}, "it says that it is rank -5"),
        ({"world_size": 2**40}, "its world has 1099511627776 ranks"),
        ({"rank": 1}, "rank 1 has 2 records"),
    ],
)
def test_records_that_cannot_be_of_one_run_are_refused(tmp_path, capsys, changes, said):
    for rank, told in enumerate(({"rank": 0, "world_size": 2} | changes, {"rank": 1, "world_size": 2})):
        write_rank(tmp_path, header(**told), [], None, name=f"rank_{rank}_metrics.jsonl")
    for window in ((), ("--window", "all")):
        assert merge_traces([str(tmp_path), "-o", str(tmp_path / "merged.json"), *window]) == 2
        assert said in capsys.readouterr().err


def test_times_of_a_record_follow_the_anchors_between_which_they_lie(tmp_path):
    early = ClockReading(realtime_ns=10**9, boottime_ns=0, monotonic_ns=0, uncertainty_ns=10)
    # Half a second was put in by somebody who set the clock, seen a second later.
    wall = WallTime([ClockReading(25 * 10**8, 0, 10**9, 30), early])
    assert wall.uncertainty_ns == 30
    for monotonic_ns, realtime_ns in (
        (-5, 10**9 - 5),
        (0, 10**9),
        (5 * 10**8, 175 * 10**7),
        (10**9 + 7, 25 * 10**8 + 7),
    ):
        assert wall.realtime_ns(monotonic_ns) == realtime_ns
    # And a record's tracks do: an anchor 100 us later moves half of that at half the way.
    folder = run_folder(tmp_path / "run", sync=False)
    record = folder / "rank_0_metrics.jsonl"
    way_ns = 2 * (STEP_NS - CLOCK.monotonic_ns)
    gained = ClockReading(CLOCK.realtime_ns + way_ns + 100_000, 0, CLOCK.monotonic_ns + way_ns, 50)
    *lines, foot = record.read_bytes().splitlines()
    ends = {**msgspec.json.decode(foot), "clock": msgspec.to_builtins(gained)}
    record.write_bytes(b"\n".join([*lines, *map(msgspec.json.encode, (Anchor(2, gained), ends)), b""]))
    found = merge(folder)["traceEvents"]
    (begin,) = (e["ts"] for e in found if e["ph"] == "B" and e["name"] == "step 1" and e["pid"] < 2000)
    assert begin == pytest.approx(us(STEP_NS) + 50.0, abs=0.001)


def row(kind: str = "allreduce", **changes: Any) -> MergedCollective:
    """Issued at 100 and over at 200 ns, on clocks without error."""
    values: dict[str, Any] = {"group": "w", "seq": 0, "issue_ns": 100, "end_ns": 200} | changes
    return MergedCollective(kind, issue_bound_ns=0, end_bound_ns=0, **values)


def checked(*per_rank: list[MergedCollective]) -> Causality:
    found, members = Causality(), {"w": list(range(len(per_rank)))}
    check_collectives(found, dict(enumerate(per_rank)), dict.fromkeys(range(len(per_rank)), members))
    return found


def test_no_rank_may_end_before_the_last_has_issued() -> None:
    """Rank 2 issues last, at 150: rank 0 ends 30 ns too early, rank 1 in time."""
    found = checked([row(end_ns=120)], [row(end_ns=150)], [row(issue_ns=150)])
    assert (found.pairs, found.worst_lead_ns) == (2, 30)
    assert [violation[:2] for violation in found.violations] == [
        ("allreduce#0 of group w: rank 0 ends before rank 2 begins", 30)
    ]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[row("broadcast")], [row("broadcast", issue_ns=900)]], "broadcast may end early on one rank"),
        ([[row()], []], "not seen on every rank of its group"),
        ([[row(), row()], [row(issue_ns=900)]], "not seen on every rank of its group"),
    ],
)
def test_what_is_no_pair_is_not_checked_and_counted(ranks: list[list[MergedCollective]], said: str) -> None:
    found = checked(*ranks)
    assert (found.pairs, dict(found.skipped)) == (0, {said: 1})
    assert found.lines() == [f"causality: nothing to check: {said}"]
    found.pairs = 1
    assert found.lines()[1:] == [f"causality: 1 collective cannot be checked ({said})"]
