"""`workload=streams` on two simulated devices, as `train.py` runs it, once for each limit of hardware queues.

Takes a folder and limits; each run's files are in a folder named after its limit. Run by `test_streams_run`.
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
    """One run a limit."""
    folder = Path(sys.argv[1])
    limits = [int(word) for word in sys.argv[2:]]
    simulated.pool_streams(64)
    simulated.costs(launch_ns=0, event_ns=0)
    simulated.real_delays(sleep_ns=0)
    # Everything takes as long as a spin: what a pattern gains then follows from its declaration.
    simulated.lengths(operators={"aten::mm": (KERNEL_NS, 0.0), "memcpy_h2d": (KERNEL_NS, 0.0)})
    simulated.collective_lengths(default=(KERNEL_NS, 0.0))
    for limit in limits:
        simulated.hardware_queues(limit)
        where = f"training.output_dir={folder / str(limit)}"
        words = [
            "workload=streams",
            f"workload.streams={STREAMS[limit]}",
            "workload.repeats=1",
            "training.device=cuda",
            "parallel=none",
            where,
        ]
        try:
            train_command.main(words)
        except SystemExit as ended:
            if ended.code not in (0, None):
                raise


if __name__ == "__main__":
    main()
