"""The result table of the check: communication and compute of a profiler's kernels, each finding, its bound, whether it
holds. Pure.

A Chrome trace of torch.profiler and windows in wall-clock nanoseconds give intervals and durations, which `case`
compares with the record's; communication is recognised by names of kernels, unanchored (docs/dev/measuring.md, W12),
by category (W13), and by nothing that the telemetry uses. A report of all ranks has an exit code. Must not judge a time
where the device was not busy: there the host's pace is measured, and the comparison says nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

import msgspec

from aorta.errors import Inconclusive
from aorta.terminal_style import table
from aorta.timeline.arrays import Interval, intersect, interval_array, measure, merge, offset
from aorta.timeline.overlap import AGREEMENT

Pair = tuple[Interval, Interval]
"""A collective in the record, and its kernel; both in nanoseconds of the Unix epoch."""
COMMUNICATION = re.compile(r"nccl|rccl|msccl|cross_device_reduce", re.IGNORECASE)
EMULATED = re.compile(r"spin_kernel|sleep", re.IGNORECASE)
"""The kernel of `torch.cuda._sleep` (aten/src/ATen/cuda/Sleep.cu), by which emulated ranks communicate."""
WAITS = {f"{api}{what}Synchronize" for api in ("cuda", "hip") for what in ("Device", "Stream", "Event")}


@dataclass(frozen=True)
class KernelWindow:
    comm: list[Interval]
    compute: list[Interval]
    host_waits: int

    def lengths_ns(self, blocks: Sequence[Interval]) -> tuple[int, int]:
        """Return the communication, and the part of it that lies inside compute in these ranges, in ns."""
        comm, compute, ranges = (merge(interval_array(spans)) for spans in (self.comm, self.compute, blocks))
        return measure(comm), measure(intersect(comm, intersect(compute, ranges)))


def pooled_ratio(steps: Sequence[KernelWindow], blocks: Sequence[Sequence[Interval]]) -> float | None:
    """Return the hidden communication of all steps over all their communication; None without communication.

    Args:
        blocks: of each step, the ranges of its blocks: computation is what runs there, as in the record, and not the
            optimizer or what a strategy copies between blocks.
    """
    lengths = [step.lengths_ns(ranges) for step, ranges in zip(steps, blocks, strict=True)]
    comm, hidden = (sum(column) for column in zip(*lengths, strict=True))
    return hidden / comm if comm else None


def windows(
    trace: dict[str, Any],
    steps: Sequence[Interval],
    device: int,
    *,
    emulated: bool = False,
    collectives: Iterable[Interval] = (),
) -> tuple[list[KernelWindow], int]:
    """Return the kernels of one device that start in each step, and the waits of the host in it, all by the record's
    clock; and how much the profiler's is ahead of it, in ns.

    Args:
        trace: as `json.load` reads it.
        steps: `[start, end)` in nanoseconds of the Unix epoch.
        collectives: of the record, in all steps: they tell how far the clocks are apart.
        device: index of the device whose kernels count.
        emulated: whether the rank stands for several: then the copies that stand in for what NCCL writes, on streams
            of communication, are no computation, which is what runs on the busiest stream.
    """
    communication = EMULATED if emulated else COMMUNICATION
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    rows = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    taken: defaultdict[Any, float] = defaultdict(float)
    for event in rows if emulated else ():
        if _is_kernel(event, device) and not EMULATED.search(event["name"]):
            taken[event["args"].get("stream")] += float(event["dur"])
    computing = max(taken, key=taken.__getitem__, default=None)
    communicating = [e for e in rows if _is_kernel(e, device) and communication.search(e["name"])]
    spans = interval_array(span(event, base_ns) for event in communicating)
    ahead_ns = offset(spans, interval_array(collectives)) or 0
    base_ns -= ahead_ns
    kernel_windows = []
    for low, high in steps:
        inside = [event for event in rows if low <= start_ns(event, base_ns) < high]
        kernels = [event for event in inside if _is_kernel(event, device)]
        comm = [span(event, base_ns) for event in kernels if communication.search(event["name"])]
        compute = [
            span(event, base_ns)
            for event in kernels
            if not communication.search(event["name"]) and computing in (None, event["args"].get("stream"))
        ]
        waits = sum(e.get("cat") in {"cuda_runtime", "hip_runtime"} and e["name"] in WAITS for e in inside)
        kernel_windows.append(KernelWindow(sorted(comm), compute, waits))
    return kernel_windows, ahead_ns


def _is_kernel(event: dict[str, Any], device: int) -> bool:
    return event.get("cat") == "kernel" and int(event["args"].get("device", device)) == device


def busy_share(seen: Sequence[KernelWindow], steps: Sequence[Interval]) -> float | None:
    """Return the share of the time of all steps in which a kernel ran; None where no kernel was seen."""
    lengths = [
        measure(intersect(merge(interval_array([*window.comm, *window.compute])), interval_array([step])))
        for window, step in zip(seen, steps, strict=True)
    ]
    return sum(lengths) / sum(high - low for low, high in steps) if any(lengths) else None


def matched(telemetry: Sequence[Sequence[Interval]], kernels: Sequence[KernelWindow]) -> list[Pair] | None:
    """Match each collective of the record with its kernel, by start; None where the counts of a step differ."""
    pairs: list[Pair] = []
    for own, window in zip(telemetry, kernels, strict=True):
        if len(own) != len(window.comm):
            return None
        pairs += zip(sorted(own), window.comm, strict=True)
    return pairs


def start_ns(event: dict[str, Any], base_ns: int) -> int:
    """Start of a row of a trace, in nanoseconds of the Unix epoch; `base_ns` is the trace's base time."""
    # Microseconds since the base, in a float: small enough that nothing is lost before the base is added (W14).
    return base_ns + round(float(event["ts"]) * 1000)


def span(event: dict[str, Any], base_ns: int) -> Interval:
    start = start_ns(event, base_ns)
    return start, start + round(float(event["dur"]) * 1000)


BUSY_SHARE = 0.9
"""Minimum share of a step in which a kernel runs, for its times to be judged."""
PLACE_NS = 200_000
"""Allowed offset between the record's clock and the profiler's: each maps device time to host time independently."""
EXIT_FAILED = 1
ROOM_NS, END_NS = 20_000, 10_000
"""What a collective may take longer than its kernel, on average, and what its end may be off by, where 2 % is less."""
OUTSIDE = 0.05
"""Share of the ends and starts that may be off by more: a profiler's own times are, where ranks share a device."""
_RATIO_BOUND = "within 0.02"
_COLLECTIVE_BOUNDS = {
    "communication, telemetry / kernels": "max(2 %, 20 us each)",
    "end, telemetry - kernel": "max(2 % of the kernel, 10 us), of 95 %",
    "start, telemetry not behind kernel": "max(2 % of the kernel, 10 us), of 95 %",
}


class CheckVerdict(Enum):
    OK = "ok"
    FAILED = "FAILED"
    NOT_JUDGED = "not judged"
    INFORMATION = "-"


class CheckRow(msgspec.Struct, frozen=True):
    """One finding. `why`: of a row that is not judged; `is_time`: it compares times, which is what the check is for."""

    case: str
    what: str
    value: str
    bound: str
    verdict: CheckVerdict
    why: str | None = None
    is_time: bool = False


class CheckReport(msgspec.Struct):
    facts: dict[str, Any]
    rows: list[list[CheckRow]]
    verdict: str
    exit_code: int


def report_of(facts: dict[str, Any], rows: list[list[CheckRow]]) -> CheckReport:
    """Return the report of all ranks' rows, with its verdict in words and as an exit code."""
    everything = [row for of_rank in rows for row in of_rank]
    passed, failed, unjudged, known = (sum(row.verdict is verdict for row in everything) for verdict in CheckVerdict)
    counted = f"{passed} of {passed + failed} checks passed, {unjudged} not judged, {known} for information"
    if failed:
        return CheckReport(facts, rows, f"FAILED: {counted}", EXIT_FAILED)
    if not any(row.is_time and row.verdict is CheckVerdict.OK for row in everything):
        why = f"inconclusive: {counted}; no comparison of times could be judged"
        return CheckReport(facts, rows, why, Inconclusive.exit_code)
    return CheckReport(facts, rows, f"passed: {counted}", 0)


def render(report: CheckReport) -> str:
    """Return aligned text: every row of every rank, and a last line that counts."""
    facts = report.facts
    lines = [("rank", "case", "what", "value", "bound", "")]
    for rank, rows in enumerate(report.rows):
        for row in rows:
            end = row.verdict.value if row.why is None else f"{row.verdict.value}: {row.why}"
            lines.append((str(rank), row.case, row.what, row.value, row.bound, end))
    sharing = facts.get("ranks_per_device", 1)
    shared = f", {sharing} ranks a device" if sharing > 1 else ""
    head = f"{facts['world_size']} x {facts['device']}{shared}, torch {facts['torch']}, NCCL {facts['nccl']}"
    return "\n".join([head, *table(lines), f"{report.verdict} (exit code {report.exit_code})"]) + "\n"


def busy_row(case: str, share: float | None, lead_ms: float | None = None) -> CheckRow:
    """Return whether the device, not the host, sets the pace."""
    what, bound = "kernels run, share of the step", f">= {BUSY_SHARE:.0%}, to judge times"
    if share is None:
        return CheckRow(case, what, "-", bound, CheckVerdict.NOT_JUDGED, "the profiler saw no kernel")
    if share >= BUSY_SHARE:
        return CheckRow(case, what, f"{share:.1%}", bound, CheckVerdict.OK)
    ahead = "" if lead_ms is None else f", the host {lead_ms:.3f} ms ahead of it"
    return CheckRow(case, what, f"{share:.1%}", bound, CheckVerdict.NOT_JUDGED, f"{_not_busy(share)}{ahead}")


def sharing(row: CheckRow, why: str) -> CheckRow:
    """Return a row that is not judged because ranks share a device: without MPS (`cuda.mps_runs`) they take turns, and
    with it one's kernels slow the other's.
    """
    return msgspec.structs.replace(row, verdict=CheckVerdict.NOT_JUDGED, why=why)


def time_row(
    case: str, what: str, finding: str, bound: str, share: float | None, passed: bool, why: str | None = None
) -> CheckRow:
    """Compare times, judged where the device was busy and there is something to compare (`why` is None)."""
    if share is None or share < BUSY_SHARE:
        why = _not_busy(share)
    verdict = CheckVerdict.NOT_JUDGED if why else CheckVerdict.OK if passed else CheckVerdict.FAILED
    return CheckRow(case, what, finding, bound, verdict, why, is_time=True)


def ratio_between(
    hidden_ms: tuple[float, float] | None, exposed_ms: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the overlap ratio at least and at most, from what is hidden and exposed at least and at most; None where
    they are not known, or nothing was communicated.
    """
    if hidden_ms is None or exposed_ms is None or not hidden_ms[1] + exposed_ms[1]:
        return None
    least, most = hidden_ms[0] + exposed_ms[1], hidden_ms[1] + exposed_ms[0]
    return hidden_ms[0] / least if least else 0.0, hidden_ms[1] / most if most else 1.0


def ratio_row(
    case: str, own: tuple[float, float] | None, kernels: float | None, share: float | None, lead_ms: float | None = None
) -> CheckRow:
    """Judge telemetry's overlap ratio, at least and at most, against the kernels' (docs/dev/measuring.md, K2: within
    0.02). Bounds have to hold at any pace; where they are apart there is no number to judge.
    """
    what = "overlap ratio, telemetry / kernels"
    between = "-" if own is None else " to ".join(f"{value:.3f}" for value in dict.fromkeys(own))
    seen = f"{between} / {'-' if kernels is None else f'{kernels:.3f}'}"
    if own is None or kernels is None:
        why = "no communication kernels to compare with"
        return time_row(case, what, seen, _RATIO_BOUND, share, passed=False, why=why)
    passed = own[0] - AGREEMENT <= kernels <= own[1] + AGREEMENT
    if own[0] == own[1]:
        return time_row(case, what, seen, _RATIO_BOUND, share, passed)
    ahead = "" if lead_ms is None else f", {lead_ms:.3f} ms ahead"
    why = f"host-bound: the host sets the pace{ahead}; the bounds hold" if passed else "bounds do not hold"
    verdict = CheckVerdict.NOT_JUDGED if passed else CheckVerdict.FAILED
    return CheckRow(case, what, seen, _RATIO_BOUND, verdict, why, is_time=True)


def collective_rows(
    case: str, pairs: Sequence[Pair] | None, share: float | None, ahead_ns: int = 0, *, emulated: bool = False
) -> list[CheckRow]:
    """Compare collectives with their kernels: the length of all, and each one's end and start.

    A start mark is written when the stream comes to it; the kernel begins once it is launched behind the mark and finds
    room on the device: 7 to 45 us later on an H200 with NCCL 2.28. So lengths are held together, and a start in the
    record may be before the kernel's, never after it. The offset between the two clocks is the same for every
    collective: it is estimated from the ends, checked against its own bound, and subtracted before ends are compared.

    Args:
        ahead_ns: by how much the kernels have been moved already.
        emulated: copies run before each kernel, which belong to the collective.
    """
    clocks, within = "clocks, telemetry - profiler", f"within {PLACE_NS / 1e3:.0f} us"
    length, bounds = "communication, telemetry / kernels", {clocks: within, **_COLLECTIVE_BOUNDS}
    if not pairs:
        why = "no collective ran a kernel" if pairs is not None else "collectives and kernels differ in number"
        return [time_row(case, name, "-", bound, share, passed=False, why=why) for name, bound in bounds.items()]
    apart = round(median(own[1] - kernel[1] for own, kernel in pairs))
    behind = apart - ahead_ns
    lengths = [kernel[1] - kernel[0] for _, kernel in pairs]
    longer = [(own[1] - own[0]) - length for (own, _), length in zip(pairs, lengths, strict=True)]
    allowed = sum(max(AGREEMENT * length, ROOM_NS) for length in lengths)
    seen = f"{1 + sum(longer) / sum(lengths):.3f}, single ones {min(longer) / 1e3:+.1f} to {max(longer) / 1e3:+.1f} us"
    copies = "copies that stand in for what NCCL writes run before the kernels" if emulated else None
    rows = [
        time_row(case, clocks, f"{behind / 1e3:+.1f} us", within, share, abs(behind) <= PLACE_NS),
        time_row(case, length, seen, bounds[length], share, abs(sum(longer)) <= allowed, copies),
    ]
    limits = [max(AGREEMENT * length_ns, END_NS) for length_ns in lengths]
    ends = [own[1] - kernel[1] - apart for own, kernel in pairs]
    starts = [max(0, own[0] - kernel[0] - apart) for own, kernel in pairs]
    for name, values in zip(list(bounds)[2:], (ends, starts), strict=True):
        worst = max(range(len(values)), key=lambda index: abs(values[index]) - limits[index])
        outside = sum(abs(value) > limit for value, limit in zip(values, limits, strict=True))
        seen = f"worst {values[worst] / 1e3:+.1f} us, {outside} of {len(values)} outside"
        rows.append(time_row(case, name, seen, bounds[name], share, outside <= OUTSIDE * len(values)))
    return rows


def _not_busy(share: float | None) -> str:
    return "the profiler saw no kernel" if share is None else f"device only {share:.0%} busy"
