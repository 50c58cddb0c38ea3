"""Where a record differs from the simulated device's own timeline, in words.

Enters: the lines of a loop whose launches are known. Leaves: disagreements, to the nanosecond. Must not: use
anything of `aorta` that measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aorta.instrument.copies import FROM_PYTHON
from aorta.records.schema import Step
from tests.device_path.witness import Truth, truth_of
from tests.simulated import device as simulated

Expected = tuple[str, str, tuple[str, ...]]
"""A kernel's name, its group's, and the kinds of its rows in a record."""
_NAMES = {"h2d": "memcpy_h2d", "d2h": "memcpy_d2h", "d2d": "aten::copy_", "p2p": "aten::copy_"}
RATE = 0.02
ROUNDING_NS = 1
"""Of a length in milliseconds as a float."""


def disagreements(lines: Sequence[Step], device: int, launches: Sequence[Expected]) -> list[str]:
    """What the record says otherwise.

    Args:
        launches: what every step launches, in the order of its calls.
    """
    rows, waits = simulated.timeline(device), simulated.waits()
    compute = torch.cuda.current_stream(device).stream_id
    kernels: dict[tuple[str, str], list[simulated.Row]] = {}
    for row in rows:
        if row.kind == "collective":
            kernels.setdefault((row.name, row.group), []).append(row)
    wrong = []
    copies = sorted((row for row in rows if row.kind == "copy"), key=lambda row: row.id)
    for line in lines:
        if not line.coverage.complete:
            wrong.append(f"step {line.step}: {line.coverage.reason}")
        wrong += [f"step {line.step}: {one}" for one in _of_rows(line, launches, kernels)]
        wrong += [f"step {line.step}: {one}" for one in _of_copies(line, copies)]
        truth = truth_of((line.start_mono_ns, line.end_mono_ns), rows, waits, compute, device)
        wrong += [f"step {line.step}: {one}" for one in _of_lengths(line, truth)]
    left = {name: len(some) for name, some in kernels.items() if some}
    if missed := [
        row for row in copies if lines and not _from_python(lines[-1]) and row.start_ns < lines[-1].end_mono_ns
    ]:  # values are read later
        wrong.append(f"the device made copies that no record has: {missed}")
    return [*wrong, *([f"the device ran what no record has: {left}"] if left else [])]


def _of_rows(line: Step, launches: Sequence[Expected], kernels: dict[tuple[str, str], list[Any]]) -> list[str]:
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


def _from_python(line: Step) -> bool:
    """The tap in Python does not look at copies, and says so."""
    return line.reasons.get("copy_ms") == FROM_PYTHON


def _of_copies(line: Step, copies: list[Any]) -> list[str]:
    """Takes the device's own copies in the order of their issue, which is that of the record."""
    if _from_python(line):
        return []
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


def _of_lengths(line: Step, truth: Truth) -> list[str]:
    lengths_ns = {
        "compute_ms": truth.compute_ns,
        "comm_ms": truth.comm_ns,
        "compute_comm_ms": truth.hidden_ns,
        "exposed_comm_ms": truth.comm_ns - truth.hidden_ns,
        "compute_stall_ms": truth.stall_ns,
        "copy_ms": truth.copy_ns,
    }
    wrong = []
    if _from_python(line):
        del lengths_ns["copy_ms"]
    for name, length_ns in lengths_ns.items():
        said = line.overlap[name]
        if said is None or abs(said * 1e6 - length_ns) > ROUNDING_NS:
            wrong.append(f"{name} is {said}, the device's is {length_ns / 1e6}")
    return wrong
