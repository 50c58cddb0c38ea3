"""The result table of the check: each finding, its bound, and whether it holds. Pure.

A report of all ranks has an exit code. Must not judge a time where the device was not busy: there the host's pace is
measured, and the comparison says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from statistics import median
from typing import Any

import msgspec

from aorta.errors import Inconclusive
from aorta.gpu_check.device_kernels import Pair

BUSY_SHARE = 0.9
"""Minimum share of a step in which a kernel runs, for its times to be judged."""
PLACE_NS = 200_000
"""Allowed offset between the record's clock and the profiler's: each maps device time to host time independently."""
EXIT_FAILED = 1
_RATIO_BOUND, _BOUND = "within 0.02", "max(2 % of the kernel, 10 us)"


class CheckVerdict(Enum):
    """What became of a row."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_JUDGED = "not judged"
    INFORMATION = "-"


class CheckRow(msgspec.Struct, frozen=True):
    """One finding. `is_time`: it compares times, which is what the check is for; `why`: of a row that is not judged."""

    case: str
    what: str
    found: str
    bound: str
    verdict: CheckVerdict
    why: str | None = None
    is_time: bool = False


class CheckReport(msgspec.Struct):
    """Everything that was found, by rank."""

    facts: dict[str, Any]
    rows: list[list[CheckRow]]
    verdict: str
    exit_code: int


def report_of(facts: dict[str, Any], rows: list[list[CheckRow]]) -> CheckReport:
    """Rows of all ranks, counted."""
    everything = [row for of_rank in rows for row in of_rank]

    def count(verdict: CheckVerdict) -> int:
        return sum(row.verdict is verdict for row in everything)

    failed, passed, open_ = count(CheckVerdict.FAILED), count(CheckVerdict.OK), count(CheckVerdict.NOT_JUDGED)
    counted = (
        f"{passed} of {passed + failed} checks passed, {open_} not judged, {count(CheckVerdict.INFORMATION)} to know"
    )
    if failed:
        return CheckReport(facts, rows, f"FAILED: {counted}", EXIT_FAILED)
    if not any(row.is_time and row.verdict is CheckVerdict.OK for row in everything):
        why = f"inconclusive: {counted}; no comparison of times could be judged"
        return CheckReport(facts, rows, why, Inconclusive.exit_code)
    return CheckReport(facts, rows, f"passed: {counted}", 0)


def render(report: CheckReport) -> str:
    """Aligned text: every row of every rank, and a last line that counts."""
    facts = report.facts
    lines = [("rank", "case", "what", "found", "bound", "")]
    for rank, rows in enumerate(report.rows):
        for row in rows:
            end = row.verdict.value if row.why is None else f"{row.verdict.value}: {row.why}"
            lines.append((str(rank), row.case, row.what, row.found, row.bound, end))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    head = f"{facts['world_size']} x {facts['device']}, torch {facts['torch']}, NCCL {facts['nccl']}"
    return "\n".join([head, *text, f"{report.verdict} (exit code {report.exit_code})"]) + "\n"


def busy_row(case: str, share: float | None) -> CheckRow:
    """Whether the device, not the host, sets the pace."""
    what, bound = "kernels run, share of the step", f">= {BUSY_SHARE:.0%}, to judge times"
    if share is None:
        return CheckRow(case, what, "-", bound, CheckVerdict.NOT_JUDGED, "the profiler saw no kernel")
    verdict, why = (CheckVerdict.OK, None) if share >= BUSY_SHARE else (CheckVerdict.NOT_JUDGED, _not_busy(share))
    return CheckRow(case, what, f"{share:.1%}", bound, verdict, why)


def time_row(
    case: str, what: str, found: str, bound: str, share: float | None, passed: bool, why: str | None = None
) -> CheckRow:
    """A comparison of times, judged where the device was busy and there is something to compare (`why` is None)."""
    if share is None or share < BUSY_SHARE:
        why = _not_busy(share)
    verdict = CheckVerdict.NOT_JUDGED if why else CheckVerdict.OK if passed else CheckVerdict.FAILED
    return CheckRow(case, what, found, bound, verdict, why, is_time=True)


def ratio_row(case: str, own: float | None, kernels: float | None, share: float | None) -> CheckRow:
    """Telemetry's overlap ratio against the kernels' (docs/measuring.md, K2: within 0.02)."""
    what = "overlap ratio, telemetry / kernels"
    found = f"{_number(own)} / {_number(kernels)}"
    if own is None or kernels is None:
        why = "no communication kernels to compare with"
        return time_row(case, what, found, _RATIO_BOUND, share, passed=False, why=why)
    return time_row(case, what, found, _RATIO_BOUND, share, abs(own - kernels) <= 0.02)


def collective_rows(case: str, pairs: Sequence[Pair] | None, share: float | None) -> list[CheckRow]:
    """Each collective against its kernel: durations (K2: within the larger of 2 % and 10 us), ends, and starts.

    The offset between the two clocks is the same for every collective, so it is estimated from the ends, checked
    against its own bound, and subtracted before ends are compared. A collective may wait in a queue: its start in the
    record may be before the kernel's, never after it.
    """
    clocks, place = "clocks, telemetry - profiler", f"within {PLACE_NS / 1e3:.0f} us"
    names = ("collective, telemetry - kernel", "end, telemetry - kernel", "start, telemetry not behind kernel")
    if not pairs:
        why = "no collective ran a kernel" if pairs is not None else "collectives and kernels differ in number"
        bounds = {clocks: place, **dict.fromkeys(names, _BOUND)}
        return [time_row(case, name, "-", bound, share, passed=False, why=why) for name, bound in bounds.items()]
    apart = round(median(own[1] - kernel[1] for own, kernel in pairs))
    limits = [bound_ns(kernel[1] - kernel[0]) for _, kernel in pairs]
    lengths = [(own[1] - own[0]) - (kernel[1] - kernel[0]) for own, kernel in pairs]
    ends = [own[1] - kernel[1] - apart for own, kernel in pairs]
    starts = [max(0, own[0] - kernel[0] - apart) for own, kernel in pairs]
    rows = [time_row(case, clocks, f"{apart / 1e3:+.1f} us", place, share, abs(apart) <= PLACE_NS)]
    for name, values in zip(names, (lengths, ends, starts), strict=True):
        worst = max(range(len(values)), key=lambda index: abs(values[index]) - limits[index])
        outside = sum(abs(value) > limit for value, limit in zip(values, limits, strict=True))
        found = f"worst {values[worst] / 1e3:+.1f} us, {outside} of {len(values)} outside"
        rows.append(time_row(case, name, found, _BOUND, share, outside == 0))
    return rows


def bound_ns(kernel_ns: int) -> float:
    """Allowed difference between telemetry and a kernel of this length."""
    return max(0.02 * kernel_ns, 10_000)


def _not_busy(share: float | None) -> str:
    return "the profiler saw no kernel" if share is None else f"device only {share:.0%} busy"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
