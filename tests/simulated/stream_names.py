"""The names of `torch.cuda` that are about streams and events.

Must not: be imported before the library is loaded.
"""

from __future__ import annotations

from typing import Any

import torch


def index_of(native: Any, device: Any = None) -> int:
    if device is None:
        return int(native.current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(native.current_device())
    index = torch.device(device).index
    return int(native.current_device()) if index is None else index


def streams(native: Any) -> dict[str, Any]:
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
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

        def elapsed_time(self, end_event: Any) -> float:  # torch's own takes no subclass
            return float(native.elapsed_ms(self.event_id, end_event.event_id))

    def known(index: int, stream_id: int) -> Any:
        return Stream(stream_id=stream_id, device_index=index, device_type=1)

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.device = native.exchange_device(self.stream.device_index)
                self.before = native.exchange_stream(self.stream.device_index, self.stream.stream_id)

        def __exit__(self, *_error: object) -> None:
            if self.stream is not None:
                native.exchange_stream(self.stream.device_index, self.before)
                native.exchange_device(self.device)

    def current_stream(device: Any = None) -> Any:
        index = index_of(native, device)
        return known(index, native.current_stream(index))

    def set_stream(stream: Any) -> None:
        if stream is not None:
            native.exchange_stream(stream.device_index, stream.stream_id)

    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: known(index_of(native, device), 0),
        "set_stream": set_stream,
        "_sleep": lambda cycles: native.sleep(int(cycles)),  # a cycle is a nanosecond
    }
