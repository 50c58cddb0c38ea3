"""What a report of one small run, and of one small trace, costs from the start of its process: processor time, in turns
with another checkout.

    python -m benchmarks.report_start [--other DIR] [--repeats 10]

The run is `tests/samples/two_gloo_ranks`, the trace that of its rank 0. Compiled bytecode is kept, as after an
installation. Prints one JSON object last: per checkout and source the least and the median user + system seconds, the
modules that a report loads and are not the standard library's, and the load average before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs import ROOT

SAMPLE = ROOT / "tests" / "samples" / "two_gloo_ranks"
SOURCES = {"run": SAMPLE, "trace": SAMPLE / "torch_profiler" / "rank0" / "node0.0.pt.trace.json.gz"}
LOADED = (
    "import sys; from aorta.commands import main; main(); "
    "names = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names; "
    "sys.stderr.write(' '.join(sorted(name for name in names if not name.startswith('_'))))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--repeats", type=int, default=10, metavar="N")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    checkouts = {"this": ROOT} | ({} if options.other is None else {"other": options.other.resolve()})
    took: dict[str, dict[str, list[float]]] = {name: {source: [] for source in SOURCES} for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats + 1):
            for name, checkout in checkouts.items():
                for source, path in SOURCES.items():
                    spent = _report(checkout, path, Path(folder))[0]
                    if repeat:  # the first compiles
                        took[name][source].append(spent)
        said = {source: _report(ROOT, path, Path(folder), LOADED)[1] for source, path in SOURCES.items()}
    loaded = {source: lines.splitlines()[-1].split() for source, lines in said.items()}
    seconds = {
        name: {
            source: {"least_s": round(min(each), 3), "median_s": round(statistics.median(each), 3)}
            for source, each in by_source.items()
        }
        for name, by_source in took.items()
    }
    sys.stdout.write(json.dumps({"processor": seconds, "loads": loaded, "load_average": round(load, 1)}) + "\n")
    return 0


def _report(checkout: Path, source: Path, folder: Path, code: str | None = None) -> tuple[float, str]:
    """Return the processor time of a report, and what it said on stderr."""
    start = ["-m", "aorta"] if code is None else ["-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *start, "report", str(source), "--output", str(folder / "out")],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stderr


if __name__ == "__main__":
    sys.exit(main())
