"""Reads a run folder of `workload=rpc`: the calls, the traces, what is missing; and the operators of a trace, each with
the call that it served.

Must not load torch, fail because a worker died (what it did not write is `missing`), or attribute an operator to a call
unless it lies inside the call's slice on the same thread.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from aorta.errors import InputError
from aorta.merge.sources import TraceFile, describe, scanning
from aorta.read.traces.chrome_json import Event, ns_of_value
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
TO_HERE: Final = "RRef.to_here"
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


def read_run(folder: Path) -> RpcRecords:
    """Read everything but the events of the traces.

    Raises:
        InputError: this is not an RPC run, or a file in it is broken; names it.
    """
    missing: list[str] = []
    path, facts = folder / RPC_FILE, None
    try:
        facts = decode_json(read_small(path), _FACTS)
    except FileNotFoundError:
        missing.append(f"no {RPC_FILE}: the driver did not come to its end")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not the facts of an RPC run ({error})") from error
    if facts is not None and facts.version != RPC_VERSION:
        raise InputError(f"{path}: version {facts.version}; this AORTA reads version {RPC_VERSION}")
    traces = [describe(path) for path in sorted(folder.glob(f"torch_profiler/*/{WINDOW_GLOB}"))]
    calls: list[Call] = []
    lists: Counter[int] = Counter()
    for path in sorted(folder.glob(f"torch_profiler/*/{CALLS_GLOB}")):
        try:
            with open_regular(path) as file:
                calls += [decode_json(line, _CALL) for line in file if line.strip()]
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(f"{path}: not a list of calls ({error}); the file is cut off or corrupt") from error
        number = re.search(r"[0-9]{1,9}", path.parent.name)
        if number is None:
            raise InputError(f"{path}: which worker made these calls? Its folder has no number in its name; rename it")
        lists[int(number[0])] += 1
    if not traces and not calls:
        raise InputError(
            f"{folder}: no calls and no traces of an RPC run (train.py workload=rpc profiling.enabled=true)"
        )
    if facts is not None:
        workers = {worker.id: worker.name for worker in facts.workers}
        windows, profiled = facts.finished_windows, facts.profiled
    else:
        names = {worker: f"node {worker}" for call in calls for worker in (call.caller, call.callee)}
        for trace in traces:
            if "rpcWorker" in trace.head:
                try:
                    own = decode_json(trace.head["rpcWorker"], _WORKER)
                except ValueError as error:
                    raise InputError(f"{trace.path}: its rpcWorker is no worker ({error})") from error
                names[own.id] = own.name
        workers = dict(sorted(names.items()))
        windows, profiled = 1 + max((call.window or 0 for call in calls), default=0), bool(traces)
    saved = Counter(trace.rank for trace in traces)
    for worker, name in workers.items():
        if lists[worker] < windows:
            missing.append(f"worker {name} (node {worker}): {lists[worker]} of {windows} lists of the calls it made")
        if profiled and saved[worker] < windows:
            missing.append(f"worker {name} (node {worker}): {saved[worker]} of {windows} traces")
    if facts is not None:
        by_text = {str(worker): name for worker, name in workers.items()}
        missing += [f"worker {by_text.get(rank, '?')} (node {rank}): lost: {why}" for rank, why in facts.lost.items()]
        if facts.cut_short:
            missing.append(f"the run was cut short: {facts.cut_short}")
        if not facts.ended:
            name = workers.get(facts.driver, "?")
            missing.append(f"the driver {name} (node {facts.driver}) did not report its end: killed, or still running")
        if facts.finished_windows < facts.windows:
            missing.append(f"{facts.finished_windows} of {facts.windows} windows were finished")
    return RpcRecords(folder, workers, sorted(calls, key=lambda call: call.issue_ns), traces, missing)


@dataclass
class RemoteOperator:
    """One event of a trace, in Unix nanoseconds of its worker's clock.

    Attributes:
        call_id: set on the slice of a call itself.
        self_ns: without nested operators; 0 where it waits.
        serves: name of the innermost call in whose slice it lies.
        memory: what the call allocated, on its slice and where it was measured.
    """

    name: str
    thread: bytes
    start_ns: int
    end_ns: int
    call_id: str | None = None
    self_ns: int = 0
    serves: str | None = None
    memory: CallMemory | None = None

    @property
    def waits(self) -> bool:
        """Whether it only waits for another worker, which is no use of its own CPU."""
        return self.name == TO_HERE


def read_operators(trace: TraceFile, calls: Iterable[Call] = ()) -> list[RemoteOperator]:
    """Return the operators of one trace, labelled with the calls they served.

    Args:
        calls: of the run. A synchronous call made while another call was served blocks the thread that serves: the
            wait for it is no self time of what made it.

    Raises:
        InputError: it is broken.
    """
    nested: defaultdict[str | None, list[Call]] = defaultdict(list)
    for call in calls:
        if call.parent is not None and call.kind == "rpc_sync":
            nested[call.parent].append(call)
    threads: defaultdict[bytes, list[RemoteOperator]] = defaultdict(list)
    memory = memory_of(trace)
    with scanning(trace.path) as scanner:
        for event in scanner.events():
            if "ts" not in event or "tid" not in event:
                continue
            try:
                category = msgspec.json.decode(event.get("cat", b'""'))
                if bytes(event["ph"]) != b'"X"' or category not in ("cpu_op", "user_annotation"):
                    continue
                name, mark, call_id = msgspec.json.decode(event["name"], type=str).rpartition(CALL_MARK)
                if not mark:
                    name, call_id = TO_HERE if is_wait(event) else call_id, ""
                start = (trace.base_ns or 0) + ns_of_value(bytes(event["ts"]))
                end = start + ns_of_value(bytes(event["dur"]))
                operator = RemoteOperator(name, bytes(event["tid"]), start, end, call_id or None)
            except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error!r})") from error
            operator.memory = memory.get(call_id)
            threads[operator.thread].append(operator)
    for operators in threads.values():
        waits = [
            RemoteOperator(call.name, operator.thread, call.issue_ns, call.reply_ns)
            for operator in operators
            if operator.call_id is not None
            for call in nested[operator.call_id]
            if call.reply_ns is not None and operator.start_ns <= call.issue_ns <= call.reply_ns <= operator.end_ns
        ]
        stack: list[RemoteOperator] = []
        for operator in sorted([*operators, *waits], key=lambda operator: (operator.start_ns, -operator.end_ns)):
            while stack and stack[-1].end_ns <= operator.start_ns:
                stack.pop()
            operator.self_ns = operator.end_ns - operator.start_ns
            if stack:
                outer = stack[-1]
                outer.self_ns -= min(operator.end_ns, outer.end_ns) - operator.start_ns
                operator.serves = outer.name if outer.call_id is not None else outer.serves
            stack.append(operator)
        for operator in operators:
            if operator.waits:
                operator.self_ns = 0
    return [operator for operators in threads.values() for operator in operators]


def memory_of(trace: TraceFile) -> dict[str, CallMemory]:
    """Return what the calls served in a trace did to memory, by call id; empty where that was not measured."""
    try:
        return msgspec.json.decode(trace.head.get(MEMORY_KEY, b"{}"), type=dict[str, CallMemory])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{trace.path}: its {MEMORY_KEY} is not what a worker writes: {error}") from error


def is_wait(event: Event) -> bool:
    """Return whether it is the nameless annotation of `RRef.to_here`."""
    return bytes(event.get("name", b"")) == b'""' and bytes(event.get("cat", b"")) == b'"user_annotation"'
