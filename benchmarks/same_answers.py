"""Do two versions of AORTA give the same `summary.json` for the same inputs?

    python -m benchmarks.same_answers inputs DIR BEFORE     # records of every strategy, traces of every format: once
    python -m benchmarks.same_answers compare DIR BEFORE    # BEFORE: a checkout of the other, older version

`inputs` runs `train.py` of BEFORE for each strategy (two or four CPU processes), so that both versions can read the
records, and writes one trace of each format. `compare`
lets `overlap_report.py` of both checkouts report on each input, alone and against another, and compares value by value:
numbers may differ in the last digits (`RELATIVE`, sums in another order). Prints every difference, then one JSON
object. Exit 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RELATIVE: Final = 1e-12
RUNS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "ddp": (2, ("parallel=ddp",)),
    "ddp_no_overlap": (2, ("parallel=ddp", "parallel.overlap=false")),
    "fsdp": (2, ("parallel=fsdp", "profiling.enabled=true")),
    "fsdp1": (2, ("parallel=fsdp1",)),
    "tp": (2, ("parallel=tp",)),
    "hsdp": (4, ("parallel=hsdp",)),
    "fsdp_tp": (4, ("parallel=fsdp_tp",)),
    "observe": (2, ("parallel=ddp", "instrument.mode=observe")),
    "emulated": (2, ("parallel=ddp", "fabric=emulated")),
    "isolated": (2, ("parallel=ddp", "baseline=true")),
}
PAIRS: Final = (("ddp", "ddp_no_overlap"), ("ddp", "fsdp"), ("fsdp1", "fsdp"), ("ddp", "kineto"), ("set_a", "set_b"))
"""Compared as reference and candidate."""
PATHS: Final = frozenset({"aorta_version"})
"""Keys that may differ."""


def write_inputs(folder: Path, checkout: Path) -> None:
    """Every input below `folder`, recorded by `checkout`; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (ranks, words) in RUNS.items():
        _train(checkout, folder / name, ranks, words)
    for side, words in (("set_a", ()), ("set_b", ("parallel.overlap=false",))):
        for number in range(4):
            _train(checkout, folder / side / f"{number:02}", 2, ("parallel=ddp", "fabric=emulated", *words))
    _write_traces(folder)


def _train(checkout: Path, output: Path, ranks: int, words: tuple[str, ...]) -> None:
    if (output / "run.json").is_file():
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py"]
    command += [f"training.output_dir={output}", "training.max_steps=12", *words]
    subprocess.run(command, cwd=checkout, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


def _write_traces(folder: Path) -> None:
    from benchmarks.kineto_traces import Plan, write_traces
    from tests.read import nsys_files, rocprof_files

    kineto = folder / "kineto"
    kineto.mkdir(exist_ok=True)
    list(write_traces(Plan(ranks=2, megabytes=2, steps=4), kineto))
    rocprof = folder / "rocprofv3_json"
    rocprof.mkdir(exist_ok=True)
    (rocprof / "rank0_results.json").write_text(json.dumps(rocprof_files.as_json()))
    for variant in ("direct", "quoted", "rocm-6.2", "convert"):
        csv = folder / f"rocprofv3_csv_{variant}"
        csv.mkdir(exist_ok=True)
        for name, content in rocprof_files.as_csv(variant).items():
            (csv / name).write_bytes(content)
    for name, write in (("rank0_rocpd.db", rocprof_files.write_rocpd), ("rank0_nsys.sqlite", nsys_files.write_nsys)):
        if not (folder / name).exists():
            write(folder / name)


def cases(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each report."""
    inputs = sorted(path for path in folder.iterdir() if path.suffix not in (".out", ".log"))
    for path in inputs:
        yield path.name, ["--log-dir", str(path), "--label", "one"]
    named = {path.name: path for path in inputs}
    for left, right in PAIRS:
        if left in named and right in named:
            yield (
                f"{left} against {right}",
                [
                    *("--log-dir", str(named[left]), "--label", "left"),
                    *("--log-dir", str(named[right]), "--label", "right"),
                    *("--reference", "left", "--candidate", "right"),
                ],
            )


def report(checkout: Path, words: list[str], output: Path) -> dict[str, Any] | str:
    """`summary.json` of one report by one version, or what it said instead."""
    command = [sys.executable, "analysis/overlap_report.py", *words, "--output", str(output)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    summary = output / "summary.json"
    if not summary.is_file():
        return f"exit {done.returncode}: {done.stderr.strip()}"
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def differences(left: Any, right: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every place where two JSON values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            if key not in PATHS:
                yield from differences(left.get(key, "(absent)"), right.get(key, "(absent)"), f"{at}.{key}")
        if list(left) != list(right) and left.keys() == right.keys():
            yield f"{at} (order of keys)", list(left), list(right)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif isinstance(left, float) and isinstance(right, float):
        if not math.isclose(left, right, rel_tol=RELATIVE, abs_tol=RELATIVE):
            yield at, left, right
    elif left != right:
        yield at, left, right


def compare(folder: Path, before: Path) -> int:
    """Report with both versions, and print what differs."""
    output = folder / "reports.out"
    values = 0
    found: Counter[str] = Counter()
    names = []
    for name, words in cases(folder):
        names.append(name)
        mine, other = (
            report(checkout, words, output / side / name) for side, checkout in (("now", ROOT), ("before", before))
        )
        values += _count(other)
        for at, left, right in differences(other, mine):
            found[at] += 1
            sys.stdout.write(f"{name}: {at}: {str(left)[:100]} -> {str(right)[:100]}\n")
    said = {"inputs": names, "values": values, "differences": sum(found.values()), "keys": sorted(found)}
    sys.stdout.write(json.dumps(said) + "\n")
    return bool(found)


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["inputs", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("before", type=Path)
    options = parser.parse_args()
    if options.what == "inputs":
        write_inputs(options.folder.absolute(), options.before.absolute())
        return 0
    return compare(options.folder.absolute(), options.before.absolute())


if __name__ == "__main__":
    sys.exit(main())
