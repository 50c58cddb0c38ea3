"""`train.py` as it is, on a machine whose launches take so long, at such a time.

Enters: nanoseconds of a launch, of a kernel of a block, and by how much the host's clock is ahead; then the words of
train.py. Leaves: its run folder. Run by `test_host_bound_launches`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch  # noqa: F401 the device comes with it

from tests.device_path.program_host_bound import Load, Machine, begin
from tests.simulated import device as simulated

TRAIN = Path(__file__).resolve().parents[2] / "train.py"

if __name__ == "__main__":
    launch_ns, math_ns, ahead_ns = map(int, sys.argv[1:4])
    sys.argv[1:] = sys.argv[4:]
    simulated.advance_host(ahead_ns)
    begin(Load(launch_ns, math_ns), Machine())
    runpy.run_path(str(TRAIN), run_name="__main__")
