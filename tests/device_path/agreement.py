"""What the simulated device's own timeline says of a step, and where a record differs from it, in words.

Enters: the rows of one device and a step's window, in nanoseconds; or the lines of a loop whose launches and waits are
known. Leaves: lengths, and disagreements, to the nanosecond. Must not: use anything of `aorta` that measures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aorta.records.schema import Collective, Step
from tests.device_path.collective_patterns import Part
from tests.device_path.rig import Groups
from tests.simulated import device as simulated

Interval = tuple[int, int]
_NAMES = {"h2d": "memcpy_h2d", "d2h": "memcpy_d2h", "d2d": "aten::copy_", "p2p": "aten::copy_"}
RATE = 0.02


def disagreements(
    lines: Sequence[Step], device: int, computed_on: Sequence[int], parts: Sequence[Part], groups: Groups
) -> list[str]:
    """What the record says otherwise.

    Args:
        computed_on: id of the compute stream, by step. parts: what every step runs, in this order.
    """
    unrecorded = [group.group_name for group in (groups.between, groups.failed)]
    rows = [row for row in simulated.timeline(device) if row.group not in unrecorded]
    waits, names = simulated.waits(), [group.group_name for group in groups[:4]]
    kernels: dict[tuple[str, str], list[simulated.Row]] = {}
    for row in rows:
        if row.kind == "collective":
            kernels.setdefault((row.name, row.group), []).append(row)
    wrong = []
    copies = sorted((row for row in rows if row.kind == "copy"), key=lambda row: row.id)
    for line, compute in zip(lines, computed_on, strict=True):
        if not line.coverage.complete:
            wrong.append(f"step {line.step}: {line.coverage.reason}")
        wrong += [f"step {line.step}: {one}" for one in _of_rows(line, parts, names, kernels)]
        wrong += [f"step {line.step}: {one}" for one in _of_copies(line, copies)]
        truth = truth_of((line.start_mono_ns, line.end_mono_ns), rows, waits, compute, device)
        wrong += [f"step {line.step}: {one}" for one in truth.differences(line.overlap)]
    if not wrong:
        wrong = _of_waits(lines, parts)
    left = {name: len(some) for name, some in kernels.items() if some}
    if missed := [row for row in copies if lines and row.start_ns < lines[-1].end_mono_ns]:  # values are read later
        wrong.append(f"the device made copies that no record has: {missed}")
    return [*wrong, *([f"the device ran what no record has: {left}"] if left else [])]


def _of_rows(
    line: Step, parts: Sequence[Part], names: Sequence[str], kernels: dict[tuple[str, str], list[Any]]
) -> list[str]:
    launches = [(one.name, names[one.group], one.rows) for part in parts for one in part.launches]
    expected = [(kind, group) for _, group, kinds in launches for kind in kinds]
    if [(row.kind, row.group) for row in line.collectives] != expected:
        return [f"{[row.kind for row in line.collectives]} in place of {expected}"]
    wrong, rows = [], iter(line.collectives)
    for number, (name, group, kinds) in enumerate(launches):
        kernel = kernels[name, group].pop(0)
        for kind in kinds:
            row = next(rows)
            if row.start_ns is None or row.end_ns is None:
                wrong.append(f"{number}, {kind}: no start or no end")
                continue
            early = row.start_ns + line.start_mono_ns - kernel.start_ns
            late = row.end_ns + line.start_mono_ns - kernel.end_ns
            if (early, late) != (0, 0):
                wrong.append(f"{number}, {kind}: starts by {early} ns and ends by {late} ns later than its kernel")
    return wrong


def _of_waits(lines: Sequence[Step], parts: Sequence[Part]) -> list[str]:
    """Collectives are numbered by group; each wait of the compute stream names one, and lasts until that has ended."""
    expected: list[list[Any]] = [[] for _ in lines]
    ends_ns, counts = {}, dict[tuple[str, str | None], list[int]]()
    for number, line in enumerate(lines):
        rows = iter(line.collectives)
        for part in parts:
            own = [_name_of(next(rows)) for launch in part.launches for _ in launch.rows]
            if number + part.steps_later < len(lines):
                expected[number + part.steps_later] += [own[row] for row in part.awaited]
        for row in line.collectives:
            own_numbers = counts.setdefault((row.group, _name_of(row)[2]), [])
            own_numbers.append(row.seq)
        ends_ns |= {_name_of(row): (row.end_ns or 0) + line.start_mono_ns for row in line.collectives}
    wrong = [
        f"{name}: numbered {numbers}"
        for name, numbers in counts.items()
        if numbers != list(range(numbers[0], numbers[0] + len(numbers)))
    ]
    for line, names in zip(lines, expected, strict=True):
        if not isinstance(line.waits, list):
            return ["waits were not looked at"]
        spans: dict[tuple[int, int], list[Any]] = {}  # who waits for an event waits for all that is behind it
        for wait in line.waits:
            spans.setdefault((wait.enter_ns, wait.leave_ns), []).append((wait.group, wait.seq, wait.kind))
        said, meant = Counter(name for own in spans.values() for name in own), Counter(names)
        if said != meant:
            wrong.append(f"step {line.step}: does not wait for {meant - said}, but for {said - meant}")
            continue
        for (enter_ns, leave_ns), own in spans.items():
            end_ns = max(ends_ns[name] for name in own) - line.start_mono_ns
            if leave_ns != max(enter_ns, end_ns):
                wrong.append(f"step {line.step}: the wait for {own} ends {leave_ns - end_ns} ns after them")
    return wrong


def _name_of(row: Collective) -> tuple[str, int, str | None]:
    return row.group, row.seq, row.kind if row.kind in ("send", "recv") else None


def _of_copies(line: Step, copies: list[Any]) -> list[str]:
    """Takes the device's own copies in the order of their issue, which is that of the record."""
    if not isinstance(line.copies, list):
        return ["copies were not looked at"]
    wrong: list[str] = []
    moved: dict[str, list[Any]] = {}
    for number, row in enumerate(line.copies):
        if not copies:
            return [*wrong, f"copy {number} is none of the device's"]
        own, origin_ns = copies.pop(0), line.start_mono_ns
        said = (_NAMES[row.direction], row.bytes, row.start_ns, row.end_ns)
        if said != (own.name, own.bytes, own.start_ns - origin_ns, own.end_ns - origin_ns):
            wrong.append(f"copy {number}: {said} in place of {own}, from {origin_ns}")
        moved.setdefault(row.direction, []).append(own)
    for direction, rows in moved.items():  # none of a direction at the same time as another
        rate = sum(own.bytes for own in rows) / sum(own.end_ns - own.start_ns for own in rows)
        if abs((line.overlap[f"{direction}_gb_per_s"] or 0) / rate - 1) > RATE:
            wrong.append(f"{direction}: {line.overlap[f'{direction}_gb_per_s']} GB/s, the device's is {rate}")
    return wrong


@dataclass(frozen=True)
class Truth:
    """Lengths by the metric that a record has for each."""

    lengths_ns: dict[str, int]

    @property
    def ratio(self) -> float | None:
        comm_ns = self.lengths_ns["comm_ms"]
        return self.lengths_ns["compute_comm_ms"] / comm_ns if comm_ns else None

    def differences(
        self, overlap: Mapping[str, float | None], within_ns: int = 1, ratio_within: float = 1e-9
    ) -> list[str]:
        """What a record says otherwise, in words; by default by more than rounding."""
        pairs = [(name, length_ns / 1e6, within_ns / 1e6) for name, length_ns in self.lengths_ns.items()]
        if self.ratio is not None:
            pairs.append(("overlap_ratio", self.ratio, ratio_within))
        return [
            f"{name} is {overlap[name]}, the device's is {own}"
            for name, own, within in pairs
            if not abs((math.nan if overlap[name] is None else overlap[name]) - own) <= within * 1.000001
        ]


def truth_of(window: Interval, rows: Sequence[Any], waits: Sequence[Any], compute_stream: int, device: int) -> Truth:
    """Of one step.

    Args:
        rows, waits: `timeline()` and `waits()` of `tests.simulated.device`.
    """
    here = [row for row in rows if row.device == device]
    comm = clipped(((row.start_ns, row.end_ns) for row in here if row.kind == "collective"), window)
    kernels = [row for row in here if row.stream == compute_stream and row.kind == "op"]
    compute = clipped(((row.start_ns, row.end_ns) for row in kernels), window)
    still = [(one.begin_ns, one.end_ns) for one in waits if (one.device, one.stream) == (device, compute_stream)]
    own = [(row.start_ns, row.end_ns) for row in here if row.kind == "collective" and row.stream == compute_stream]
    hidden_ns = length(common(comm, compute))
    return Truth(
        {
            "compute_ms": length(compute),
            "comm_ms": length(comm),
            "compute_comm_ms": hidden_ns,
            "exposed_comm_ms": length(comm) - hidden_ns,
            # The computing stream stood still, or ran a collective itself.
            "compute_stall_ms": length(common(clipped([*still, *own], window), comm)),
            "copy_ms": length(clipped(((row.start_ns, row.end_ns) for row in here if row.kind == "copy"), window)),
        }
    )


def clipped(spans: Iterable[Interval], window: Interval) -> list[Interval]:
    """The union of `spans` inside `window`, as disjoint intervals in order."""
    merged: list[Interval] = []
    for low, high in sorted((max(low, window[0]), min(high, window[1])) for low, high in spans):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where both are."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return clipped((span for span in pairs if span[0] < span[1]), (-(2**62), 2**62))


def length(spans: Iterable[Interval]) -> int:
    """Of disjoint intervals."""
    return sum(high - low for low, high in spans)
