"""Reads one worker's trace: its operators with their self time, and the slices of the calls that ran in it.

Takes complete events, which nest within a thread, and gives one `RemoteOperator` each, labelled with the call it
served. Must not: attribute an operator to a call unless it lies inside the call's slice on the same thread.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from aorta.analysis.load import microseconds
from aorta.analysis.load.chrome_json import Event
from aorta.analysis.merge.trace_choice import TraceFile, scanning
from aorta.errors import InputError
from aorta.records.rpc_files import CALL_MARK

_OPERATORS = ("cpu_op", "user_annotation")
NO_NAME = "(no name)"
"""torch 2.13 writes the wait of `RRef.to_here` without a name."""


@dataclass
class RemoteOperator:
    """One event of a trace, in Unix nanoseconds of its worker's clock. `call_id` is set on the slice
    of a call itself.
    """

    name: str
    thread: bytes
    start_ns: int
    end_ns: int
    call_id: str | None = None
    self_ns: int = 0
    serves: str | None = None
    """Name of the innermost call in whose slice it lies."""
    allocated_bytes: int = 0


@dataclass
class WorkerRows:
    """The operators of one trace."""

    operators: list[RemoteOperator] = field(default_factory=list)


def read_rows(trace: TraceFile) -> WorkerRows:
    """Read one trace.

    Raises:
        InputError: it is broken.
    """
    threads: defaultdict[bytes, list[RemoteOperator]] = defaultdict(list)
    allocated: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    with scanning(trace.path) as scanner:
        for event in scanner.events():
            if "ts" not in event or "tid" not in event:
                continue
            thread = bytes(event["tid"])
            try:
                if (size := _allocation(event)) is not None:
                    allocated[thread].append((_start_ns(event, trace), size))
                if (operator := _operator(event, trace)) is not None:
                    threads[thread].append(operator)
            except (KeyError, ValueError, AttributeError, TypeError) as error:
                raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error!r})") from error
    rows = WorkerRows()
    for thread, operators in threads.items():
        operators.sort(key=lambda operator: (operator.start_ns, -operator.end_ns))
        _nest(operators, sorted(allocated[thread]))
        rows.operators += operators
    return rows


def _start_ns(event: Event, trace: TraceFile) -> int:
    return (trace.base_ns or 0) + microseconds.of_value(bytes(event["ts"]))


def _allocation(event: Event) -> int | None:
    """Bytes allocated on the host, where the event is an allocation there."""
    if bytes(event["ph"]) != b'"i"' or bytes(event["name"]) != b'"[memory]"':
        return None
    args = msgspec.json.decode(event["args"])
    return int(args["Bytes"]) if args.get("Device Type", 0) == 0 and args.get("Bytes", 0) > 0 else None


def _operator(event: Event, trace: TraceFile) -> RemoteOperator | None:
    if bytes(event["ph"]) != b'"X"' or msgspec.json.decode(event.get("cat", b'""')) not in _OPERATORS:
        return None
    name, mark, call_id = msgspec.json.decode(event["name"], type=str).rpartition(CALL_MARK)
    if not mark:
        name, call_id = call_id or NO_NAME, ""
    start = _start_ns(event, trace)
    return RemoteOperator(
        name, bytes(event["tid"]), start, start + microseconds.of_value(bytes(event["dur"])), call_id or None
    )


def _nest(operators: list[RemoteOperator], allocated: list[tuple[int, int]]) -> None:
    """Fill in self time (total less nested operators), the innermost call around each operator, and allocated memory,
    which counts for the innermost operator.
    """
    stack: list[RemoteOperator] = []
    pending = iter([*allocated, (1 << 80, 0)])
    at, size = next(pending)

    def leave_until(instant: int) -> None:
        nonlocal at, size
        while stack and stack[-1].end_ns <= instant:
            while at < stack[-1].end_ns:
                stack[-1].allocated_bytes += size
                at, size = next(pending)
            stack.pop()
        while at < instant:
            if stack:
                stack[-1].allocated_bytes += size
            at, size = next(pending)

    for operator in operators:
        leave_until(operator.start_ns)
        operator.self_ns = operator.end_ns - operator.start_ns
        if stack:
            stack[-1].self_ns -= min(operator.end_ns, stack[-1].end_ns) - operator.start_ns
            outer = stack[-1]
            operator.serves = outer.name if outer.call_id is not None else outer.serves
        stack.append(operator)
    leave_until(max((operator.end_ns for operator in operators), default=0) + 1)
