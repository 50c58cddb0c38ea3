"""Names the files of a run folder, lists which exist, and defines what they hold.

*Records and manifest* (`run.json`):

    for path in rank_files(folder):     # rank_0_metrics.jsonl, rank_1_metrics.jsonl, ...
        ...
    read_manifest(folder)["run_id"]

*RPC runs*: `rpc.json` beside the traces, and the calls of every worker in a window, one JSON line each. *Streams*:
`streams.json` of `workload=streams`. *Environment variables* of the manifest, and their values:

    check_variable("GPU_MAX_HW_QUEUES", "0")            InputError: ...: a whole number from 1

Must not write a file, judge whose files these are, set or read a variable, or load torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.errors import InputError
from aorta.records.files import decode_json, read_small
from aorta.records.schema import Integer

RANK_FILE: Final = "rank_{rank}_metrics.jsonl"
RANK_FILE_GLOB: Final = "rank_*_metrics.jsonl"
RANK_FILE_NAME: Final = re.compile(r"^rank_(\d+)_metrics\.jsonl$")
MANIFEST_FILE: Final = "run.json"
TENSORBOARD_DIR: Final = "tensorboard"
REPORT_EVENTS: Final = ".aorta_report"
"""Ends the names of a report's event files, which the next report may remove; those of a run stay."""
WANDB_DIR: Final = "wandb"
"""What loggers leave; the last is W&B's own name."""
AUTOPSY_DIR: Final = "autopsy"
"""What the watchdog saved of ranks that were stuck or died, and the report on it."""
HISTORY_DIR: Final = "history"
"""What earlier runs and attempts left, a folder each."""

NOTE_FILE: Final = "aorta_record.txt"
"""What `aorta record` writes before it becomes the command: that nothing of it is recorded, and why."""

_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


def rank_files(folder: Path) -> list[Path]:
    """Return the records directly in `folder`, by rank; empty when there are none or the folder cannot be listed."""
    try:
        named = [(RANK_FILE_NAME.match(path.name), path) for path in folder.glob(RANK_FILE_GLOB)]
    except OSError:
        return []
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match and path.is_file())]


def history_name(run_id: object, attempt: object) -> str:
    """Return the name of the folder in `history/` to which one attempt of a run is moved; a number may follow it."""
    # The content of run.json is not trusted.
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_id}-attempt{attempt}")[-128:].lstrip(".")


def in_history(folder: Path, run_id: str, attempt: int) -> list[Path]:
    """Return where a later run in `folder` has moved the files of that attempt; empty when they are not there."""
    name = history_name(run_id, attempt)
    try:
        attempts = sorted((folder / HISTORY_DIR).iterdir())
    except OSError:
        return []
    return [path for path in attempts if path.name == name or path.name.startswith(f"{name}-")]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run folder as it was written. Its `schema_version` is not looked at.

    Raises:
        OSError: it is not there (FileNotFoundError), or cannot be read.
        ValueError: it is not a JSON object; the message says why.
    """
    return decode_json(read_small(folder / MANIFEST_FILE), _OBJECT)


def why_unrecorded(folder: Path, since_unix_ns: int = 0) -> str | None:
    """Return the note of an `aorta record` into a folder that began after `since_unix_ns`; None without one."""
    try:
        if (path := folder / NOTE_FILE).stat().st_mtime_ns <= since_unix_ns:
            return None
        return f"{folder}: {read_small(path).decode(errors='replace').strip()}"
    except OSError:
        return None


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a nested dictionary with dotted keys; lists and empty dictionaries are leaves."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


RPC_FILE: Final = "rpc.json"
RPC_VERSION: Final = 1
CALLS_FILE: Final = "rpc_calls_{window:04d}.jsonl"
"""In each rank's trace folder, once the window is over; empty where the rank made no call."""
CALLS_GLOB: Final = "rpc_calls_*.jsonl"
TRACE_FILE: Final = "rpc_trace.json.gz"
"""What the report makes of all traces, in the run's folder by default."""
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
    `cut_short` a window.
    """

    version: int
    workers: list[Worker]
    driver: int
    windows: Integer
    profiled: bool
    incomplete: bool
    lost: dict[str, str]
    cut_short: str | None
    ended: bool
    finished_windows: Integer


STREAMS_FILE: Final = "streams.json"
STREAMS_VERSION: Final = 1
QUEUE_VARIABLES: Final = ("GPU_MAX_HW_QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS")
"""They bound the hardware queues, of HIP and of CUDA."""


class StreamsPoint(msgspec.Struct, frozen=True):
    """One pattern on one number of streams.

    `concurrency` is the mean number of kernels that ran at once while any ran (the sum of the kernels' lengths over the
    length of their union), `most_at_once` the maximum. `serial_ns` and `elapsed_ns` are the times of the same kernels
    on one stream and on `streams`, from the first begin to the last end; `gain` is their quotient, the throughput
    against one stream. `issued_in_time`: everything was issued before the first kernel could begin; else the host was
    too slow, and less than the device can do was seen. `shared_queues`: places of this point's streams,
    grouped by the hardware queue, where a queue has more than one.
    """

    streams: int
    kernels: int
    concurrency: float
    most_at_once: int
    serial_ns: int
    elapsed_ns: int
    gain: float
    issued_in_time: bool
    shared_queues: list[list[int]]


class StreamsPattern(msgspec.Struct, frozen=True):
    """One pattern: its points by number of streams, and its knee, null where it was `skipped` (with the reason)."""

    name: str
    says: str
    points: list[StreamsPoint]
    knee_streams: int | None = None
    skipped: str | None = None


class StreamsRank(msgspec.Struct, frozen=True):
    """All results of a rank. `queues` groups its streams of normal priority by the hardware queue they were seen to
    use. `environment` holds the variables that bound hardware queues, as the process started with them.
    """

    rank: int
    device: str
    environment: dict[str, str]
    queues: list[list[int]]
    patterns: list[StreamsPattern]


class StreamsFile(msgspec.Struct, frozen=True):
    """`streams.json`: what was asked for, and the results of all ranks in their order."""

    version: int
    kernel_ns: int
    knee_tolerance: float
    ranks: list[StreamsRank]


ENVIRONMENT_PREFIXES: Final = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "MSCCL"),
    *("HIP_", "HSA_", "ROCR_", "CUDA_", "AMD_"),
)
ENVIRONMENT_NAMES: Final = frozenset(
    [
        *("GPU_MAX_HW_QUEUES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_NUM_THREADS", "OMP_NUM_THREADS"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
    ]
)
"""Environment variables that change a measurement: runs record them, plans keep them equal."""

_FLAG: Final = ("0", "1")
_DISTANCES: Final = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
_FROM_ONE: Final = range(1, 10**18)
KNOWN_VARIABLES: Final[dict[str, tuple[str, ...] | range]] = {
    **dict.fromkeys(("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), _FROM_ONE),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_NSOCKS_PERTHREAD", "GPU_MAX_HW_QUEUES"), _FROM_ONE),
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), _FROM_ONE),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "TORCH_NCCL_HIGH_PRIORITY"), _FLAG),
    **dict.fromkeys(("TORCH_NCCL_AVOID_RECORD_STREAMS", "RCCL_MSCCL_ENABLE", "RCCL_MSCCLPP_ENABLE"), _FLAG),
    **dict.fromkeys(("HSA_ENABLE_SDMA", "HSA_ENABLE_PEER_SDMA", "HSA_NO_SCRATCH_RECLAIM"), _FLAG),
    **dict.fromkeys(("HIP_FORCE_DEV_KERNARG", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"), _FLAG),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"), _DISTANCES),
    "NCCL_NTHREADS": ("64", "128", "256", "512"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
    "NCCL_CGA_CLUSTER_SIZE": range(9),
    "NCCL_CROSS_NIC": ("0", "1", "2"),
    "NCCL_SOCKET_NTHREADS": range(1, 17),
    "NCCL_CUMEM_ENABLE": ("0", "1", "-2"),
    "CUDA_DEVICE_MAX_CONNECTIONS": range(1, 33),
}
"""Values that a variable can have. Sources: the environment variable pages of the user guides of NCCL 2.30, RCCL, HIP
and ROCR-Runtime 7, the appendix "CUDA Environment Variables" of the CUDA programming guide, and that of
torch.distributed."""
_EXCLUDING: Final = ("NCCL_ALGO", "NCCL_PROTO")
"""With `^` before a value all others are allowed."""


def check_variable(name: str, value: str) -> None:
    """Check the value of an environment variable; one that is not known here takes any.

    Raises:
        InputError: a known one does not take that value, or the name is none of an environment variable.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise InputError(f"{name!r}: not the name of an environment variable: letters, digits and _")
    known = KNOWN_VARIABLES.get(name)
    if isinstance(known, range):
        takes = re.fullmatch(r"[0-9]{1,18}", value) is not None and int(value) in known
        allowed = f"a whole number from {known.start}" + ("" if known == _FROM_ONE else f" to {known[-1]}")
    elif known is not None:
        takes = value.removeprefix("^" if name in _EXCLUDING else "").upper() in map(str.upper, known)
        others = "; with ^ before it all others" if name in _EXCLUDING else ""
        allowed = f"{', '.join(known[:-1])} or {known[-1]}{others}"
    else:
        return
    if not takes:
        raise InputError(f"{name}={value}: must be {allowed}")
