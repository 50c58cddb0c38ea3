"""The ring of a rank, and the watchdog that reads those of a host, for as long as a run is recorded.

Must not fail a run: where the file or the process cannot be had, the run goes on without.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from aorta.autopsy.stacks import stacks_on_request
from aorta.config.schema import Watchdog as WatchdogSettings
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.topology import Topology
from aorta.errors import SIGNAL_EXIT_BASE
from aorta.installation import own_environment, own_program
from aorta.instrument.compute_ranges import ModuleHook
from aorta.instrument.transparent import observed_steps
from aorta.recording.meeting import joined
from aorta.records.clocks import boot_id
from aorta.records.files import shared_folder
from aorta.records.progress import (
    PROGRESS_DIR,
    PROGRESS_FILE,
    STACKS_FILE,
    Progress,
    ProgressFacts,
    pid_namespace,
    start_ticks,
)
from aorta.records.ring_file import RingFile

_log = logging.getLogger(__name__)
_started: list[subprocess.Popen[bytes]] = []
"""Watchdogs of this process; each ends by itself, when the last rank of its host has."""


@atexit.register
def _leave() -> None:
    """Keep Python from warning of a watchdog that still runs: it is not waited for, as other ranks may run on."""
    for process in _started:
        process.returncode = process.poll() or 0


@contextmanager
def open_ring(
    folder: RunFolder, topology: Topology, warmup_steps: int, settings: WatchdogSettings
) -> Iterator[RingFile]:
    """Open the rank's ring for the length of a `with` block; local rank 0 starts the watchdog of its host."""
    with ExitStack() as stack:
        directory, ring, meeting = folder.path / PROGRESS_DIR, None, joined.get()
        try:
            shared_folder(directory)
            number = stack.enter_context(stacks_on_request(directory / STACKS_FILE.format(rank=topology.rank)))
            facts = ProgressFacts(
                rank=topology.rank,
                world_size=topology.world_size,
                local_rank=topology.local_rank,
                pid=topology.pid,
                start_ticks=start_ticks(topology.pid),
                pid_namespace=pid_namespace(),
                host=topology.host,
                boot_id=boot_id(),
                run_id=folder.run_id,
                attempt=folder.attempt,
                opened_ns=time.perf_counter_ns(),
                warmup_steps=warmup_steps,
                main_thread=threading.get_ident() if meeting is None else meeting.trains_in,
                stack_signal=number,
                error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
            )
            ring = RingFile.create(directory / PROGRESS_FILE.format(rank=topology.rank), facts)
        except OSError as error:
            why = error.strerror or error
            _log.warning(
                "no watchdog, no autopsy of this rank, and a kill loses its last steps: %s cannot be written (4.5 MB a "
                "rank): %s",
                directory,
                why,
            )
            ring = RingFile.create(None)
        stack.callback(ring.close)
        if topology.local_rank == 0 and settings.timeout_s != 0 and ring.path is not None:
            _start(folder, topology, settings)
        try:
            yield ring
        except BaseException as error:
            code = int(getattr(error, "exit_code", 1))
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            elif isinstance(error, KeyboardInterrupt):
                code = SIGNAL_EXIT_BASE + signal.SIGINT
            ring.progress.end(code)
            raise
        ring.progress.end(0)


@contextmanager
def noted_phases(models: Sequence[nn.Module], progress: Progress) -> Iterator[None]:
    """Note forward and backward passes of `models` and optimizer steps, for the length of a `with` block."""
    if progress.path is None:
        yield
        return

    def enter(phase: str) -> Callable[..., None]:
        def entered(*_: object) -> None:  # a hook's value would replace what it is given
            progress.enter(phase)

        return entered

    backward = enter("backward")

    def watch_output(_module: nn.Module, _inputs: object, output: object) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(backward)  # type: ignore[no-untyped-call]

    hooks = [
        *(model.register_forward_pre_hook(ModuleHook(model, enter("forward"))) for model in models),
        *(model.register_forward_hook(ModuleHook(model, watch_output)) for model in models),
    ]
    del models
    try:
        with observed_steps(enter("optimizer"), enter("step")):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _start(folder: RunFolder, topology: Topology, settings: WatchdogSettings) -> None:
    _started[:] = [process for process in _started if process.poll() is None]
    first = topology.rank
    task = {
        "folder": str(folder.path),
        "run_id": folder.run_id,
        "attempt": folder.attempt,
        "ranks": list(range(first, first + topology.local_world_size)),
        "timeout_s": settings.timeout_s,
        "grace_s": settings.grace_s,
    }
    try:
        # In a session of its own, as launchers end the ranks' whole process groups; without their sockets, which would
        # stay open when a rank dies.
        _started.append(
            subprocess.Popen(
                own_program("aorta.autopsy.watchdog", json.dumps(task)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                close_fds=True,
                env=own_environment(),
            )
        )
    except OSError as error:
        _log.warning("no watchdog: it cannot be started: %s", error.strerror or error)
