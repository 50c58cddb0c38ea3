"""`rocm-smi`, sampled in the background of an AMD run.

Leaves: the newest sample, for the record to pick up once. Must not: run a subprocess on the training thread, or start
one per step: `rocm-smi` takes tenths of a second and would be measured along with everything else.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from types import TracebackType
from typing import Any, Self

COMMAND = ("rocm-smi", "--showtemp", "--showuse", "--showpower", "--showmemuse")
_TIMEOUT_S = 20.0


class RocmSmiSampler:
    """A thread that runs `rocm-smi` every `interval_s` seconds, for the length of a `with` block."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._newest: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="aorta-rocm-smi", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=_TIMEOUT_S)

    def take(self) -> dict[str, Any]:
        """The newest sample, as fields of a step; empty if it was taken already."""
        with self._lock:
            newest, self._newest = self._newest, {}
        return newest

    def _sample(self) -> None:
        while not self._stop.is_set():
            sample = read_rocm_smi()
            with self._lock:
                self._newest = sample
            self._stop.wait(self._interval_s)


def read_rocm_smi() -> dict[str, Any]:
    """Run it once: the `rocm_smi_*` fields of a step, with what it printed or why it could not be run."""
    now_ns = time.time_ns()
    if shutil.which(COMMAND[0]) is None:
        return {"rocm_smi_t_ns": now_ns, "rocm_smi_error": "rocm-smi not available"}
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return {"rocm_smi_t_ns": now_ns, "rocm_smi_error": f"rocm-smi failed: {problem}"}
    return {
        "rocm_smi_t_ns": now_ns,
        "rocm_smi_output": done.stdout,
        "rocm_smi_exit_code": done.returncode,
        "rocm_smi_stderr": done.stderr,
    }
