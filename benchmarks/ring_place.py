"""What it costs to append rows to a ring, by where its file lies: `python -m benchmarks.ring_place FOLDER ...`.

Regime: a ring of the usual size in each folder (a folder that is named twice has two, which shows the noise). In turns,
in random order, 64 rows, a page, are appended to each from Python, behind work that empties the processor's caches. The
kernel writes pages back meanwhile. Turns in which the thread lost its core are left out.

Prints one JSON object last: microseconds of 64 rows, quantiles, and how often the thread waited for the disk.
"""

from __future__ import annotations

import argparse
import random
import resource
import secrets
import sys
import time
from pathlib import Path

import numpy as np

from aorta.instrument.ring_rows import RingRows
from aorta.records.ring_file import AUX, ROW, RingFile
from benchmarks import plans

PAGE = 4096 // ROW.itemsize
QUANTILES = (50, 90, 99, 99.9)


def main() -> int:
    """Append, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=90)
    words = parser.parse_args()
    places = [
        (f"{folder} {at}", folder / f"ring_{secrets.token_hex(4)}.bin") for at, folder in enumerate(words.folders)
    ]
    rings = {name: RingRows(RingFile.create(path)) for name, path in places}
    for _, path in places:
        path.unlink()
    taken: dict[str, list[int]] = {name: [] for name in rings}
    waited, filling, until_s = dict.fromkeys(rings, 0), np.ones(500_000), time.monotonic() + words.seconds
    while time.monotonic() < until_s:
        for name in random.sample([*rings], len(rings)):
            filling += 1
            before, begin_ns = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter_ns()
            for _ in range(PAGE):
                rings[name].append(AUX)
            end_ns, after = time.perf_counter_ns(), resource.getrusage(resource.RUSAGE_THREAD)
            if after.ru_nivcsw == before.ru_nivcsw:
                taken[name].append(end_ns - begin_ns)
                waited[name] += after.ru_nvcsw > before.ru_nvcsw
        time.sleep(0.01)
    figures = {
        name: {f"p{at:g}_us": round(float(np.percentile(of_one, at)) / 1e3, 1) for at in QUANTILES}
        | {"turns": len(of_one), "waited": waited[name]}
        for name, of_one in taken.items()
    }
    return plans.say("ring_place", figures, {})


if __name__ == "__main__":
    sys.exit(main())
