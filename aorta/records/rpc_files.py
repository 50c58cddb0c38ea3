"""What an RPC run writes beside its traces: `rpc.json`, and the calls that each worker made in a window, one JSON line
each.

Must not know how calls are seen (`aorta.rpc.tracer`), or what is made of them (`aorta.rpc.rpc_report`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from aorta.records.schema import Integer

RPC_FILE: Final = "rpc.json"
RPC_VERSION: Final = 1
CALLS_FILE: Final = "rpc_calls_{window:04d}.jsonl"
"""In each rank's trace folder, once the window is over; empty where the rank made no call."""
CALLS_GLOB: Final = "rpc_calls*.jsonl"
"""Earlier runs have one file for all windows, `rpc_calls.jsonl`."""
TRACE_FILE: Final = "rpc_trace.json.gz"
"""What the report makes of all traces, in the run's folder unless told."""
WINDOW_FILE: Final = "rpc_window_{window:04d}.json"
WINDOW_GLOB: Final = "rpc_window_*.json"
CALL_MARK: Final = " call="
"""In a worker's own trace, between the name of a call's slice and its id: rows of one name are to add up."""


class Call(msgspec.Struct):
    """One call as its caller saw it, in Unix nanoseconds of its own clock.

    `call_id` is caller and number; `parent` the call in which it was made. `traced` is False where the callee runs it
    without a mark. `reply_ns` is null while no answer came; `error` is the type of what came instead of a value.
    """

    call_id: str
    name: str
    kind: str
    function: str
    caller: Integer
    callee: Integer
    window: Integer | None
    parent: str | None
    issue_ns: Integer
    traced: bool
    reply_ns: Integer | None = None
    error: str | None = None


class OperatorMemory(msgspec.Struct):
    """What an operator allocated in one call: with all that it called, and by itself."""

    allocated_bytes: int = 0
    self_allocated_bytes: int = 0


class CallMemory(msgspec.Struct, frozen=True):
    """What one call did to the host's memory on its callee.

    `peak_bytes` is the most it held at once of what it allocated itself; `operators` is by name.
    """

    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    operators: dict[str, OperatorMemory]


MEMORY_KEY: Final = "rpcMemory"
"""Top-level key of a callee's trace where memory was profiled: call id -> `CallMemory`."""


class Worker(msgspec.Struct, frozen=True):
    """`id` is torch's WorkerInfo.id, which is the rank."""

    id: Integer
    name: str


class RpcFacts(msgspec.Struct, frozen=True):
    """`rpc.json`, written when the run begins and after every window.

    `incomplete`: it has not `ended`, a worker was lost (`lost`: id to why), or a failed call or a signal has
    `cut_short` a window. `finished_windows` is null in files of earlier runs, which were written at the end alone.
    """

    version: int
    workers: list[Worker]
    driver: int
    windows: Integer
    profiled: bool
    incomplete: bool
    lost: dict[str, str]
    cut_short: str | None
    ended: bool = True
    finished_windows: int | None = None
