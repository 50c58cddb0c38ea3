"""The names of `torch.cuda` and of the process group that a CPU build of torch leaves empty.

Only what programs and torch itself ask of a device is here, and where torch's own Python asks the compiled part, that
alone; what is missing raises where torch's own CPU build would.
Must not: be imported before the library is loaded.
"""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

TOTAL_BYTES = 8 << 30
UNIX_NS = 1_800_000_000_000_000_000
"""The virtual host's clock began here: on all ranks at once, as its other clock."""


def fill_in(native: Any) -> None:
    """Everything, once."""
    names = {**_streams(native), **_devices(native), **_memory(native), **_random(native)}
    # torch.cuda hands on what its inner modules define: both have to say the same.
    inner = (torch.cuda.streams, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs)
    for name, value in names.items():
        setattr(torch.cuda, name, value)
        for module in inner:
            if hasattr(module, name):
                setattr(module, name, value)
    for name, value in _private(native).items():
        setattr(torch._C, name, value)
    torch.cuda._initialized = True
    torch.backends.cuda.is_built = lambda: True
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push = nvtx.range_pop = nvtx.mark = lambda *_words: None
    _storage(native)
    _process_group(native)
    _clock(native)


def index_of(native: Any, device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(native.current_device()) if index is None or index < 0 else int(index)


def _streams(native: Any) -> dict[str, Any]:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
            if known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device=torch.device("cuda", index_of(native, device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return int(native.stream_priority(self.device_index, self.stream_id))

        @classmethod
        def priority_range(cls) -> tuple[int, int]:
            return (0, -3)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, *_words: bool, **_more: bool) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

        def elapsed_time(self, end_event: Any) -> float:  # torch's own takes no subclass
            return float(native.elapsed_ms(self.event_id, end_event.event_id))

    # A cycle is a nanosecond.
    return {"Stream": Stream, "Event": Event, "_sleep": lambda cycles: native.sleep(int(cycles))}


def _devices(native: Any) -> dict[str, Any]:
    def properties(device: Any = None) -> SimpleNamespace:
        index = index_of(native, device)
        bus = {"pci_domain_id": 0, "pci_bus_id": 0, "pci_device_id": index}
        sizes = {"total_memory": TOTAL_BYTES, "multi_processor_count": 1, "major": 9, "minor": 0}
        return SimpleNamespace(name="Simulated", uuid=f"simulated-{index}", gcnArchName="simulated", **bus, **sizes)

    def set_device(device: Any) -> None:
        native.exchange_device(index_of(native, device))
        torch.empty(0, device="cuda")  # until the first tensor `torch.accelerator.synchronize` does not wait

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.device_count,
        "set_device": set_device,
        "_exchange_device": native.exchange_device,
        "_maybe_exchange_device": native.exchange_device,
        "get_device_name": lambda device=None: "Simulated",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_words, **_more: True,
        "can_device_access_peer": lambda device, peer: True,
        "is_current_stream_capturing": native.is_capturing,
    }


def _memory(native: Any) -> dict[str, Any]:
    def stats(device: Any = None) -> dict[str, int]:
        current, highest, allocations = native.memory(index_of(native, device))
        bytes_now = {f"{what}_bytes.all.current": current for what in ("allocated", "reserved")}
        most = {f"{what}_bytes.all.peak": highest for what in ("allocated", "reserved")}
        return bytes_now | most | {"allocation.all.allocated": allocations, "num_alloc_retries": 0, "num_ooms": 0}

    def info(device: Any = None) -> tuple[int, int]:
        return (TOTAL_BYTES - stats(device)["allocated_bytes.all.current"], TOTAL_BYTES)

    return {
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(native, device)),
        "mem_get_info": info,
        "empty_cache": lambda: None,
    }


def _random(native: Any) -> dict[str, Any]:
    def seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.seed(index, int(seed))

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        native.set_generator_state(index_of(native, device), state.cpu())

    return {
        "manual_seed": lambda seed: native.seed(native.current_device(), int(seed)),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device="cuda": native.generator_state(index_of(native, device)),
        "set_rng_state": set_state,
    }


def _private(native: Any) -> dict[str, Any]:
    def current(device: Any) -> tuple[int, int, int]:
        index = index_of(native, device)
        return (native.current_stream(index), index, 1)

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        native.exchange_device(device_index)
        native.exchange_stream(device_index, stream_id)

    warned: list[bool] = []

    def set_sync_debug_mode(mode: int) -> None:
        native.set_sync_debug(mode)
        if mode and not warned:  # once a process and with the mode set, as torch does
            warned.append(True)
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    return {
        "_cuda_isCurrentStreamCapturing": native.is_capturing,
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda device: (0, index_of(native, device), 1),
        "_cuda_getCurrentRawStream": lambda device: native.current_stream(index_of(native, device)),
        "_cuda_setStream": set_stream,
        "_cuda_getDevice": native.current_device,
        "_cuda_setDevice": native.exchange_device,
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_synchronize": lambda: native.synchronize(native.current_device()),
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": native.sync_debug,
    }


def _storage(native: Any) -> None:
    """A CPU build cannot resize a storage of another device: FSDP does."""
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def resized(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        native.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), int(size))
        return self

    storage.resize_ = resized


def _process_group(native: Any) -> None:
    module: Any = distributed_c10d
    package: Any = dist
    module.ProcessGroupNCCL = package.ProcessGroupNCCL = native.ProcessGroupNCCL
    module._NCCL_AVAILABLE = True
    nccl: Any = torch.cuda.nccl
    nccl.version = lambda: (2, 0, 0)
    group: Any = dist.ProcessGroup
    register = group._register_backend

    def registered(self: Any, device: torch.device, kind: Any, backend: Any) -> None:
        if device.type == "cuda" and isinstance(backend, dist.ProcessGroupGloo):
            # Of a kind of its own: a group has one backend of each kind, whatever devices it is for.
            kind, backend = group.BackendType.CUSTOM, native.staged(backend)
        register(self, device, kind, backend)

    group._register_backend = registered


def _clock(native: Any) -> None:
    """The clocks that AORTA and its tests read follow the virtual host; all others stay real."""
    clocks: Any = time
    real = time.clock_gettime_ns
    offsets_ns = {time.CLOCK_MONOTONIC: 0, time.CLOCK_REALTIME: UNIX_NS}
    clocks.perf_counter_ns = native.host_ns
    clocks.clock_gettime_ns = lambda clock: native.host_ns() + offsets_ns[clock] if clock in offsets_ns else real(clock)
