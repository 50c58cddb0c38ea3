"""Ranks that are forked from a process which has torch and AORTA loaded: a launch without its imports.

For tests of what ranks do. A test of a launch, an ending, a signal, a restart or an exit code wants torchrun. A forked
rank finds what torchrun would show it, but

- it ends by `os._exit`: what `atexit` and the end of the interpreter would do or say is not seen;
- its strings have the same hashes on every rank: an order that depends on them is the same everywhere;
- it imports little: what an import says or costs is not seen;
- the garbage collector leaves alone what it had when it was forked: a full collection over all of torch takes 0.3 s,
  and writes to pages that ranks otherwise share.

Enters: a script or a module, its words, an environment. Leaves: a `subprocess.CompletedProcess`, and no process.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import torch
from torch.distributed import TCPStore

LOADED = (
    "aorta.recording.train",
    "aorta.rpc.rpc_run",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "tqdm",
)
"""What a rank of a training imports, at once or on its way."""
MONITOR_S = 0.1
"""How often torchrun looks at its ranks (`--monitor-interval`): so long the others of a failed one may live."""
GRACE_S = 30.0
"""Between asking ranks to end and ending them; torchrun's."""


def forked(
    target: str | Path,
    *words: str,
    ranks: int,
    environment: Mapping[str, str],
    timeout_s: float,
    launched: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a script (a path) or a module (a name) as `__main__` on each rank; without `launched` on one that does not
    know of a launch, as Python alone would start it.

    Where a rank fails, the others are asked to end. Then `returncode` is the exit code of that rank, and `stderr` says
    which it was. What the ranks said comes as they said it, one among the other.

    Raises:
        subprocess.TimeoutExpired: all ranks were ended after `timeout_s`; with what they said.
    """
    _start_server(environment)
    # The store outlives every rank, as that of torchrun's agent does, and nobody else can take its port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = uuid.uuid4().hex
    places = (
        [{**environment, **_place(rank, ranks, store.port, run)} for rank in range(ranks)]
        if launched
        else [environment]
    )
    failed: int | None = None
    with TemporaryDirectory(prefix="aorta-ranks-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in said:
            path.touch()
        try:
            with _started(target, words, places, said) as processes:
                failed = _first_failure(processes, timeout_s)
                if failed is not None:
                    time.sleep(MONITOR_S)
                    _send(signal.SIGTERM, processes)
                    _wait(processes, GRACE_S)
        except TimeoutError:
            late = subprocess.TimeoutExpired([str(target), *words], timeout_s, *map(_read, said))
            late.add_note(f"{late.output}\n{late.stderr}")
            raise late from None
        codes = [process.exitcode or 0 for process in processes]
        out, err = map(_read, said)
    if failed is not None:
        err += f"\nrank {failed} failed; exit codes by rank: {codes}\n"
    return subprocess.CompletedProcess([str(target), *words], 0 if failed is None else codes[failed], out, err)


def _start_server(environment: Mapping[str, str]) -> None:
    """One for the whole of pytest, in an environment without a launch; it ends with pytest."""
    forkserver.set_forkserver_preload(list(LOADED))
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment, PYTHONPATH=os.pathsep.join(sys.path))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _place(rank: int, ranks: int, port: int, run: str) -> dict[str, str]:
    """The variables that torchrun sets."""
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": run}
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        **dict.fromkeys(("GROUP_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"), "1"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **named,
    }


@contextmanager
def _started(
    target: str | Path, words: Sequence[str], places: Sequence[Mapping[str, str]], said: Sequence[Path]
) -> Iterator[list[ForkServerProcess]]:
    """The ranks, for the length of a `with` block; none lives on."""
    processes: list[ForkServerProcess] = []
    try:
        for rank, place in enumerate(places):
            name = f"rank {rank}"
            process = get_context("forkserver").Process(target=_be, args=(target, words, dict(place), said), name=name)
            process.start()
            processes.append(process)
        yield processes
    finally:
        _send(signal.SIGKILL, processes)
        _wait(processes, GRACE_S)


def _be(target: str | Path, words: Sequence[str], place: Mapping[str, str], said: Sequence[Path]) -> None:
    """In a new process: become the rank."""
    gc.freeze()
    os.setsid()  # what it starts ends with it
    for number, path in enumerate(said, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    # torchrun handles these, so they begin anew in its ranks, also where a shell had them ignored (`nohup`, `&`).
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signal_number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(place)
    # As a process of its own draws them when it imports these (Python does so itself after a fork).
    torch.default_generator.seed()
    numpy.random.seed()
    sys.argv = [str(target), *words]
    if isinstance(target, Path):
        sys.path.insert(0, str(target.parent))
        runpy.run_path(str(target), run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _first_failure(processes: Sequence[ForkServerProcess], timeout_s: float) -> int | None:
    """The rank whose exit code is not 0, as soon as there is one; None when all have ended well."""
    deadline = time.monotonic() + timeout_s
    while True:
        for rank, process in enumerate(processes):
            if process.exitcode:
                return rank
        living = [process.sentinel for process in processes if process.exitcode is None]
        if not living:
            return None
        if not connection.wait(living, max(deadline - time.monotonic(), 0)):
            raise TimeoutError


def _wait(processes: Sequence[ForkServerProcess], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


def _send(number: signal.Signals, processes: Sequence[ForkServerProcess]) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                alone = os.getpgid(process.pid) != process.pid  # it has not come to `setsid` yet
                (os.kill if alone else os.killpg)(process.pid, number)


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
