"""`workload=streams` on two simulated devices, as `train.py` runs it, with a limit of hardware queues.

Takes a folder for the run's files, and the limit. Run by `test_streams_run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch  # noqa: F401 the simulated device comes with it

from aorta import train_command
from tests.simulated import device as simulated

KERNEL_NS = 100_000
STREAMS = {4: "[1,2,4,8,64]", 8: "[1,2,4,8,16]"}
"""By limit of hardware queues."""


def main() -> None:
    """One run."""
    folder, limit = Path(sys.argv[1]), int(sys.argv[2])
    simulated.pool_streams(64)
    simulated.costs(launch_ns=0, event_ns=0)
    simulated.real_delays(sleep_ns=0)
    # Everything takes as long as a spin: what a pattern gains then follows from its declaration.
    simulated.lengths(operators={"aten::mm": (KERNEL_NS, 0.0), "memcpy_h2d": (KERNEL_NS, 0.0)})
    simulated.collective_lengths(default=(KERNEL_NS, 0.0))
    simulated.hardware_queues(limit)
    # In virtual time every repetition of a point is as long as the first.
    where = (f"training.output_dir={folder}", f"workload.streams={STREAMS[limit]}", "workload.repeats=1")
    sys.exit(train_command.main(["workload=streams", "training.device=cuda", "parallel=none", *where]))


if __name__ == "__main__":
    main()
