"""One profiling window on one RPC worker: a profiler that its main thread starts and stops.

It writes a Chrome trace of all threads of this process. Must not be used on a thread of the RPC server: a profiler
started there and stopped elsewhere ends the process (torch 2.13).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from aorta.distributed.accelerator import profiled

OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")
"""Settings that the driver chooses for all workers (C6)."""


class WorkerWindow:
    """Start it, let calls happen, stop it; the trace names the worker and the window."""

    def __init__(self, options: dict[str, bool], worker: dict[str, Any]) -> None:
        self._worker = worker
        self._profiler: Any = profile(
            activities=profiled(),
            # Server threads run the called functions: without this none is recorded (torch 2.13: 0 of 44 calls).
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
            acc_events=True,
            record_shapes=options["record_shapes"],
            profile_memory=options["profile_memory"],
            with_stack=options["with_stack"],
            with_flops=options["with_flops"],
        )

    def start(self) -> None:
        """Start recording, on all threads."""
        self._profiler.__enter__()
        self._profiler.add_metadata_json("rpcWorker", json.dumps(self._worker))

    def stop(self, path: Path) -> None:
        """Write the trace atomically."""
        self._profiler.__exit__(None, None, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part.json")
        self._profiler.export_chrome_trace(str(part))
        part.replace(path)
