"""What `aorta record` costs a program before its first optimizer step: `python -m benchmarks.record_start` prints one
line of JSON.

Regime: `--runs` new processes that import torch and its distributed checkpoints below `aorta record`. `interpreter_ms`
is the time of our sitecustomize, which every Python process pays; `torch_ms` what is added where torch is imported:
AORTA's own imports and patches. Both in processor time of the thread that imports, which other processes on the machine
change least; `target_ms` is for their sum.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from aorta.record_command import _INJECTED
from tests.runs import ROOT, environment

TARGET_MS = 50.0
CHILD = """
import json, sys, time
begin = time.thread_time_ns()
import sitecustomize
interpreter_ns, torch_ns, patch = time.thread_time_ns() - begin, 0, sitecustomize._patch
def timed(module):
    global torch_ns
    begin = time.thread_time_ns()
    patch(module)
    torch_ns += time.thread_time_ns() - begin
sitecustomize._patch = timed
import torch.distributed.checkpoint
assert not sitecustomize._WATCHED
print(json.dumps([interpreter_ns / 1e6, torch_ns / 1e6]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs, load = parser.parse_args().runs, os.getloadavg()[0]
    # Without site's own import of it (-S), so that it can be timed.
    path = os.pathsep.join([_INJECTED, str(ROOT), *(one for one in sys.path if one)])
    own = environment(PYTHONPATH=path, AORTA_RECORD="unused")
    words = [sys.executable, "-S", "-c", CHILD]
    found = [json.loads(subprocess.run(words, env=own, stdout=subprocess.PIPE, check=True).stdout) for _ in range(runs)]
    answer = {
        name: {"median": round(statistics.median(values), 2), "largest": round(max(values), 2)}
        for name, values in zip(("interpreter_ms", "torch_ms"), zip(*found, strict=True), strict=True)
    }
    total = sum(one["median"] for one in answer.values())
    sys.stdout.write(
        json.dumps({**answer, "target_ms": TARGET_MS, "runs": runs, "load_average": round(load, 1)}) + "\n"
    )
    return int(total >= TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
