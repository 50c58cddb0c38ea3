"""Events of traces as rows of any format: which of them are meant (`Test`), and what becomes of a row (`Change`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

KERNEL, COPY, CALL, OPERATOR, MARK, OTHER = "kernel", "copy", "call", "operator", "mark", "other"
Json = dict[str, Any]


@dataclass
class Row:
    """An event: what it is, and what all formats say of it. Times are in ns of the trace."""

    what: str
    name: str
    start_ns: int
    end_ns: int
    device: Any = None
    stream: Any = None
    link: Any = None
    category: str | None = None
    args: Json = field(default_factory=dict)
    raw: Any = None

    @property
    def communicates(self) -> bool:
        return self.what in (KERNEL, OPERATOR) and COMMUNICATES.match(self.name) is not None


COMMUNICATES: Final = re.compile(
    r".*(nccl(Symk)?(Dev)?Kernel|rcclGenericKernel|msccl|cross_device_reduce|multimem_all|nvshmem)|gloo:", re.IGNORECASE
)
"""What a device, or gloo, ran of a collective."""


ISSUES: Final = re.compile(r"c10d::|_c10d_functional::|record_param_comms|nccl:|nccl[A-Z]")


@dataclass
class File:
    """A trace. `facts`: what it says of its process (`rank`, `world_size`, `host`, `clock`); None is left out. `rest`:
    Kineto's members beside the events; of other formats the number of the process.
    """

    path: Path
    format: str
    rows: list[Row]
    facts: Json
    rest: Any = None

    def changed(self, rows: Iterable[Row] | None = None, **facts: Any) -> File:
        return replace(self, rows=[*self.rows] if rows is None else [*rows], facts={**self.facts, **facts})


Test: TypeAlias = Callable[[Row], bool]
Change: TypeAlias = Callable[[Row], Row]


# Which rows.


def of(*kinds: str) -> Test:
    return lambda row: row.what in kinds


is_kernel, is_copy, is_call, is_mark = of(KERNEL), of(COPY), of(CALL), of(MARK)
on_device, is_timed = of(KERNEL, COPY), of(KERNEL, COPY, CALL, OPERATOR, MARK)


def any_row(row: Row) -> bool:
    return True


def is_comm(row: Row) -> bool:
    return row.communicates


def computes(row: Row) -> bool:
    return row.what == KERNEL and not row.communicates


def sends(row: Row) -> bool:
    """A kernel that communicates."""
    return row.what == KERNEL and row.communicates


def is_operator(row: Row) -> bool:
    return row.what == OPERATOR and not row.communicates


def issues(row: Row) -> bool:
    return is_operator(row) and ISSUES.match(row.name) is not None


def is_short(row: Row) -> bool:
    """A kernel of the shortest that compute."""
    return computes(row) and ("triton" in row.name or "elementwise" in row.name)


def either(*tests: Test) -> Test:
    return lambda row: any(test(row) for test in tests)


def both(*tests: Test) -> Test:
    return lambda row: all(test(row) for test in tests)


def but(test: Test, other: Test) -> Test:
    return lambda row: test(row) and not other(row)


def called(pattern: str) -> Test:
    return lambda row: re.search(pattern, row.name) is not None


def says(argument: str) -> Test:
    return lambda row: argument in row.args


def of_stream(*streams: int) -> Test:
    """On streams of a device, or threads of a host."""
    return lambda row: row.stream in streams


# What becomes of a row.


def named(pattern: str, text: str) -> Change:
    return lambda row: replace(row, name=re.sub(pattern, text, row.name))


def later(row: Row, ns: int) -> Row:
    return replace(row, start_ns=row.start_ns + ns, end_ns=row.end_ns + ns)


def moved(start_ns: int, end_ns: int) -> Change:
    return lambda row: replace(row, start_ns=row.start_ns + start_ns, end_ns=row.end_ns + end_ns)


def at_zero(row: Row) -> Row:
    return later(row, -row.start_ns)


def lasts(ns: int) -> Change:
    return lambda row: replace(row, end_ns=row.start_ns + ns)


def stretched(before: float, after: float) -> Change:
    """Begin earlier and end later by parts of the length."""

    def change(row: Row) -> Row:
        length = row.end_ns - row.start_ns
        return replace(row, start_ns=row.start_ns - int(before * length), end_ns=row.end_ns + int(after * length))

    return change


def rounded(start_ns: int = 1, length_ns: int = 1) -> Change:
    def change(row: Row) -> Row:
        start = round(row.start_ns / start_ns) * start_ns
        return replace(row, start_ns=start, end_ns=start + round((row.end_ns - row.start_ns) / length_ns) * length_ns)

    return change


def elsewhere(row: Row) -> Row:
    """On another device."""
    other = "Agent 4" if isinstance(row.device, str) else {0: 1, 7002: 7001}.get(row.device, row.device)
    return replace(row, device=other)


def device_as_text(row: Row) -> Row:
    return replace(row, device=str(row.device) if isinstance(row.device, int) else row.device)


def linked(link: int | None) -> Change:
    return lambda row: replace(
        row, link=link, args={**row.args, "correlation": link} if "correlation" in row.args else row.args
    )


def linked_again(count: int) -> Change:
    """There are as many numbers of launches only."""
    return lambda row: linked((row.link or 0) % count + 1)(row)


def links_as_text(row: Row) -> Row:
    return replace(row, args={key: str(value) if "orrelation" in key else value for key, value in row.args.items()})


def with_args(**values: object) -> Change:
    return lambda row: replace(row, args=row.args | values)


def without_args(*names: str) -> Change:
    """Without these arguments, or without any."""
    return lambda row: replace(row, args={key: row.args[key] for key in row.args if names and key not in names})


def of_old(row: Row) -> Row:
    """Categories as Kineto wrote them once."""
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    return replace(row, category=old.get(row.category or "", row.category))
