"""The stall cut-off is measured on the host, used by the run, and its record says how much the ratio rests on it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aorta.instrument import backend_calls as measuring
from aorta.instrument.backend_calls import cutoff_from, slowest_of_host, stall_cutoff
from aorta.records import ring_file as rf
from aorta.records.run_files import read_manifest
from aorta.records.schema import STALL_CUTOFF_NS, Stall, StallCutoff
from aorta.report.files import write_report
from tests.instrument.steps import MS
from tests.instrument.taps import CPU, Answer, Tap, answering
from tests.instrument.test_rows import ByHand
from tests.runs import record, train

US = 1_000


def test_it_is_five_times_the_99th_percentile_of_the_calls_within_bounds() -> None:
    calls = [10 * US] * 985 + [60 * US] * 10 + [5_000 * US] * 5
    assert cutoff_from(calls) == StallCutoff(300 * US, "calibrated", 60 * US)
    assert cutoff_from([4 * US] * 1_000) == StallCutoff(100 * US, "calibrated", 4 * US)
    assert cutoff_from([900 * US] * 1_000) == StallCutoff(1_000 * US, "calibrated", 900 * US)


def test_too_few_calls_leave_the_default_with_the_reason() -> None:
    found = cutoff_from([10 * US] * 199)
    assert (found.cutoff_ns, found.source) == (STALL_CUTOFF_NS, "default")
    assert found.problem == "only 199 calls in 200 ms, 200 are needed"


def test_this_host_is_measured_quickly_and_no_group_of_the_run_is_touched() -> None:
    before = time.perf_counter()
    found = stall_cutoff(None, CPU, "dedicated")
    assert time.perf_counter() - before < 5  # the limit is 0.03 s; a busy machine may hold a thread up
    assert found is not None
    assert measuring.LEAST_NS <= found.cutoff_ns <= measuring.MOST_NS
    assert not dist.is_initialized()


def test_without_gloo_the_default_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupGloo")
    found = stall_cutoff(None, CPU, "dedicated")
    assert found is not None
    assert (found.cutoff_ns, found.source) == (STALL_CUTOFF_NS, "default")
    assert found.problem is not None
    assert found.problem.startswith("not measured: ")


def test_what_is_configured_is_taken_and_devices_have_none() -> None:
    assert stall_cutoff(350.0, CPU, "observe") == StallCutoff(350 * US, "configured")
    assert stall_cutoff(None, CPU, "off") is None
    assert stall_cutoff(None, torch.device("meta"), "dedicated") is None


def test_ranks_of_a_host_use_its_largest() -> None:
    mine, slower = StallCutoff(200 * US, "calibrated", 40 * US), StallCutoff(400 * US, "calibrated", 80 * US)
    facts = [
        {"host": "a", "stall_cutoff": {"cutoff_ns": 400 * US, "source": "calibrated", "hand_over_ns": 80 * US}},
        {"host": "a", "stall_cutoff": None},
        {"host": "b", "stall_cutoff": {"cutoff_ns": 900 * US, "source": "calibrated", "hand_over_ns": 180 * US}},
    ]
    assert slowest_of_host(mine, "a", facts) == slower
    assert slowest_of_host(None, "a", facts) is None


def test_calls_beyond_the_cutoff_are_stalls() -> None:
    """A step of 100 ms that computes and communicates throughout, with backend calls in it; the cut-off is 1 ms."""
    hand = ByHand()

    def inside() -> None:
        hand.row(rf.PASS, 0, 100, name=hand.block)
        hand.collective(0, 100)
        for place, length_us in enumerate((500, 1000, 1001, 2000, 2001), 1):
            hand.collective(10 * place, 100, y=place, a2=10 * place * MS + length_us * US)

    hand.step(0, 100, inside, issued=6)
    (line,) = hand.steps.take()
    assert line.stalls == [
        Stall(begin_ms * MS, begin_ms * MS + length_us * US, "hand_over")
        for begin_ms, length_us in ((30, 1001), (40, 2000), (50, 2001))
    ]
    assert line.overlap["overlap_ratio"] == pytest.approx(1 - (1.001 + 2 + 2.001) / 100)


def test_a_wait_and_a_long_call_in_it_are_stalls_once() -> None:
    """Inside the call the thread hands over, whatever is waited for round it."""
    hand = ByHand()

    def inside() -> None:
        hand.row(rf.PASS, 0, 100, name=hand.block)
        hand.collective(0, 100)
        hand.row(rf.WAIT, 20, 90, flags=rf.BLOCKED | rf.OVER, group=hand.group)
        hand.collective(40, 100, y=1, a2=60 * MS)
        hand.row(rf.STALL, 95, 97)

    hand.step(0, 100, inside, issued=2)
    (line,) = hand.steps.take()
    assert line.stalls == [
        Stall(20 * MS, 40 * MS, "wait"),
        Stall(40 * MS, 60 * MS, "hand_over"),
        Stall(60 * MS, 90 * MS, "wait"),
        Stall(95 * MS, 97 * MS, "wait"),
    ]
    assert line.overlap["overlap_ratio"] == pytest.approx(1 - 0.72)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("compiled", [False, True], ids=["python", "native"])
def test_both_interceptors_tell_calls_apart_from_waits(compiled: bool) -> None:
    """A backend whose call takes 2 ms: told as a call, not as a stall."""
    with answering(Answer(), lambda: time.sleep(0.002)):
        tap = Tap(compiled=compiled, shortest_call_ns=1_000 * US)
        dist.all_reduce(torch.ones(2), async_op=True)
        tap.hand_over()
        tap.close()
    assert [end - begin >= 2 * MS for begin, end in tap.calls] == [True]
    assert tap.waits == []


@pytest.mark.dist
def test_a_run_records_its_cutoff_in_header_and_manifest_and_the_report_says_it(tmp_path: Path) -> None:
    train(tmp_path / "measured", "parallel=ddp")
    headers = [record(tmp_path / "measured", rank).header.stall_cutoff for rank in (0, 1)]
    assert headers[0] is not None
    assert headers[0] == headers[1]
    assert headers[0].source in ("calibrated", "default")
    told = [rank["stall_cutoff"] for rank in read_manifest(tmp_path / "measured")["topology"]]
    assert max(each["cutoff_ns"] for each in told) == headers[0].cutoff_ns

    train(tmp_path / "asked", "parallel=ddp", "instrument.stall_cutoff_us=350")
    asked = record(tmp_path / "asked")
    assert asked.header.stall_cutoff == StallCutoff(350 * US, "configured")
    report = write_report({"asked": tmp_path / "asked"}, tmp_path / "out")
    entry = report.summary["datasets"]["asked"]["stall_cutoff"]
    assert (entry["lowest_ns"], entry["highest_ns"], entry["sources"]) == (350 * US, 350 * US, ["configured"])
    assert "stall cut-off 0.35 ms (configured)" in " ".join(report.text.split())
    assert "stall cut-off 0.35 ms" in (tmp_path / "out" / "report.html").read_text()
