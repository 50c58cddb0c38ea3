"""Reads a run folder of `workload=rpc`: its calls, and of its workers' traces the operators with their self time.

A worker's trace gives one `RemoteOperator` for each complete event (they nest within a thread), labelled with the call
it served. Must not load torch or pandas, fail because a worker died (what it did not write is reported as missing), or
attribute an operator to a call unless it lies inside the call's slice on the same thread.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from aorta.analysis.load.chrome_json import Event, ns_of_value
from aorta.analysis.merge.trace_choice import TraceFile, describe, scanning
from aorta.errors import InputError
from aorta.records.files import decode_json, open_regular, read_small
from aorta.records.run_files import (
    CALL_MARK,
    CALLS_GLOB,
    MEMORY_KEY,
    RPC_FILE,
    RPC_VERSION,
    WINDOW_GLOB,
    Call,
    CallMemory,
    RpcFacts,
    Worker,
)

_FACTS: Final = msgspec.json.Decoder(RpcFacts)
_CALL: Final = msgspec.json.Decoder(Call)
_WORKER: Final = msgspec.json.Decoder(Worker)
_OPERATORS = ("cpu_op", "user_annotation")
REMOTE_OP = "#remote_op: "
REMOTE_CALL = "#remote_call"
TO_HERE = "RRef.to_here"
"""torch 2.13 marks the wait for the value of a remote call by a user annotation with an empty name: it makes one up
only for its legacy profiler."""


@dataclass
class RpcRecords:
    """One RPC run. `missing` says what should be there and is not, which makes the run incomplete."""

    path: Path
    workers: dict[int, str]
    calls: list[Call]
    traces: list[TraceFile]
    missing: list[str]

    @property
    def incomplete(self) -> bool:
        """Whether the calls or traces of some worker are missing."""
        return bool(self.missing)


def read_run(folder: Path) -> RpcRecords:
    """Read everything but the events of the traces.

    Raises:
        InputError: this is not an RPC run, or a file in it is broken; names it.
    """
    missing: list[str] = []
    facts = _facts(folder, missing)
    traces = [describe(path) for path in sorted(folder.glob(f"torch_profiler/*/{WINDOW_GLOB}"))]
    calls: list[Call] = []
    lists: Counter[int] = Counter()
    for path in sorted(folder.glob(f"torch_profiler/*/{CALLS_GLOB}")):
        calls += _calls(path)
        number = re.search(r"[0-9]{1,9}", path.parent.name)
        if number is None:
            raise InputError(f"{path}: which worker made these calls? Its folder has no number in its name; rename it")
        lists[int(number[0])] += 1
    if not traces and not calls:
        raise InputError(
            f"{folder}: no calls and no traces of an RPC run (train.py workload=rpc profiling.enabled=true)"
        )
    workers = {worker.id: worker.name for worker in facts.workers} if facts else _workers(calls, traces)
    profiled = facts.profiled if facts else bool(traces)
    saved = Counter(trace.rank for trace in traces)
    windows = facts.finished_windows if facts else 1 + max((call.window or 0 for call in calls), default=0)
    for worker, name in workers.items():
        if lists[worker] < windows:
            missing.append(f"worker {name} (node {worker}): {lists[worker]} of {windows} lists of the calls it made")
        if profiled and saved[worker] < windows:
            missing.append(f"worker {name} (node {worker}): {saved[worker]} of {windows} traces")
    if facts:
        for rank, why in facts.lost.items():
            name = next((name for worker, name in workers.items() if str(worker) == rank), "?")
            missing.append(f"worker {name} (node {rank}): lost: {why}")
        if facts.cut_short:
            missing.append(f"the run was cut short: {facts.cut_short}")
        if not facts.ended:
            name = workers.get(facts.driver, "?")
            missing.append(f"the driver {name} (node {facts.driver}) did not report its end: killed, or still running")
        if facts.finished_windows < facts.windows:
            missing.append(f"{facts.finished_windows} of {facts.windows} windows were finished")
    return RpcRecords(folder, workers, sorted(calls, key=lambda call: call.issue_ns), traces, missing)


def _facts(folder: Path, missing: list[str]) -> RpcFacts | None:
    path = folder / RPC_FILE
    try:
        facts = decode_json(read_small(path), _FACTS)
    except FileNotFoundError:
        missing.append(f"no {RPC_FILE}: the driver did not come to its end")
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not the facts of an RPC run ({error})") from error
    if facts.version != RPC_VERSION:
        raise InputError(f"{path}: version {facts.version}; this AORTA reads version {RPC_VERSION}")
    return facts


def _calls(path: Path) -> list[Call]:
    try:
        with open_regular(path) as file:
            return [decode_json(line, _CALL) for line in file if line.strip()]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not a list of calls ({error}); the file is cut off or corrupt") from error


def _workers(calls: list[Call], traces: list[TraceFile]) -> dict[int, str]:
    found = {worker: f"node {worker}" for call in calls for worker in (call.caller, call.callee)}
    for trace in traces:
        if "rpcWorker" in trace.head:
            try:
                worker = decode_json(trace.head["rpcWorker"], _WORKER)
            except ValueError as error:
                raise InputError(f"{trace.path}: its rpcWorker is no worker ({error})") from error
            found[worker.id] = worker.name
    return dict(sorted(found.items()))


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


def read_operators(trace: TraceFile, nested: Mapping[str, Sequence[Call]] | None = None) -> list[RemoteOperator]:
    """Return the operators of one trace, labelled with the calls they served.

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
    found: list[RemoteOperator] = []
    for operators in threads.values():
        waits = [
            RemoteOperator(call.name, operator.thread, call.issue_ns, call.reply_ns)
            for operator in operators
            for call in (nested or {}).get(operator.call_id or "", ())
            if call.reply_ns is not None and operator.start_ns <= call.issue_ns <= call.reply_ns <= operator.end_ns
        ]
        _nest(sorted([*operators, *waits], key=lambda operator: (operator.start_ns, -operator.end_ns)))
        found += operators
    return found


def nested_waits(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Return the `nested` of `read_operators`: what is known to block the thread that serves a call, by its id."""
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.parent is not None and call.kind == "rpc_sync" and call.reply_ns is not None:
            found[call.parent].append(call)
    return found


def memory_of(trace: TraceFile) -> dict[str, CallMemory]:
    """Return what the calls served in a trace did to memory, by call id; empty where that was not measured.

    Raises:
        InputError: its entry is broken.
    """
    try:
        return msgspec.json.decode(trace.head.get(MEMORY_KEY, b"{}"), type=dict[str, CallMemory])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{trace.path}: its {MEMORY_KEY} is not what a worker writes: {error}") from error


def is_wait(event: Event) -> bool:
    """Return whether it is the nameless annotation of `RRef.to_here`."""
    return bytes(event.get("name", b"")) == b'""' and bytes(event.get("cat", b"")) == b'"user_annotation"'


def _operator(event: Event, trace: TraceFile) -> RemoteOperator | None:
    if bytes(event["ph"]) != b'"X"' or msgspec.json.decode(event.get("cat", b'""')) not in _OPERATORS:
        return None
    name, mark, call_id = msgspec.json.decode(event["name"], type=str).rpartition(CALL_MARK)
    if not mark:
        name, call_id = TO_HERE if is_wait(event) else call_id, ""
    start = (trace.base_ns or 0) + ns_of_value(bytes(event["ts"]))
    return RemoteOperator(name, bytes(event["tid"]), start, start + ns_of_value(bytes(event["dur"])), call_id or None)


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
