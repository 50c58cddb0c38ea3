"""Run by `test_ranks.py` on two ranks: what a rank finds when it begins. Leaves `FOLDER/RANK.json`.

It ends by `os._exit`: how an interpreter ends is not asked here. With torch 2.13 a process group that is there when
`torch.profiler.profile` first starts is not freed by `destroy_process_group`: gloo's threads still run while the
interpreter ends, and about one launch in a thousand was aborted there ("terminate called without an active exception").
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
MODULES = len(sys.modules)

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.profiler import profile  # noqa: E402

OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "OMP", "MPL")
CHOSEN_ANEW = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)


def is_the_rank_s_own(number: float) -> bool:
    """Whether each rank has another."""
    drawn: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, number)
    return len(set(drawn)) == len(drawn)


def main(folder: str) -> None:
    """Look around, meet the other rank, profile something."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    same = {
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if any(part in name for part in OF_A_LAUNCH) and name not in CHOSEN_ANEW
        },
        "argv": len(sys.argv),
        "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "cwd": str(Path.cwd()),
        "signals": [str(signal.getsignal(number)) for number in SIGNALS],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "switch_interval": sys.getswitchinterval(),
        "hooks": [sys.gettrace() is None, sys.getprofile() is None, threading.active_count(), threads],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
        "grad": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "warnings": sys.warnoptions,
        "leads_its_session": os.getsid(0) == os.getpid(),
    }
    dist.init_process_group("gloo")
    draws = (random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item())
    same["chance"] = [is_the_rank_s_own(number) for number in draws]
    trace = Path(folder, f"{dist.get_rank()}.trace.json")
    with profile(acc_events=True) as profiler:
        dist.all_reduce(torch.ones(4))
    profiler.export_chrome_trace(str(trace))
    rows = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    same["operators"] = sorted({event["name"] for event in rows})
    told = {"same": same, "modules": MODULES, "pid": os.getpid(), "traced": sorted({event["pid"] for event in rows})}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
