"""What an RPC run writes beside its traces: `rpc.json`, and the calls that each worker made, one JSON line each.

Must not know how calls are seen (`aorta.rpc.tracer`), or what is made of them (`aorta.analysis.rpc`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from aorta.records.schema import Integer

RPC_FILE: Final = "rpc.json"
RPC_VERSION: Final = 1
CALLS_FILE: Final = "rpc_calls.jsonl"
"""In each rank's trace folder."""
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


class Worker(msgspec.Struct, frozen=True):
    """`id` is torch's WorkerInfo.id, which is the rank."""

    id: Integer
    name: str


class RpcFacts(msgspec.Struct, frozen=True):
    """`rpc.json`. `incomplete`: a worker was lost (`lost`: id to why), or a failed call has `cut_short` a window."""

    version: int
    workers: list[Worker]
    driver: int
    windows: Integer
    profiled: bool
    incomplete: bool
    lost: dict[str, str]
    cut_short: str | None
