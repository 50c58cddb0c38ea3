"""HolisticTraceAnalysis on one folder: `PYTHON kineto_with_hta.py FOLDER`, run by the Python that has it.

It brings a notebook server with it, so it lives in an environment of its own: nothing here may import AORTA. Prints one
JSON object last: seconds, peak memory above that after the imports, and what it measured of each file.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path


def memory_mib(what: str) -> float:
    """Resident memory of this process: `VmRSS` now or `VmHWM` at most, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def main(folder: str) -> None:
    """Measure every trace of the folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import hta
    from hta.trace_analysis import TraceAnalysis

    before, began = memory_mib("VmRSS"), time.perf_counter()
    files = {rank: str(path) for rank, path in enumerate(sorted(Path(folder).glob("*.json.gz")))}
    analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    seconds = time.perf_counter() - began
    columns = {
        "compute_us": "compute_time(us)",
        "idle_us": "idle_time(us)",
        "window_us": "kernel_time(us)",
    }
    measured = {name: breakdown[column].astype(float).tolist() for name, column in columns.items()}
    measured["overlap_percent"] = overlap["comp_comm_overlap_pctg"].tolist()
    sys.stdout.write(
        json.dumps(
            {
                "version": getattr(hta, "__version__", None),
                "seconds": seconds,
                "peak_mib": memory_mib("VmHWM") - before,
                "measured": measured,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
