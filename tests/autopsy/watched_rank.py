"""A rank without torch: notes steps in its ring, and then does what its third argument says.

python -m tests.autopsy.watched_rank FOLDER RANK FATE
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from msgspec import structs

from aorta.autopsy.stacks import stacks_on_request
from aorta.records.clocks import boot_id
from aorta.records.progress import Progress, ProgressFacts
from aorta.records.ring_file import RingFile
from tests.records.test_progress import facts as of_a_process

STEPS = 10
WORLD_SIZE = 2


def main(folder: Path, rank: int, fate: str) -> None:
    """Ten steps, the fate of this rank in the middle of the last, or its end in order."""
    with stacks_on_request(folder / f"rank_{rank}.stacks") as number:
        ring = RingFile.create(folder / f"rank_{rank}.bin", facts(rank, number))
        while len(list(folder.glob("rank_*.bin"))) < WORLD_SIZE:  # a fate that ends a rank is for a job that has begun
            time.sleep(0.01)
        for step in range(STEPS):
            ring.progress.begin_step(step)
            time.sleep(0.02)
            if step == STEPS - 1:
                ring.progress.enter("forward")
                meet(ring.progress, fate, folder.parent / "autopsy" / "autopsy.json")
            ring.progress.end_step()
        ring.progress.end(0)
        ring.close()


def facts(rank: int, stack_signal: int | None) -> ProgressFacts:
    here = structs.replace(of_a_process(rank), host=socket.gethostname(), boot_id=boot_id(), warmup_steps=2)
    return structs.replace(here, main_thread=threading.get_ident(), stack_signal=stack_signal)


def meet(progress: Progress, fate: str, report: Path) -> None:
    match fate:
        case "sleep":
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "work":  # in two threads, whose frames come and go
            threading.Thread(target=work, name="worker", daemon=True).start()
            work()
        case "lock":  # a deadlock in compiled code that holds the interpreter lock, which no signal ends
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        case "go_on":  # once it was reported
            while not report.exists():
                time.sleep(0.1)


def work() -> None:
    while True:
        names: dict[str, Any] = {}
        exec(compile("def deep(n): return n and deep(n - 1)\ndef lazy(n): yield deep(n)", "work.py", "exec"), names)
        for _ in range(20):
            list(names["lazy"](50))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
