"""One profiling window on one RPC worker: a profiler that its main thread starts and stops.

It writes a Chrome trace of all threads of this process. Must not be used on a thread of the RPC server: a profiler
started there and stopped elsewhere ends the process (torch 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch.profiler import profile

from aorta.distributed.accelerator import profiled
from aorta.profiling.trace_export import export
from aorta.profiling.window_recording import all_threads
from aorta.records.rpc_files import MEMORY_KEY
from aorta.rpc import call_memory

OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")
"""Settings that the driver chooses for all workers (C6)."""


class WorkerWindow:
    """Start it, let calls happen, stop it.

    Args:
        options: a value for each of `OPTIONS`.
        metadata: further top-level keys of the trace (JSON types).
    """

    def __init__(self, options: Mapping[str, bool], metadata: Mapping[str, Any]) -> None:
        self._metadata, self._memory = metadata, options["profile_memory"]
        chosen: dict[str, Any] = {name: options[name] for name in OPTIONS}
        self._profiler: Any = profile(
            activities=profiled(),
            # Server threads run the called functions: without this none is recorded (torch 2.13: 0 of 44 calls).
            experimental_config=all_threads(),
            acc_events=True,
            **chosen,
        )

    def start(self) -> None:
        """Start recording, on all threads."""
        self._profiler.__enter__()
        for key, value in self._metadata.items():
            self._profiler.add_metadata_json(key, json.dumps(value))
        if self._memory:
            call_memory.open_window()

    def stop(self, path: Path) -> None:
        """Write the trace atomically.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        try:
            if self._memory:
                calls = msgspec.json.encode(call_memory.close_window())
                self._profiler.add_metadata_json(MEMORY_KEY, calls.decode())
        finally:
            self._profiler.__exit__(None, None, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        export(lambda target: self._profiler.export_chrome_trace(str(target)), part)
        part.replace(path)
