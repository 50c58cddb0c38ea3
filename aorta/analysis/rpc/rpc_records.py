"""Reads a run folder of `workload=rpc`: its calls, its workers' traces, and what is missing of both.

Must not: fail because a worker died; what it did not write is reported as missing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from aorta.analysis.merge.trace_choice import TraceFile, describe
from aorta.errors import InputError
from aorta.records.rpc_files import CALLS_GLOB, RPC_FILE, RPC_VERSION, WINDOW_GLOB, Call, RpcFacts, Worker
from aorta.records.untrusted_files import decode_json, open_regular, read_small

_FACTS: Final = msgspec.json.Decoder(RpcFacts)
_CALL: Final = msgspec.json.Decoder(Call)
_WORKER: Final = msgspec.json.Decoder(Worker)


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
        lists[_caller(path)] += 1
    if not traces and not calls:
        raise InputError(
            f"{folder}: no calls and no traces of an RPC run (train.py workload=rpc profiling.enabled=true)"
        )
    workers = {worker.id: worker.name for worker in facts.workers} if facts else _workers(calls, traces)
    profiled = facts.profiled if facts else bool(traces)
    saved = Counter(trace.rank for trace in traces)
    windows = _windows(facts, calls)
    # Earlier versions wrote one list for all windows.
    wanted = windows if facts is None or facts.finished_windows is not None else 1
    for worker, name in workers.items():
        if lists[worker] < wanted:
            missing.append(f"worker {name} (node {worker}): {lists[worker]} of {wanted} lists of the calls it made")
        if profiled and saved[worker] < windows:
            missing.append(f"worker {name} (node {worker}): {saved[worker]} of {windows} traces")
    missing += _ending(facts, workers) if facts else []
    return RpcRecords(folder, workers, sorted(calls, key=lambda call: call.issue_ns), traces, missing)


def _windows(facts: RpcFacts | None, calls: list[Call]) -> int:
    """How many windows every worker should have; one that was cut short counts for nobody."""
    if facts is None:
        return 1 + max((call.window or 0 for call in calls), default=0)
    return facts.windows if facts.finished_windows is None else facts.finished_windows


def _ending(facts: RpcFacts, workers: dict[int, str]) -> list[str]:
    """What the driver says is missing, or that it does not say."""
    names = {str(worker): name for worker, name in workers.items()}
    said = [f"worker {names.get(rank, '?')} (node {rank}): lost: {why}" for rank, why in facts.lost.items()]
    if facts.cut_short:
        said.append(f"the run was cut short: {facts.cut_short}")
    if not facts.ended:
        name = workers.get(facts.driver, "?")
        said.append(f"the driver {name} (node {facts.driver}) did not report its end: killed, or still running")
    if facts.finished_windows is not None and facts.finished_windows < facts.windows:
        said.append(f"{facts.finished_windows} of {facts.windows} windows were finished")
    return said


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


def _caller(path: Path) -> int:
    number = re.search(r"[0-9]{1,9}", path.parent.name)
    if number is None:
        raise InputError(f"{path}: which worker made these calls? Its folder has no number in its name; rename it")
    return int(number[0])


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
