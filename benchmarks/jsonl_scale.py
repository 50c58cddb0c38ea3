"""A thousand ranks in one report: `python -m benchmarks.jsonl_scale [--small]`.

Regime: records of a data-parallel run, written through `aorta.records` by as many processes as there are cores: per
step 10 all-reduces, 24 compute ranges, the segments and metrics that `aorta.timeline` makes of them: 3.7 kB a line.
Full size: 1,024 ranks x 1,000 steps, 3.8 GB in a temporary folder; `--small`: 64 ranks x 252 steps, less than a minute.
Every figure comes from a process of its own, with everything it imports, and with the same number of processes (one a
core):

- `parse`: every line through `msgspec.json.decode` and thrown away;
- `read`: records -> columns (`load_run`); `steps`: that and every metric of the steps; `across`: that and all
  that needs matching across ranks (transfer, wait, arrival skew, bandwidth, stragglers).

Seconds are wall time; `cpu_` is processor time of the whole tree, which says more on a machine that is shared. Peak
memory is the sum over the process tree of the proportional set size (pages shared count once), sampled.
`--against CHECKOUT` does nothing but `aorta report`, end to end, in turns with the AORTA of another checkout.
`--repeat` takes the least of several times: on a shared machine the least is the least disturbed.

Prints one JSON object last. `ok` holds the targets: `steps` <= 2 x parse and `across` <= 3 x parse, peak memory
< 1.5 GiB, twice the ranks in <= 2.1 x the processor time. Exit 1 when one is missed at full size; times of `--small`
are too short to judge, and are only said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from aorta.read.engines import cores
from aorta.records.record_file import RecordWriter
from aorta.records.schema import ActiveSegment, Collective, ComputeRange, Coverage, Stall, Step
from tests.analysis.builders import footer, header, step
from tests.windows import measure_window

ROOT = Path(__file__).resolve().parents[1]
MS = 1_000_000
LAYERS = 12
BYTES = 25_000_000
TEMPLATES = 16
MEMORY_LIMIT = 1.5 * 2**30


def template(ranks: int, collectives: int, rng: np.random.Generator) -> Step:
    """A step of a pipeline: forward, then backward with an all-reduce behind each block."""
    now, link = MS, 0
    compute, comm, intervals = [], [], []
    for block in range(LAYERS):
        length = int(rng.integers(MS, 2 * MS))
        compute.append(ComputeRange(f"layers.{block}", "forward", now, now + length))
        now += length + 5_000
    for block in range(LAYERS):
        length = int(rng.integers(2 * MS, 3 * MS))
        compute.append(ComputeRange(f"layers.{LAYERS - 1 - block}", "backward", now, now + length))
        now += length
        for _ in range(collectives * (block + 1) // LAYERS - collectives * block // LAYERS):
            begin = max(now, link)
            link = begin + int(rng.integers(2 * MS, 3 * MS))
            comm.append(Collective("allreduce", "world", 0, BYTES, "bfloat16", now, begin, link, "event"))
            intervals.append((begin, link))
    stalls = [Stall(now, link)] if link > now else []
    now = max(now, link)
    measured = measure_window(
        (0, now + 2 * MS),
        compute=[(part.start_ns, part.end_ns) for part in compute],
        comm={"allreduce": intervals},
        stalls=[(part.start_ns, part.end_ns) for part in stalls],
        aux=[(now, now + MS)],
    )
    values, reasons = measured.metrics()
    return step(
        0,
        ranks,
        overlap=values,
        reasons=reasons,
        per_stream_ms=measured.per_stream_ms(),
        coverage=Coverage(collectives, collectives, True),
        active_segments=[ActiveSegment(*tile) for tile in measured.tiles],
        collectives=comm,
        compute=compute,
        stalls=stalls,
    )


def write_record(folder: Path, ranks: int, steps: int, collectives: int, rank: int) -> int:
    """One record; returns its bytes. Ends are those of the template, starts differ by up to 1 ms from rank to rank."""
    shared, own = np.random.default_rng(0), np.random.default_rng(rank + 1)
    templates = [template(ranks, collectives, shared) for _ in range(TEMPLATES)]
    late = own.integers(0, MS, (steps, collectives)).tolist()
    path = folder / f"rank_{rank}_metrics.jsonl"
    with RecordWriter(path, rank) as writer:
        writer.write(header(rank, ranks, run_id="scale", label="scale", warmup_steps=5, platform="cuda"))
        for number in range(steps):
            base = templates[number % TEMPLATES]
            rows = [
                Collective(
                    *("allreduce", "world", number * collectives + place, BYTES, "bfloat16"),
                    *(row.issue_ns, row.start_ns + lag, row.end_ns, "event"),
                )
                for place, (row, lag) in enumerate(zip(base.collectives, late[number], strict=True))
            ]
            start = 10**9 + number * 10**8
            writer.write(
                msgspec.structs.replace(
                    base,
                    rank=rank,
                    step=number,
                    global_step=number,
                    warmup=number < 5,
                    loss=2 / (number + 1),
                    start_mono_ns=start,
                    end_mono_ns=start + base.end_mono_ns - base.start_mono_ns,
                    t_start_ns=1_700_000_000_000_000_000 + start,
                    t_end_ns=1_700_000_000_000_000_000 + start + base.end_mono_ns - base.start_mono_ns,
                    collectives=rows,
                )
            )
        writer.write(footer(steps, ranks))
    return path.stat().st_size


def generate(folder: Path, ranks: int, steps: int, collectives: int) -> int:
    """A run folder; returns its bytes."""
    folder.mkdir(parents=True)
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        return sum(pool.map(partial(write_record, folder, ranks, steps, collectives), range(ranks), chunksize=4))


def parse_file(path: Path) -> int:
    """Every line of one file, thrown away."""
    with path.open("rb") as file:
        return sum(msgspec.json.decode(line) is not None for line in file)


def child(what: str, folder: Path) -> dict[str, float]:
    """One figure, in this process: seconds up to each stage."""
    begin = time.perf_counter()
    if what == "parse":
        files = sorted(folder.glob("rank_*.jsonl"))
        with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
            lines = sum(pool.map(parse_file, files))
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds(), "lines": lines}
    from aorta.analysis.aggregate import LabelledRun, aggregate
    from aorta.read.engines import Local
    from aorta.read.record import load_run

    marks: dict[str, float] = {}

    def mark(stage: str) -> None:
        marks[stage] = time.perf_counter() - begin
        marks[f"cpu_{stage}"] = cpu_seconds()

    dataset = LabelledRun("scale", load_run(folder, Local(cores())))
    mark("read")
    entry = aggregate(dataset, matched=False)
    mark("steps")
    across = dataset.collectives
    mark("across")
    assert across.collectives[0].transfer_ms.count
    return {**marks, "rank_steps": entry.count}


def cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    return sum(os.times()[:4])


def measure(what: str, folder: Path) -> dict[str, float]:
    """Run `child` in a process of its own; adds the peak memory of its tree, bytes."""
    words = [sys.executable, "-m", "benchmarks.jsonl_scale", "--child", what, "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)}
    output, peak_bytes, _ = run_tree(words, environment)
    return {**json.loads(output.splitlines()[-1]), "peak_bytes": peak_bytes}


def run_tree(words: list[str], environment: dict[str, str]) -> tuple[str, int, float]:
    """Run a command; returns its output, the peak memory of its process tree in bytes, and its processor seconds."""
    begun = sum(os.times()[2:4])
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], tree_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    return output, peak[0], sum(os.times()[2:4]) - begun


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and everything below it."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it ended
        total += next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total


def best(what: str, folder: Path, repeat: int) -> dict[str, float]:
    """The least of each figure but memory, of which the largest counts."""
    runs = [measure(what, folder) for _ in range(repeat)]
    return {name: (max if name == "peak_bytes" else min)(run[name] for run in runs) for name in runs[0]}


def against(words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`aorta report` of one run, page and pictures included, with this checkout and another in turns: least processor
    seconds and largest peak memory of each, and this over the other.
    """
    run = folder / "run"
    size = generate(run, words.ranks, words.steps, words.collectives)
    seen: dict[str, list[tuple[float, int]]] = {"other": [], "this": []}
    for _ in range(words.repeat):
        for name, checkout in (("other", words.against.resolve()), ("this", ROOT)):
            environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "aorta", "report", str(run), "--output", str(folder / name)]
            _, peak_bytes, cpu_s = run_tree(command, environment)
            seen[name].append((cpu_s, peak_bytes))
            shutil.rmtree(folder / name)
    least = {name: min(cpu_s for cpu_s, _ in runs) for name, runs in seen.items()}
    most = {name: max(peak for _, peak in runs) for name, runs in seen.items()}
    return {
        "ranks": words.ranks,
        "steps": words.steps,
        "bytes": size,
        "repeat": words.repeat,
        "cpu_seconds": least,
        "peak_bytes": most,
        "cpu_ratio": least["this"] / least["other"],
        "peak_ratio": most["this"] / most["other"],
    }


def compare(words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Generate, measure, relate."""
    figures: dict[str, Any] = {"ranks": words.ranks, "steps": words.steps, "collectives": words.collectives}
    figures |= {"processes": cores(), "repeat": words.repeat, "bytes": {}}
    seen: dict[str, dict[str, float]] = {}
    for name, ranks in (("half_ranks", words.ranks // 2), ("full", words.ranks)):
        place = folder / name
        size = figures["bytes"][name] = generate(place, ranks, words.steps, words.collectives)
        sys.stderr.write(f"{name}: {ranks} ranks x {words.steps} steps, {size / 1e6:.0f} MB\n")
        seen[name] = best("across", place, words.repeat)
        if name == "full":
            seen["parse"] = best("parse", place, words.repeat)
        shutil.rmtree(place)
    full, half, parse = seen["full"], seen["half_ranks"], seen["parse"]
    stages = ("read", "steps", "across")
    return {
        **figures,
        **seen,
        "ratio_to_parse": {stage: full[stage] / parse["seconds"] for stage in stages},
        "cpu_ratio_to_parse": {stage: full[f"cpu_{stage}"] / parse["cpu_seconds"] for stage in stages},
        "peak_bytes_to_parse": full["peak_bytes"] / parse["peak_bytes"],
        "time_growth_2x_ranks": full["across"] / half["across"],
        "cpu_growth_2x_ranks": full["cpu_across"] / half["cpu_across"],
    }


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="64 ranks x 250 steps")
    parser.add_argument("--ranks", type=int, default=64 if "--small" in sys.argv else 1024)
    parser.add_argument("--steps", type=int, default=252 if "--small" in sys.argv else 1000)
    parser.add_argument("--collectives", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder, removed afterwards")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="only: `aorta report`, in turns with another")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        sys.stdout.write(json.dumps(child(words.child, words.folder)) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="aorta-scale-", dir=words.folder) as folder:
        if words.against:
            sys.stdout.write(json.dumps({"benchmark": "jsonl_scale", **against(words, Path(folder))}) + "\n")
            return 0
        found = compare(words, Path(folder))
    ok = {
        "steps <= 2 x parse": found["ratio_to_parse"]["steps"] <= 2,
        "across <= 3 x parse": found["ratio_to_parse"]["across"] <= 3,
        "peak < 1.5 GiB": found["full"]["peak_bytes"] < MEMORY_LIMIT,
        "2 x ranks <= 2.1 x processor time": found["cpu_growth_2x_ranks"] <= 2.1,
    }
    sys.stdout.write(json.dumps({"benchmark": "jsonl_scale", **found, "ok": ok}) + "\n")
    return 0 if words.small or all(ok.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
