"""What a process has spent so far, of all threads: processor time, and instructions where the kernel counts them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from typing import Final

_SYSCALL: Final = {"x86_64": 298, "aarch64": 241}  # perf_event_open, from each architecture's table of system calls
_TYPE_HARDWARE, _INSTRUCTIONS = 0, 1  # linux/perf_event.h
_SIZE: Final = 64  # of perf_event_attr's first version
_INHERIT, _EXCLUDE_HV = 1 << 1, 1 << 6
"""Threads made later are counted too; the hypervisor is not."""


class Counters:
    """Nanoseconds of the processor, and instructions. Made before the process has other threads.

    Args:
        kind: type and config of perf_event_open's event, for another than instructions.
    """

    def __init__(self, kind: tuple[int, int] = (_TYPE_HARDWARE, _INSTRUCTIONS)) -> None:
        self._file, self.why_not = -1, f"no perf_event_open known on {platform.machine()}"
        if platform.machine() in _SYSCALL:
            attributes = struct.pack("IIQQQQQQQ", kind[0], _SIZE, kind[1], 0, 0, 0, _INHERIT | _EXCLUDE_HV, 0, 0)
            libc = ctypes.CDLL(None, use_errno=True)
            call = (_SYSCALL[platform.machine()], ctypes.create_string_buffer(attributes), 0, -1, -1, 0)
            self._file = int(libc.syscall(*call))
            self.why_not = "" if self._file >= 0 else f"perf_event_open: {os.strerror(ctypes.get_errno())}"

    def read(self) -> tuple[int, int]:
        """Processor nanoseconds and instructions of this process so far; -1 where those are not counted."""
        counted = -1 if self._file < 0 else int.from_bytes(os.read(self._file, 8), "little")
        return time.process_time_ns(), counted
