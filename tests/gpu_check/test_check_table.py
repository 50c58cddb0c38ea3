"""The table: what is judged, what is not and why, and the exit code. Stand-in data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aorta.gpu_check.check_table import (
    BUSY_SHARE,
    PLACE_NS,
    CheckReport,
    CheckRow,
    CheckVerdict,
    KernelWindow,
    Pair,
    busy_row,
    busy_share,
    collective_rows,
    matched,
    pooled_ratio,
    ratio_between,
    ratio_row,
    render,
    report_of,
    windows,
)

FACTS = {"world_size": 2, "device": "Stand-in", "torch": "2.13.0", "nccl": "2.27.3"}
GOOD = CheckRow("ddp", "coverage", "6 of 6 steps", "all", CheckVerdict.OK)
BAD = CheckRow("fsdp", "synchronisations", "2 waits", "none", CheckVerdict.FAILED)
INFO = CheckRow("ddp", "host waits", "3", "for information", CheckVerdict.INFORMATION)
TIME = CheckRow("ddp", "overlap ratio", "0.5 / 0.5", "within 0.02", CheckVerdict.OK, is_time=True)
UNJUDGED = CheckRow(
    "ddp", "overlap ratio", "0.5 / 0.7", "within 0.02", CheckVerdict.NOT_JUDGED, "device only 41 % busy", True
)


@pytest.mark.parametrize(
    ("own", "kernels", "share", "verdict"),
    [
        (0.5, 0.515, 0.95, CheckVerdict.OK),
        (0.5, 0.53, BUSY_SHARE, CheckVerdict.FAILED),
        (0.5, 0.53, 0.89, CheckVerdict.NOT_JUDGED),
        (0.5, 0.53, None, CheckVerdict.NOT_JUDGED),
        (None, 0.5, 0.95, CheckVerdict.NOT_JUDGED),
        (0.5, None, 0.95, CheckVerdict.NOT_JUDGED),
    ],
)
def test_ratios_agree_within_two_hundredths_where_the_device_is_busy(own, kernels, share, verdict):
    assert ratio_row("ddp", own and (own, own), kernels, share).verdict is verdict


@pytest.mark.parametrize(
    ("kernels", "verdict"),
    [(0.38, CheckVerdict.NOT_JUDGED), (0.769, CheckVerdict.NOT_JUDGED), (0.78, CheckVerdict.FAILED)],
)
def test_bounds_of_a_host_bound_card_are_not_judged_and_have_to_hold(kernels, verdict):
    between = ratio_between((2.0, 6.0), (2.0, 6.0))
    assert between == (0.25, 0.75)
    row = ratio_row("ddp", between, kernels, 0.41, 0.01)
    assert (row.verdict, row.value) == (verdict, f"0.250 to 0.750 / {kernels:.3f}")
    if verdict is CheckVerdict.NOT_JUDGED:
        assert row.why == "host-bound: the host sets the pace, 0.010 ms ahead; the bounds hold"
        assert report_of(FACTS, [[row]]).exit_code == 4
    assert ratio_between((0.0, 0.0), (0.0, 0.0)) is ratio_between(None, (1.0, 1.0)) is None


def test_a_device_that_waits_for_the_host_is_said_in_per_cent():
    assert busy_row("ddp", 0.412, 0.01).why == "device only 41% busy, the host 0.010 ms ahead of it"
    assert busy_row("ddp", 0.931).verdict is CheckVerdict.OK
    assert (busy_row("ddp", 0.412).verdict, busy_row("ddp", 0.412).why) == (
        CheckVerdict.NOT_JUDGED,
        "device only 41% busy",
    )
    assert ratio_row("ddp", (0.5, 0.5), 0.7, 0.412).why == "device only 41% busy"
    assert busy_row("ddp", None).why == "the profiler saw no kernel"


def collective(kernel_ns: int, *, start: int = 0, end: int = 0, at: int = 10**9) -> Pair:
    """A kernel of that length, and a record whose start and end lie so much behind its."""
    return (at + start, at + kernel_ns + end), (at, at + kernel_ns)


def verdicts(pairs: list[Pair]) -> dict[str, CheckVerdict]:
    return {row.what.partition(",")[0]: row.verdict for row in collective_rows("ddp", pairs, 0.95)}


@pytest.mark.parametrize(
    ("pair", "failed"),
    [
        (collective(1_000_000, end=15_000), set()),
        (collective(1_000_000, start=-99_000), set()),  # it waited for room: longer, and not wrong to begin
        (collective(1_000_000, start=-150_000), {"communication"}),
        (collective(1_000_000, start=25_000), {"start"}),
        (collective(10_000, end=9_000, start=9_000), set()),
        (collective(10_000, end=-11_000), {"end"}),  # an end taken before the wait (W1)
    ],
)
def test_durations_ends_and_starts_are_held_to_the_kernels(pair, failed):
    exact = [collective(1_000_000)] * 4  # they say what the clocks are apart: nothing
    found = verdicts([*exact, pair])
    assert {name for name, verdict in found.items() if verdict is CheckVerdict.FAILED} == failed
    assert CheckVerdict.NOT_JUDGED not in found.values()


def test_one_end_in_twenty_may_be_off():
    pairs = [collective(1_000_000)] * 38
    assert set(verdicts([*pairs, *[collective(1_000_000, end=25_000)] * 2]).values()) == {CheckVerdict.OK}
    assert verdicts([*pairs, *[collective(1_000_000, end=25_000)] * 3])["end"] is CheckVerdict.FAILED


def test_lengths_are_not_judged_where_copies_belong_to_the_collective():
    rows = collective_rows("ddp", [collective(1_000_000, start=-500_000)] * 4, 0.95, emulated=True)
    assert [row.verdict for row in rows] == [CheckVerdict.OK, CheckVerdict.NOT_JUDGED, CheckVerdict.OK, CheckVerdict.OK]


def test_what_the_clocks_are_apart_is_taken_off_and_has_a_bound_of_its_own():
    shifted = [collective(1_000_000, start=PLACE_NS, end=PLACE_NS)] * 3
    assert set(verdicts(shifted).values()) == {CheckVerdict.OK}
    shifted = [collective(1_000_000, start=-PLACE_NS - 1, end=-PLACE_NS - 1)] * 3
    assert [name for name, verdict in verdicts(shifted).items() if verdict is CheckVerdict.FAILED] == ["clocks"]


@pytest.mark.parametrize(("pairs", "why"), [(None, "differ in number"), ([], "no collective ran a kernel")])
def test_without_pairs_nothing_is_judged(pairs, why):
    rows = collective_rows("ddp", pairs, 0.95)
    assert [row.verdict for row in rows] == [CheckVerdict.NOT_JUDGED] * 4
    assert all(why in (row.why or "") for row in rows)
    own = "max(2 % of the kernel, 10 us), of 95 %"
    assert [row.bound for row in rows] == ["within 200 us", "max(2 %, 20 us each)", own, own]


@pytest.mark.parametrize(
    ("rows", "code", "begins"),
    [
        ([GOOD, TIME, INFO], 0, "passed: 2 of 2 checks passed, 0 not judged, 1 for information"),
        ([GOOD, TIME, UNJUDGED], 0, "passed: 2 of 2 checks passed, 1 not judged"),
        ([GOOD, BAD, TIME], 1, "FAILED: 2 of 3 checks passed"),
        ([BAD, UNJUDGED], 1, "FAILED: 0 of 1"),
        ([GOOD, UNJUDGED], 4, "inconclusive: 1 of 1 checks passed, 1 not judged"),
        ([], 4, "inconclusive: 0 of 0"),
    ],
)
def test_the_exit_code_says_what_was_found(rows, code, begins):
    report = report_of(FACTS, [[], rows])  # it may be any rank's
    assert report.exit_code == code
    assert report.verdict.startswith(begins)


def test_every_row_of_every_rank_is_shown_with_its_bound():
    text = render(report_of(FACTS, [[GOOD, UNJUDGED], [BAD, INFO]])).splitlines()
    assert text[0] == "2 x Stand-in, torch 2.13.0, NCCL 2.27.3"
    assert text[1].split() == ["rank", "case", "what", "value", "bound"]
    assert [line.split()[0] for line in text[2:6]] == ["0", "0", "1", "1"]
    assert text[3].endswith("within 0.02      not judged: device only 41 % busy")
    assert text[4].endswith("FAILED")
    assert len({line.index(cell) for line, cell in zip(text[2:5], ("all", "within", "none"), strict=True)}) == 1
    assert text[-1].endswith("(exit code 1)")


def test_the_report_is_read_back_as_it_was_written():
    report = report_of(FACTS, [[GOOD, UNJUDGED, TIME]])
    assert msgspec.json.decode(msgspec.json.encode(report), type=CheckReport) == report


BASE = 1_800_000_000_000_000_000


def kernel(name: str, ts_us: float, dur_us: float, *, cat: str = "kernel", device: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts_us, "dur": dur_us, "args": {"device": device}}


TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        kernel("void ncclDevKernel_AllReduce_Sum_f32(...)", 10, 20),
        kernel("ampere_sgemm", 0, 20),
        kernel("ampere_sgemm", 12, 4),  # inside the one before: counted once
        kernel("ampere_sgemm", 5, 50, device=1),
        kernel("ncclDevKernel_Generic", 5, 50, cat="gpu_user_annotation"),  # carries a stream, and is no kernel
        kernel("rcclGenericKernel", 110, 10),
        kernel("cudaStreamSynchronize", 120, 1, cat="cuda_runtime"),
        kernel("cudaLaunchKernel", 121, 1, cat="cuda_runtime"),
        {"ph": "i", "name": "marker", "ts": 1},
    ],
}
STEPS = [(BASE, BASE + 100_000), (BASE + 100_000, BASE + 200_000)]


def test_kernels_are_told_apart_by_category_name_and_device():
    (first, second), _ = windows(TRACE, STEPS, device=0)
    assert first.comm == [(BASE + 10_000, BASE + 30_000)]
    assert len(first.compute) == 2
    assert (first.lengths_ns([STEPS[0]]), second.lengths_ns([STEPS[1]])) == ((20_000, 10_000), (10_000, 0))
    assert pooled_ratio([first, second], [[step] for step in STEPS]) == pytest.approx(1 / 3)
    assert pooled_ratio([first, second], [[], []]) == 0  # what runs outside of blocks is no computation
    assert (first.host_waits, second.host_waits) == (0, 1)


def test_no_communication_is_no_ratio():
    assert pooled_ratio([KernelWindow([], [(0, 1)], 0)], [[(0, 1)]]) is None


def test_the_busy_share_is_of_all_steps_and_counts_every_moment_once():
    seen, _ = windows(TRACE, STEPS, device=0)
    assert busy_share(seen, STEPS) == pytest.approx(40 / 200)
    assert busy_share([KernelWindow([(0, 60)], [(40, 150)], 0)], [(0, 100)]) == 1.0  # the tail belongs to the next step
    assert busy_share([KernelWindow([], [], 0)], [(0, 100)]) is None


def test_collectives_are_matched_in_order_or_not_at_all():
    seen, _ = windows(TRACE, STEPS, device=0)
    own = [[(BASE + 9_000, BASE + 30_500)], [(BASE + 110_000, BASE + 119_000)]]
    assert matched(own, seen) == [(own[0][0], seen[0].comm[0]), (own[1][0], seen[1].comm[0])]
    assert matched([own[0], []], seen) is None


def test_kernels_are_moved_to_the_records_clock_before_they_are_given_to_steps():
    """The record's second step would begin behind the kernel that belongs to it."""
    trace = {
        "baseTimeNanoseconds": BASE,
        "traceEvents": [kernel("ncclDevKernel", 10, 20), kernel("ncclDevKernel", 102, 4)],
    }
    record = [(start + 8_000, end + 8_000) for start, end in STEPS]
    own = [(BASE + 18_000, BASE + 38_000), (BASE + 110_000, BASE + 114_000)]
    (first, second), ahead_ns = windows(trace, record, device=0, collectives=own)
    assert ahead_ns == -8_000
    assert (first.comm, second.comm) == ([own[0]], [own[1]])
    rows = collective_rows("fsdp", matched([[own[0]], [own[1]]], [first, second]), share=1.0, ahead_ns=ahead_ns)
    assert [row.value for row in rows[:2]] == ["+8.0 us", "1.000, single ones +0.0 to +0.0 us"]
