"""Reading Kineto traces, beside merely parsing them: `python -m benchmarks.kineto_reading [--hta-python PATH]`.

Regime: generated traces of 54 MB (`kineto_traces`, Kineto's layout), gzip; one file at a time in a fresh process; the
best of `--repeats`. Measured: (a) AORTA, from the compressed file to classified rows and the metrics of every step and
of the whole; (b) gunzip and `orjson.loads`, nothing else; (c) HolisticTraceAnalysis with its overlap and its breakdown,
where `--hta-python` names a Python that has it. It brings 90 packages, so it gets an environment of its own
(`python -m venv DIR && DIR/bin/pip install HolisticTraceAnalysis "pandas<3"`; its 0.5.0 fails with pandas 3). Memory is
the peak above the resident size after the imports. Also the same trace on one line, and with `--ranks N` a folder of N
traces, one process a file. On a machine with other load only `cpu_ratio` means something.

Prints one JSON object last; exit 1 when AORTA takes more than 0.35 of (b)'s time, 0.45 of its memory, or a twelfth of
(c)'s time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import kineto_with_hta
from benchmarks.kineto_traces import Plan, write_traces

TIME_LIMIT, MEMORY_LIMIT, HTA_FACTOR = 0.35, 0.45, 12.0


def memory_mib(what: str) -> float:
    """Resident memory of this process: `VmRSS` now or `VmHWM` at most, MiB. `getrusage` would give the launcher's: a
    process inherits its maximum when it starts another program.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise ValueError(what)


def with_aorta(path: str) -> dict[str, Any]:
    """From the file to the metrics of its windows."""
    from aorta.analysis.traces.scanning import scan_unit
    from aorta.analysis.traces.units import Unit

    before, cpu, began = memory_mib("VmRSS"), time.process_time(), time.perf_counter()
    scanned = scan_unit(Unit((path,), "kineto"))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": memory_mib("VmHWM") - before,
        "rows": scanned.facts[0].counters["rows"],
        "steps": scanned.devices[0].scan.step_count,
        "overlap_ratio": scanned.devices[0].whole.metrics["overlap_ratio"],
    }


def with_orjson(path: str) -> dict[str, Any]:
    """Nothing but the tree of Python objects."""
    import gzip

    import orjson

    before, cpu, began = memory_mib("VmRSS"), time.process_time(), time.perf_counter()
    with gzip.open(path) as file:
        events = orjson.loads(file.read())["traceEvents"]
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": memory_mib("VmHWM") - before,
        "events": len(events),
    }


def with_folder(path: str) -> dict[str, Any]:
    """Every trace of a folder, matched across ranks."""
    from aorta.analysis.aggregate import Dataset, aggregate
    from aorta.analysis.traces.run import load_traces

    began = time.perf_counter()
    summary = aggregate(Dataset("traces", load_traces(path)))
    return {"seconds": time.perf_counter() - began, "overlap_ratio": summary["overlap_ratio"]}


WAYS = {"aorta": with_aorta, "orjson": with_orjson, "folder": with_folder}


def best(way: str, path: Path, repeats: int) -> dict[str, Any]:
    """The quickest of some fresh processes; the smallest memory."""
    found = []
    for _ in range(repeats):
        command = [sys.executable, "-m", "benchmarks.kineto_reading", "--way", way, "--path", str(path)]
        found.append(_last_line(command))
    quickest = min(found, key=lambda each: each["seconds"])
    least = {name: min(each[name] for each in found) for name in ("cpu_seconds", "peak_mib") if name in quickest}
    return quickest | least


def _last_line(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def measure(words: argparse.Namespace) -> int:
    """Generate, measure every way, compare."""
    with tempfile.TemporaryDirectory(prefix="aorta-kineto-") as name:
        folder, one_line = Path(name, "traces"), Path(name, "one-line")
        folder.mkdir()
        one_line.mkdir()
        plan = Plan(ranks=words.ranks, megabytes=words.megabytes, steps=words.steps)
        paths = list(write_traces(plan, folder))
        compact = Plan(ranks=1, megabytes=words.megabytes, steps=words.steps, compact=True)
        (line,) = write_traces(compact, one_line)
        ours, tree = best("aorta", paths[0], words.repeats), best("orjson", paths[0], words.repeats)
        compact_ours, compact_tree = best("aorta", line, words.repeats), best("orjson", line, words.repeats)
        figures: dict[str, Any] = {
            "megabytes": words.megabytes,
            "compressed_bytes": paths[0].stat().st_size,
            "aorta": ours,
            "gunzip_and_orjson": tree,
            "one_line": {"aorta": compact_ours, "gunzip_and_orjson": compact_tree},
        }
        targets = {}
        for title, mine, theirs in (("", ours, tree), ("one line: ", compact_ours, compact_tree)):
            times, memory = mine["seconds"] / theirs["seconds"], mine["peak_mib"] / theirs["peak_mib"]
            processor = mine["cpu_seconds"] / theirs["cpu_seconds"]  # other people's load disturbs this one less
            figures |= {f"{title}time_ratio": times, f"{title}cpu_ratio": processor, f"{title}memory_ratio": memory}
            targets[f"{title}time <= {TIME_LIMIT} of gunzip + orjson"] = times <= TIME_LIMIT
            targets[f"{title}memory <= {MEMORY_LIMIT} of gunzip + orjson"] = memory <= MEMORY_LIMIT
        if words.ranks > 1:
            figures["folder"] = {"ranks": words.ranks, **best("folder", folder, 1)}
        if words.hta_python is not None:
            alone = Path(name, "alone")
            alone.mkdir()
            (alone / paths[0].name).hardlink_to(paths[0])
            hta = _last_line([str(words.hta_python), kineto_with_hta.__file__, str(alone)])
            figures |= {"holistic_trace_analysis": hta, "times_as_fast": hta["seconds"] / ours["seconds"]}
            targets[f">= {HTA_FACTOR:.0f} times as fast as HolisticTraceAnalysis"] = (
                figures["times_as_fast"] >= HTA_FACTOR
            )
        else:
            figures["holistic_trace_analysis"] = None
            figures["holistic_trace_analysis_reason"] = "no --hta-python given"
    from benchmarks import plans  # with it comes torch, which the ways must not load

    return plans.say("kineto_reading", figures, targets)


def main() -> int:
    """Be the launcher, or one of the ways in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="traces in the folder, up to 8")
    parser.add_argument("--megabytes", type=float, default=54.0, help="size of a trace's text")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta-python", type=Path, help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.way is not None:
        sys.stdout.write(json.dumps(WAYS[words.way](words.path)) + "\n")
        return 0
    return measure(words)


if __name__ == "__main__":
    raise SystemExit(main())
