"""One rank of the check, started by torchrun: its checks for races, and the findings of all ranks as one table.

Arguments are the report's path, the strategies, the number of compared pairs of blocks, how many ranks share a device,
and overrides of train.py. Rank
0 prints every row of every rank and writes the report. Exits with 0 once that is done: findings are in the report.

A check for races on tensors and their lifetime (docs/dev/measuring.md, K7) returns whether the values were right. Its
collectives are an all-gather and a reduce-scatter into another tensor: with one rank they copy, so a copy made too
early, or of memory that was freed, shows in the result. (An all-reduce of one rank moves nothing.) Every rank of the
default group must run the same check. Must not decide what a row says.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from aorta.command_line import command, to_stdout
from aorta.config.fabric import emulated_ranks
from aorta.config.schema import Config, EmulatedFabric
from aorta.distributed import cuda
from aorta.distributed.environment_checks import one_connection, setting_warnings, streams_used
from aorta.distributed.topology import (
    device_name,
    platform_of,
    process_group,
    read_topology,
    select_device,
    share_device,
)
from aorta.errors import EXIT_OK
from aorta.gpu_check.case import PAIRS, StrategyCheck, chosen
from aorta.gpu_check.check_table import CheckReport, CheckRow, CheckVerdict, render, report_of
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import emulated_ranks as backend_of_ranks
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.files import write_whole
from aorta.records.schema import Platform
from aorta.runner.train_step import resolved

SLEEP_CYCLES = 50_000_000
"""Tens of milliseconds on any card: far longer than the host needs to issue everything below."""
ELEMENTS = 1 << 22
_LIMIT_S = 300


class Handle(Protocol):
    """Something that a caller waits for: the caller's stream then waits, not the host."""

    def wait(self) -> object: ...


Call = Callable[[torch.Tensor, torch.Tensor, bool], dist.Work | None]
"""Result, source, whether asynchronous."""


@dataclass(frozen=True)
class Kind:
    """A collective from one tensor into another, and its result for equal values on `n` ranks.

    Attributes:
        issue: its return value has to be waited for; None: a synchronous call, with nothing to wait for.
    """

    issue: Callable[[torch.Tensor, torch.Tensor], Handle | None]
    result_elements: Callable[[int], int]
    result_value: Callable[[float, int], float]

    def result(self, device: torch.device) -> torch.Tensor:
        return torch.full((self.result_elements(dist.get_world_size()),), -1.0, device=device)

    def is_right(self, result: torch.Tensor, value: float) -> bool:
        return bool((result == self.result_value(value, dist.get_world_size())).all().item())


class _Event:
    """Waits for a collective on another stream as FSDP does: through an event of that stream."""

    def __init__(self, stream: torch.Stream) -> None:
        self._event = torch.Event(device=stream.device)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait(torch.accelerator.current_stream(self._event.device))


@cache
def _own_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _on_its_own_stream(call: Call) -> Callable[[torch.Tensor, torch.Tensor], Handle | None]:
    def issue(result: torch.Tensor, source: torch.Tensor) -> Handle:
        own = _own_stream(result.device)
        own.wait_stream(torch.accelerator.current_stream(result.device))
        with own:
            call(result, source, False)
        for tensor in (result, source):
            tensor.record_stream(own)
        return _Event(own)

    return issue


_CALLS: dict[str, tuple[Call, Callable[[int], int], Callable[[float, int], float]]] = {
    "all_gather": (
        lambda result, source, asynchronous: dist.all_gather_into_tensor(result, source, async_op=asynchronous),
        lambda n: ELEMENTS * n,
        lambda value, _n: value,
    ),
    "reduce_scatter": (
        lambda result, source, asynchronous: dist.reduce_scatter_tensor(
            result, source[: result.numel() * dist.get_world_size()], async_op=asynchronous
        ),
        lambda n: ELEMENTS // n,
        lambda value, n: value * n,
    ),
}
_WAYS: dict[str, Callable[[Call], Callable[[torch.Tensor, torch.Tensor], Handle | None]]] = {
    "": lambda call: lambda result, source: call(result, source, True),
    ", synchronous": lambda call: lambda result, source: call(result, source, False),
    ", synchronous on its own stream": _on_its_own_stream,
}
KINDS = {
    f"{name}{way}": Kind(issued(call), elements, value)
    for name, (call, elements, value) in _CALLS.items()
    for way, issued in _WAYS.items()
}


def slow_producer(kind: Kind, device: torch.device) -> bool:
    """Check that a collective waits for its input, which is written after a long kernel (W2)."""
    source = torch.zeros(ELEMENTS, device=device)
    result = kind.result(device)
    torch.accelerator.synchronize()
    cuda.spin(SLEEP_CYCLES)
    source.fill_(3)
    _wait(kind.issue(result, source))
    return kind.is_right(result, 3)


def late_consumer(kind: Kind, device: torch.device, busy: torch.Stream) -> bool:
    """Check that the next operation does not read the result of a delayed collective before its end.

    Args:
        busy: another stream than the current one, of the same priority.
    """
    source, result = torch.full((ELEMENTS,), 5.0, device=device), kind.result(device)
    torch.accelerator.synchronize()
    hold_up(busy)
    _wait(kind.issue(result, source))
    return kind.is_right(result.clone(), 5)


def memory_pressure(kind: Kind, device: torch.device, busy: torch.Stream) -> bool:
    """Check that the input's memory is not reused (W3): the caller drops the input while the collective is delayed, and
    then allocates the same size many times at once.

    Args:
        busy: another stream than the current one, of the same priority.
    """
    result = kind.result(device)
    source = torch.full((ELEMENTS,), 7.0, device=device)
    torch.accelerator.synchronize()
    hold_up(busy)
    handle = kind.issue(result, source)
    del source
    garbage = [torch.full((ELEMENTS,), -2.0, device=device) for _ in range(8)]
    _wait(handle)
    right = kind.is_right(result, 7)
    return right and len(garbage) == 8


def hold_up(busy: torch.Stream) -> None:
    """Delay the default group's next operation, whoever issues it, behind a collective whose stream is busy. (A
    synchronous one that runs on its caller's own stream may be on time, and nothing can read too early there.)
    """
    with busy:
        source = torch.zeros(1, device=busy.device)
        result = torch.zeros(dist.get_world_size(), device=busy.device)
        cuda.spin(SLEEP_CYCLES)
        _wait(dist.all_gather_into_tensor(result, source, async_op=True))


def _wait(handle: Handle | None) -> None:
    if handle is not None:
        handle.wait()


_STREAMS = streams_used({-1: 3}, groups=1, looking=True)
"""Streams of a rank under fsdp, which opens three of priority -1."""


def main(
    path: Path, strategies: Sequence[str], words: Sequence[str], pairs: int = PAIRS, ranks_per_device: int = 1
) -> CheckReport | None:
    topology = read_topology()
    device = select_device(cuda.TYPE, topology.local_rank, ranks_per_device)
    rows = [] if ranks_per_device == 1 else sharing_rows(topology.rank)
    turns, alone = ranks_per_device > 1 and not cuda.mps_runs(), topology.world_size == 1
    configs = [resolved(*chosen(strategy, words, topology.world_size)).config for strategy in strategies]

    def checked(config: Config) -> list[CheckRow]:
        found = StrategyCheck(config, topology, device, pairs, turns=turns).rows()
        gc.collect()  # free one case's model before the next
        return found

    with process_group(topology, device, _LIMIT_S) as peers:
        rows += [*setting_rows(os.environ, platform_of(device)), *race_rows(device)]
        for config in () if alone else configs:
            rows += checked(config)
        everybody = peers.gather("rows", msgspec.to_builtins(rows))
    for config in configs if alone else ():
        ranks = emulated_ranks(config.fabric)
        with process_group(topology, device, _LIMIT_S, ranks), ExitStack() as stack:
            if isinstance(config.fabric, EmulatedFabric) and ranks is not None:
                stack.enter_context(backend_of_ranks(EmulatedNetwork(config.fabric, 0, ranks, None), device))
            everybody[0] += msgspec.to_builtins(checked(config))
    if topology.rank:
        return None
    facts: dict[str, Any] = {
        "created_unix_ns": time.time_ns(),
        "device": device_name(device),
        "platform": platform_of(device),
        "world_size": topology.world_size,
        "ranks_per_device": ranks_per_device,
        "torch": str(torch.__version__),
        "nccl": cuda.nccl_version(),
        "words": list(words),
    }
    report = report_of(facts, msgspec.convert(everybody, list[list[CheckRow]]))
    to_stdout(render(report).rstrip("\n"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(report).decode(), indent=2))
    return report


def sharing_rows(rank: int) -> list[CheckRow]:
    """Set what lets NCCL run several ranks on one device, and say so."""
    say = partial(CheckRow, "shared device", bound="for information", verdict=CheckVerdict.INFORMATION)
    settings = share_device(rank, cuda.nccl_version())
    mps = "runs" if cuda.mps_runs() else "not found: ranks take turns on their device"
    return [say(what="MPS", found=mps), *(say(what=name, found=f"={value}") for name, value in settings.items())]


def setting_rows(environment: Mapping[str, str], platform: Platform) -> list[CheckRow]:
    """Check settings that silently change the answer; on CUDA one hardware queue for all streams always has a row."""
    rows = []
    if platform == "cuda":
        value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
        verdict = CheckVerdict.FAILED if one_connection(environment) else CheckVerdict.OK
        found = "not set" if value is None else f"={value}"
        bound = "not 1: timing events stop all overlap"
        rows.append(CheckRow("knobs", "CUDA_DEVICE_MAX_CONNECTIONS", found, bound, verdict))
    for knob in setting_warnings(environment, platform, _STREAMS, timing_events=False):
        name, _, reason = knob.text.partition(":")
        rows.append(CheckRow("knobs", name, reason.strip(), "for information", CheckVerdict.INFORMATION))
    return rows


def race_rows(device: torch.device) -> list[CheckRow]:
    """Check K7, with collectives on dedicated streams, through the interceptor that a run would have here."""
    busy = torch.Stream(device)
    checks = {
        "slow producer": lambda kind: slow_producer(kind, device),
        "late consumer": lambda kind: late_consumer(kind, device, busy),
        "memory pressure": lambda kind: memory_pressure(kind, device, busy),
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    with Instrumentation(device, "dedicated", rank, size, read_clocks(), lambda _: None, native=True) as instrument:
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            found = {f"{check}, {kind}": checks[check](KINDS[kind]) for check in checks for kind in KINDS}
        instrument.recorder.finish()
    return [
        CheckRow(
            "race",
            name,
            "right" if good else "WRONG VALUES",
            "right values",
            CheckVerdict.OK if good else CheckVerdict.FAILED,
        )
        for name, good in found.items()
    ]


@command()
def _check(words: Sequence[str]) -> int:
    main(Path(words[0]), words[1].split(","), words[4:], int(words[2]), int(words[3]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(_check(sys.argv[1:]))
