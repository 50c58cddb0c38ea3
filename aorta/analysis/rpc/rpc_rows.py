"""Reads one worker's trace: its operators with their self time, and the slices of the calls that ran in it.

Takes complete events, which nest within a thread, and gives one `RemoteOperator` each, labelled with the call it
served. Must not: attribute an operator to a call unless it lies inside the call's slice on the same thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from aorta.analysis.load import microseconds
from aorta.analysis.load.chrome_json import Event
from aorta.analysis.merge.trace_choice import TraceFile, scanning
from aorta.errors import InputError
from aorta.records.rpc_files import CALL_MARK, MEMORY_KEY, Call, CallMemory

_OPERATORS = ("cpu_op", "user_annotation")
TO_HERE = "RRef.to_here"
"""torch 2.13 marks the wait for the value of a remote call by a user annotation with an empty name: it makes one up
only for its legacy profiler."""


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
    memory: CallMemory | None = None
    """What the call allocated, on its slice and where it was measured."""

    @property
    def waits(self) -> bool:
        """Whether it only waits for another worker, which is no use of its own CPU."""
        return self.name == TO_HERE


@dataclass
class WorkerRows:
    """The operators of one trace."""

    operators: list[RemoteOperator] = field(default_factory=list)


def read_rows(trace: TraceFile, nested: Mapping[str, Sequence[Call]] | None = None) -> WorkerRows:
    """Read one trace.

    Args:
        nested: call id -> the synchronous calls made while that call was served. Their waits are no self time of
            whatever made them.

    Raises:
        InputError: it is broken.
    """
    threads: defaultdict[bytes, list[RemoteOperator]] = defaultdict(list)
    memory = memory_of(trace)
    with scanning(trace.path) as scanner:
        for event in scanner.events():
            if "ts" not in event or "tid" not in event:
                continue
            thread = bytes(event["tid"])
            try:
                if (operator := _operator(event, trace)) is not None:
                    operator.memory = memory.get(operator.call_id or "")
                    threads[thread].append(operator)
            except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error!r})") from error
    rows = WorkerRows()
    for operators in threads.values():
        waits = [wait for operator in operators for wait in _waits(operator, nested or {})]
        _nest(sorted([*operators, *waits], key=lambda operator: (operator.start_ns, -operator.end_ns)))
        rows.operators += operators
    return rows


def nested_waits(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """The `nested` of `read_rows`: what is known to block the thread that serves a call, by its id."""
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.parent is not None and call.kind == "rpc_sync" and call.reply_ns is not None:
            found[call.parent].append(call)
    return found


def _waits(operator: RemoteOperator, nested: Mapping[str, Sequence[Call]]) -> Iterator[RemoteOperator]:
    """The waits of one call's slice, where they lie in it."""
    for call in nested.get(operator.call_id or "", ()):
        if call.reply_ns is not None and operator.start_ns <= call.issue_ns <= call.reply_ns <= operator.end_ns:
            yield RemoteOperator(call.name, operator.thread, call.issue_ns, call.reply_ns)


def memory_of(trace: TraceFile) -> dict[str, CallMemory]:
    """What the calls served in a trace did to memory, by call id; empty where that was not measured.

    Raises:
        InputError: its entry is broken.
    """
    try:
        return msgspec.json.decode(trace.head.get(MEMORY_KEY, b"{}"), type=dict[str, CallMemory])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{trace.path}: its {MEMORY_KEY} is not what a worker writes: {error}") from error


def is_wait(event: Event) -> bool:
    """Whether it is the nameless annotation of `RRef.to_here`."""
    return bytes(event.get("name", b"")) == b'""' and bytes(event.get("cat", b"")) == b'"user_annotation"'


def _operator(event: Event, trace: TraceFile) -> RemoteOperator | None:
    if bytes(event["ph"]) != b'"X"' or msgspec.json.decode(event.get("cat", b'""')) not in _OPERATORS:
        return None
    name, mark, call_id = msgspec.json.decode(event["name"], type=str).rpartition(CALL_MARK)
    if not mark:
        name, call_id = TO_HERE if is_wait(event) else call_id, ""
    start = (trace.base_ns or 0) + microseconds.of_value(bytes(event["ts"]))
    return RemoteOperator(
        name, bytes(event["tid"]), start, start + microseconds.of_value(bytes(event["dur"])), call_id or None
    )


def _nest(operators: list[RemoteOperator]) -> None:
    """Fill in self time (total less nested operators; none where it waits), and the innermost call around each
    operator.
    """
    stack: list[RemoteOperator] = []
    for operator in operators:
        while stack and stack[-1].end_ns <= operator.start_ns:
            stack.pop()
        operator.self_ns = operator.end_ns - operator.start_ns
        if stack:
            stack[-1].self_ns -= min(operator.end_ns, stack[-1].end_ns) - operator.start_ns
            outer = stack[-1]
            operator.serves = outer.name if outer.call_id is not None else outer.serves
        stack.append(operator)
    for operator in operators:
        if operator.waits:
            operator.self_ns = 0
