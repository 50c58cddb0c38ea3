"""What a rank begins with, as `FOLDER/RANK.json` (a program). Run by `test_gate_rules.py` on two ranks."""

from __future__ import annotations

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

OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "OMP", "MPL")
CHOSEN_ANEW = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)


def differs_between_ranks(number: float) -> bool:
    """Whether no two ranks have the same number."""
    drawn: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, number)
    return len(set(drawn)) == len(drawn)


def main(folder: str) -> None:
    """Write the facts that both launchers have to agree on (`same`), and how many modules were loaded before."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    same = {
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if any(part in name for part in OF_A_LAUNCH) and name not in CHOSEN_ANEW
        },
        "argv": len(sys.argv),
        "main": (__name__, sys.modules["__main__"].__dict__ is globals(), str(Path.cwd())),
        "signals": [str(signal.getsignal(number)) for number in SIGNALS],
        "threads": [threading.active_count(), threads],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "leads_its_session": os.getsid(0) == os.getpid(),
    }
    dist.init_process_group("gloo")
    draws = (random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item())
    same["chance"] = [differs_between_ranks(number) for number in draws]
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps({"same": same, "modules": MODULES}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
