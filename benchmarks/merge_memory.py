"""How much memory and time it takes to merge the traces of several ranks.

    python -m benchmarks.merge_memory [--ranks 8] [--mb 54] [--folder DIR]

Regimes: `plain` (.json in, .json.gz out) and `packed` (.json.gz in, .json.gz out). The traces are generated like
Kineto's: indented, operators nested three deep on two threads, collectives on a third, forward-backward arrows, memory
instants. Each merge runs in a process of its own; its peak resident memory is the system's (ru_maxrss).

Output contract: progress on stderr; the last line of stdout is one JSON object:
{"ranks", "mb_per_rank", "events", "regimes": {name: {"peak_rss_mb", "seconds", "output_mb", "exit_code"}}}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE_NS = 1_790_857_026_000_000_000
MB = 1_000_000


def event(**fields: object) -> str:
    """One event, indented as Kineto indents it."""
    return json.dumps(fields, indent=2).replace("\n", "\n  ")


def operator(depth: int, count: int, pid: int, now: float) -> str:
    """One row of an operator and its arguments, as record_shapes writes them."""
    args = {
        "External id": count + depth,
        "Sequence number": count,
        "Fwd thread id": 0,
        "Input Dims": [[64, 512], [512, 512], [], []],
        "Input type": ["float", "float", "Scalar", "Scalar"],
        "Concrete Inputs": ["", "", "1", "1"],
        "Ev Idx": count + depth,
    }
    name = ("aten::linear", "aten::addmm", "aten::copy_")[depth]
    times = {"ts": round(now + depth * 1.5, 3), "dur": round(40 - depth * 3.25, 3)}
    return event(ph="X", cat="cpu_op", name=name, pid=pid, tid=pid + count % 2, **times, args=args)


def generate(path: Path, rank: int, ranks: int, size_bytes: int) -> int:
    """Write one trace of about `size_bytes`; returns its events."""
    source = random.Random(rank)
    head = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "trace_id": f"{source.getrandbits(128):032X}",
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": ranks, "pg_count": 1, "pg_config": []},
        "host_name": f"node{rank}",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }
    count, written, now, pid = 0, 0, 4_400_000_000_000.0, 4000 + rank
    with path.open("w") as file:
        written += file.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        while written < size_bytes:
            parts = [operator(depth, count, pid, now) for depth in range(3)]
            arrow = {"cat": "fwdbwd", "name": "fwdbwd", "pid": pid, "tid": pid, "id": count}
            parts.append(event(ph="s", ts=round(now, 3), **arrow))
            parts.append(event(ph="f", bp="e", ts=round(now + 30, 3), **arrow))
            memory = {"Total Allocated": count * 64, "Bytes": 64, "Addr": 10**14 + count, "Device Id": -1}
            parts.append(event(ph="i", s="t", name="[memory]", pid=pid, tid=pid, ts=round(now, 3), args=memory))
            if count % 60 == 0:
                name = "gloo:all_reduce"
                parts.append(
                    event(ph="X", cat="user_annotation", name=name, pid=pid, tid=9, ts=round(now, 3), dur=900.5)
                )
            now += 45 + source.random()
            count += len(parts)
            lead = "  " if count == len(parts) else ",\n  "
            written += file.write(lead + ",\n  ".join(parts))
        file.write('\n  ],\n  "traceName": "generated"\n}\n')
    return count


def measure(folder: Path, target: Path) -> dict[str, float | int]:
    """One merge in a process of its own."""
    begin = time.monotonic()
    code = (
        "import resource,sys; sys.path.insert(0, sys.argv[1]); "
        "from aorta.analysis.merge.merge_traces import merge_traces; code = merge_traces(sys.argv[2:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    words = [sys.executable, "-c", code, str(ROOT), str(folder), "-o", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    return {
        "peak_rss_mb": round(int(done.stdout.split()[-1]) * 1024 / MB, 1),
        "seconds": round(time.monotonic() - begin, 1),
        "output_mb": round(target.stat().st_size / MB, 1),
        "exit_code": done.returncode,
    }


def main() -> None:
    """Generate, merge twice, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mb", type=float, default=54.0, help="size of one rank's trace, in 1e6 bytes")
    parser.add_argument("--folder", help="where the traces are written; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root = Path(temporary)
        (root / "plain").mkdir()
        (root / "packed").mkdir()
        events = 0
        for rank in range(options.ranks):
            path = root / "plain" / f"rank{rank}.json"
            events += generate(path, rank, options.ranks, round(options.mb * MB))
            with gzip.open(root / "packed" / f"rank{rank}.json.gz", "wb", compresslevel=1) as packed:
                packed.write(path.read_bytes())
            sys.stderr.write(f"rank {rank}: {path.stat().st_size / MB:.1f} MB\n")
        regimes = {name: measure(root / name, root / f"{name}.json.gz") for name in ("plain", "packed")}
    result = {"ranks": options.ranks, "mb_per_rank": options.mb, "events": events, "regimes": regimes}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
