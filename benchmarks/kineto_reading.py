"""Reading traces, beside merely parsing them: `python -m benchmarks.kineto_reading`.

Regime: the same generated run in every layout (`LAYOUTS`: Kineto of several years, with Python stacks and without, as
other tools write its JSON again), gzip, of some 54 MB of text. For each layout, in this one process and in turns,
`--repeats` times: AORTA from the compressed file to classified rows and the metrics of every step and of the whole; and
gunzip and `orjson.loads` of the same file, nothing else. The ratio is that of the least processor times, which other
load on the machine disturbs least. The tables that are read have to be equal, to the last value, in all layouts of one
resolution. Memory is the peak above what the imports take, in a fresh process. With `--ranks N` also a folder of N
traces, one process a file. `--against CHECKOUT`: only the first layout, read by this checkout and by another in turns,
`--repeats` times, each in a fresh process; exit 1 beyond `AGAINST_LIMITS`.

Prints one JSON object last; exit 1 when AORTA takes more than 0.35 of the time of gunzip and orjson (many operators:
0.5) or 0.45 of their memory, or where two layouts give different tables.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from benchmarks.kineto_traces import Plan, write_traces

if TYPE_CHECKING:  # loaded where it is measured
    from aorta.read.traces.tables import TraceTables

ROOT: Final = Path(__file__).resolve().parents[1]
TIME_LIMIT, OPERATORS_TIME_LIMIT, MEMORY_LIMIT = 0.35, 0.5, 0.45
AGAINST_LIMITS: Final = {"cpu_seconds": 1.03, "peak_mib": 1.02}
"""Of another checkout's medians."""
Read = TypeVar("Read")
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "current": {},
    "current, Python stacks": {"stacks": True},
    "2023": {"era": "2023"},
    "2023, Python stacks": {"era": "2023", "stacks": True},
    "2022": {"era": "2022"},
    "2022, spaced line": {"era": "2022", "form": "spaced line"},
    "2022, spaced line, Python stacks": {"era": "2022", "form": "spaced line", "stacks": True},
    "2021": {"era": "2021"},
    "spaced line": {"form": "spaced line"},
    "indented": {"form": "indented"},
    "indented, Python stacks": {"form": "indented", "stacks": True},
    "one line": {"form": "compact line"},
    "one line, Python stacks": {"form": "compact line", "stacks": True},
}
OPERATORS: Final[dict[str, dict[str, Any]]] = {
    "current, many operators": {"operators": 40},
    "current, many operators without shapes": {"operators": 40, "shapes": False},
    "2023, many operators": {"operators": 40, "era": "2023"},
    "2023, many operators without shapes": {"operators": 40, "era": "2023", "shapes": False},
}
"""Few kernels among many operators of many threads, which stand before them: models of small operators."""
_BYTES_A_LAYER: Final = 2650
_BYTES_AN_OPERATOR: Final = {True: 520, False: 210}


def memory_mib(what: str) -> float:
    """Resident memory of this process: `VmRSS` now or `VmHWM` at most, MiB. `getrusage` would give the launcher's: a
    process inherits its maximum when it starts another program.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise ValueError(what)


def scanned(path: str) -> list[TraceTables]:
    """From the file to the metrics of its windows."""
    from aorta.read.traces.files import TraceFiles
    from aorta.read.traces.tables import read_trace_tables

    return read_trace_tables(TraceFiles((path,), "kineto"))


def parsed(path: str) -> Any:
    """Nothing but the tree of Python objects."""
    import orjson

    with gzip.open(path) as file:
        return orjson.loads(file.read())


def table_of(path: str) -> str:
    """A digest of all that was read of the intervals and steps of a trace."""
    import numpy as np

    from aorta.read.traces.files import TraceFiles, read_unit

    digest = hashlib.sha256()
    for trace in read_unit(TraceFiles((path,), "kineto")):
        table = trace.intervals
        for _, column in sorted(vars(table).items()):
            if isinstance(column, np.ndarray):
                digest.update(column.tobytes())
        digest.update(repr((table.names, table.groups, table.dtypes)).encode())
        digest.update(trace.windows.start_ns.tobytes() + trace.windows.end_ns.tobytes() + trace.windows.step.tobytes())
    return digest.hexdigest()


def with_aorta(path: str) -> dict[str, Any]:
    """What reading takes, in a process of its own."""
    from aorta.read.traces import tables as trace_tables  # noqa: F401  not part of what is measured

    def figures(traces: list[TraceTables]) -> dict[str, Any]:
        (trace,) = traces
        return {
            "rows": trace.facts.counters["rows"],
            "steps": trace.facts.steps,
            "overlap_ratio": trace.devices[0].whole["metrics"]["overlap_ratio"],
        }

    return _taken(scanned, path, figures)


def with_orjson(path: str) -> dict[str, Any]:
    """What parsing takes, in a process of its own."""
    import orjson  # noqa: F401

    return _taken(parsed, path, lambda _: {})


def _taken(way: Callable[[str], Read], path: str, figures: Callable[[Read], dict[str, Any]]) -> dict[str, Any]:
    before, cpu, began = memory_mib("VmRSS"), time.process_time(), time.perf_counter()
    found = way(path)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": memory_mib("VmHWM") - before,
        **figures(found),
    }


def with_folder(path: str) -> dict[str, Any]:
    """Every trace of a folder, matched across ranks."""
    from aorta.analysis.aggregate import LabelledRun, aggregate
    from aorta.read.traces.load import load_traces

    began = time.perf_counter()
    summary = aggregate(LabelledRun("traces", load_traces(path)))
    return {"seconds": time.perf_counter() - began, "overlap_ratio": summary.overlap_ratio}


WAYS = {"aorta": with_aorta, "orjson": with_orjson, "folder": with_folder}


def generated(words: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Each layout, its file, and the resolution of its times in ns (0: not compared with others)."""
    layers = max(int(words.megabytes * 1e6 / words.steps / _BYTES_A_LAYER), 1)
    plan = Plan(ranks=8, steps=words.steps, layers=layers)
    for name, what in LAYOUTS.items():
        laid_out = replace(plan, **what)
        yield name, _kineto(laid_out, folder / name), laid_out.unit_ns
    for name, what in OPERATORS.items():
        fewer = max(
            layers
            * _BYTES_A_LAYER
            // (_BYTES_A_LAYER + what["operators"] * _BYTES_AN_OPERATOR[what.get("shapes", True)]),
            1,
        )
        yield name, _kineto(replace(plan, layers=fewer, **what), folder / name), 0
    yield "current, whole microseconds", _kineto(replace(plan, whole_microseconds=True), folder / "whole"), 1000


def _kineto(plan: Plan, folder: Path) -> Path:
    folder.mkdir()
    return next(write_traces(plan, folder))


def in_turns(path: Path, repeats: int) -> dict[str, float]:
    """Least processor seconds of either way."""
    taken: dict[str, list[float]] = {"aorta": [], "orjson": []}
    for _ in range(repeats):
        for name, way in (("aorta", scanned), ("orjson", parsed)):
            began = time.process_time()
            found = way(str(path))
            taken[name].append(time.process_time() - began)
            del found
    return {name: min(seconds) for name, seconds in taken.items()}


def in_fresh_process(way: str, path: Path, checkout: Path = ROOT) -> dict[str, Any]:
    """One way, alone, as `checkout` has it."""
    command = [sys.executable, "-m", __spec__.name, "--way", way, "--path", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=checkout, env=environment)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def against(words: argparse.Namespace) -> int:
    """Print the medians of processor time and peak memory of this checkout and another, and this over the other."""
    seen: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    with tempfile.TemporaryDirectory(prefix="aorta-reading-") as name:
        _, path, _ = next(generated(words, Path(name)))
        for turn in range(words.repeats):
            sides = [("other", words.against.resolve()), ("this", ROOT)]
            for side, checkout in sides if turn % 2 == 0 else sides[::-1]:
                seen[side].append(in_fresh_process("aorta", path, checkout))
    figures: dict[str, Any] = {"megabytes": words.megabytes, "repeats": words.repeats}
    targets: dict[str, bool] = {}
    for figure, limit in AGAINST_LIMITS.items():
        middle = {side: statistics.median(each[figure] for each in found) for side, found in seen.items()}
        ratio = middle["this"] / middle["other"]
        figures[figure] = {**middle, "ratio": ratio}
        targets[f"{figure} <= {limit} of the other's"] = ratio <= limit
    from benchmarks import plans  # with it comes torch

    return plans.say("kineto_reading", figures, targets)


def measure(words: argparse.Namespace) -> int:
    """Generate, measure every layout, compare."""
    layouts: dict[str, dict[str, Any]] = {}
    tables: dict[int, set[str]] = {}
    targets: dict[str, bool] = {}
    figures: dict[str, Any] = {"megabytes": words.megabytes, "layouts": layouts}
    with tempfile.TemporaryDirectory(prefix="aorta-reading-") as name:
        folder = Path(name)
        for layout, path, unit_ns in generated(words, folder):
            if unit_ns:
                tables.setdefault(unit_ns, set()).add(table_of(str(path)))
            taken = in_turns(path, words.repeats)
            memory = {way: in_fresh_process(way, path)["peak_mib"] for way in ("aorta", "orjson")}
            found = {"ratio": taken["aorta"] / taken["orjson"], "memory_ratio": memory["aorta"] / memory["orjson"]}
            layouts[layout] = {**found, "cpu_seconds": taken, "peak_mib": memory}
            sys.stderr.write(f"{layout}: {found['ratio']:.3f} of the time, {found['memory_ratio']:.3f} of the memory\n")
            limit = OPERATORS_TIME_LIMIT if layout in OPERATORS else TIME_LIMIT
            targets[f"{layout}: time <= {limit} of gunzip + orjson"] = found["ratio"] <= limit
            targets[f"{layout}: memory <= {MEMORY_LIMIT} of gunzip + orjson"] = found["memory_ratio"] <= MEMORY_LIMIT
            path.unlink()
        targets["every layout of one resolution gives the same table"] = all(len(each) == 1 for each in tables.values())
        if words.ranks > 1:
            (folder / "ranks").mkdir()
            list(write_traces(Plan(ranks=words.ranks, megabytes=words.megabytes, steps=words.steps), folder / "ranks"))
            figures["folder"] = {"ranks": words.ranks, **in_fresh_process("folder", folder / "ranks")}
    from benchmarks import plans  # with it comes torch, which the ways must not load

    return plans.say("kineto_reading", figures, targets)


def main() -> int:
    """Be the launcher, or one of the ways in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="traces in the folder, up to 8")
    parser.add_argument("--megabytes", type=float, default=54.0, help="size of a trace's text")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="only: the first layout, in turns with another"
    )
    words = parser.parse_args()
    if words.way is not None:
        sys.stdout.write(json.dumps(WAYS[words.way](words.path)) + "\n")
        return 0
    return measure(words) if words.against is None else against(words)


if __name__ == "__main__":
    raise SystemExit(main())
