"""A run of `workload=streams`: every pattern on every number of streams, `streams.json`, and a table on the terminal.

The table has one row a pattern, one column a number of streams, and the knee marked. Must not issue kernels, compute
numbers (`patterns`), or show one that `streams.json` does not hold.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from aorta.command_line import to_stdout
from aorta.config.resolve import Resolved
from aorta.config.schema import Streams
from aorta.config.workload import STREAMS_NEED_DEVICE
from aorta.distributed import cuda
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology, default_backend, device_name
from aorta.errors import ConfigError
from aorta.recording.rank_process import run_rank
from aorta.recording.recorded_run import untrained_run
from aorta.records.files import write_whole
from aorta.records.run_files import (
    QUEUE_VARIABLES,
    STREAMS_FILE,
    STREAMS_VERSION,
    StreamsFile,
    StreamsPattern,
    StreamsPoint,
    StreamsRank,
)
from aorta.streams.patterns import (
    PATTERNS,
    Issuer,
    Kernel,
    Pattern,
    Timed,
    concurrency,
    elapsed_ns,
    knee,
    most_at_once,
    ran_together,
)
from aorta.terminal_style import Style, style_of, table

_log = logging.getLogger(__name__)


def report_text(report: StreamsRank, knee_tolerance: float, style: Style) -> str:
    counts = sorted({point.streams for pattern in report.patterns for point in pattern.points})
    variables = ", ".join(f"{name} {report.environment.get(name, 'not set')}" for name in QUEUE_VARIABLES)
    heads = ("streams", *(f"{count} " for count in counts), "knee", "mean", "most")
    rows = []
    for pattern in report.patterns:
        if pattern.knee_streams is None:  # skipped
            continue
        by_count = {point.streams: point for point in pattern.points}
        cells = []
        for count in counts:
            point, at_knee = by_count[count], count == pattern.knee_streams
            text = f"{point.gain:.2f}" + ("!" if not point.issued_in_time else "*" if at_knee else " ")
            cells.append(style.bold(text) if at_knee else text)
        there, knee_cell = by_count[pattern.knee_streams], style.bold(str(pattern.knee_streams))
        rows.append((pattern.name, *cells, knee_cell, f"{there.concurrency:.2f}", str(there.most_at_once)))
    lines = [
        f"rank {report.rank}, {report.device}; {variables}",
        "throughput against one stream, by number of streams; kernels at once, at the knee: mean and most",
        *table([heads, *rows], right=range(1, len(heads))),
    ]
    left_out = {pattern.name: pattern.skipped for pattern in report.patterns if pattern.skipped is not None}
    lines += [f"{name} {style.faint(f'skipped: {why}')}" for name, why in left_out.items()]
    lines.append(f"* the knee: more streams gain at most {knee_tolerance:.0%}")
    if not all(point.issued_in_time for pattern in report.patterns for point in pattern.points):
        lines.append("! the host issued too late, the device can do more")
    streams, shared = sum(map(len, report.queues)), [queue for queue in report.queues if len(queue) > 1]
    if shared:
        some = f"hardware queues: {len(report.queues)} for {streams} streams; these streams share one:"
        lines += [style.bold(some), *(f"  {', '.join(map(str, queue))}" for queue in shared)]
    else:
        lines.append(f"hardware queues: none of {streams} streams shared one")
    return "\n".join(lines)


_TRIES = 3
"""Two kernels that ran at once, once, do not share a queue; that they did not can have another reason, once."""


def shared_queues(issuer: Issuer, streams: Sequence[torch.Stream]) -> list[list[int]]:
    """Group streams by the hardware queue that they share; no rule by which a runtime deals streams out is assumed.

    Two streams share a queue where two kernels, one on each, that could begin at the same moment do not run at once.
    Sharing is an equivalence, so each stream is tried against one stream of every queue found so far.

    Returns:
        The indices of the streams of each queue, queues in the order of their first stream.
    """
    queues: list[list[int]] = []
    for index, stream in enumerate(streams):
        for own in queues:
            pair = (streams[own[0]], stream)

            def spread(kernel: Kernel, pair: tuple[torch.Stream, torch.Stream] = pair) -> torch.Stream:
                return pair[kernel.stream]

            timed = (issuer.run([Kernel(0), Kernel(1)], spread) for _ in range(_TRIES))
            if not any(ran_together(*repetition.kernels) for repetition in timed):
                own.append(index)
                break
        else:
            queues.append([index])
    return queues


def distinct_streams(device: torch.device, number: int, priority: int) -> list[torch.Stream]:
    """Return streams of one priority on the current device.

    Torch has a pool of 32 streams for each priority and hands them out in turn (c10/cuda/CUDAStream.cpp,
    kStreamsPerPool); what is missing is made by the runtime itself and lives until the process ends.

    Raises:
        ConfigError: the pool is exhausted, and streams of this priority cannot be had from the runtime.
    """
    module: Any = torch.get_device_module(device.type)
    streams: list[torch.Stream] = []
    while len(streams) < number:
        fresh = module.Stream(device, priority=priority)
        if fresh in streams:
            break
        streams.append(fresh)
    pooled = len(streams)
    while len(streams) < number:
        runtime = module.cudart()
        if priority != 0 or not hasattr(runtime, "cudaStreamCreate"):
            raise ConfigError(
                f"workload.streams: torch has {pooled} streams of priority {priority} on {device}, no more can be "
                f"made; ask for at most {pooled}, or leave out the pattern `priorities` "
                "(workload.patterns=[independent,...])"
            )
        handle = ctypes.c_void_p()
        code = int(runtime.cudaStreamCreate(ctypes.addressof(handle)))
        if code != 0:
            raise ConfigError(f"workload.streams: the runtime makes no stream beyond torch's {pooled} (error {code})")
        streams.append(module.ExternalStream(handle.value, device=device))
    return streams


_URGENT = -1
"""High priority, which CUDA and HIP both have."""


def run_streams(resolved: Resolved) -> int:
    """Run it, and return the process's exit code.

    Raises:
        ConfigError: there is no CUDA or HIP device.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != cuda.TYPE:
        seen = "torch sees no accelerator" if there is None else f"torch sees {there.type}"
        raise ConfigError(f"training.device={resolved.config.training.device}, and {seen}: {STREAMS_NEED_DEVICE}")
    return run_rank(resolved, _run, leave_together=True)


def _run(resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> signal.Signals | None:
    settings = resolved.config.workload
    assert isinstance(settings, Streams)  # the caller checked it
    with untrained_run(resolved, topology, device, peers, default_backend(device), {}) as (site, clocks):
        result = _measured(settings, topology, device, peers)
        clocks.at_end()
        gathered = peers.gather("streams", msgspec.to_builtins(result))
        if topology.rank == 0:
            results = msgspec.convert(gathered, list[StreamsRank])
            whole = StreamsFile(STREAMS_VERSION, round(settings.kernel_us * 1e3), settings.knee_tolerance, results)
            path = site.folder.path / STREAMS_FILE
            write_whole(path, msgspec.json.format(msgspec.json.encode(whole).decode(), indent=1))
            for result in results:
                to_stdout(report_text(result, settings.knee_tolerance, style_of(sys.stdout)))
            _log.info("written: %s", path)
    return None


def _measured(settings: Streams, topology: Topology, device: torch.device, peers: Peers) -> StreamsRank:
    """Run every pattern on every number of streams."""
    issuer = Issuer(device, settings, with_peers=topology.world_size > 1)
    chosen = [pattern.name for pattern in settings.patterns]
    patterns = {name: pattern for name, pattern in PATTERNS.items() if not chosen or name in chosen}
    counts = sorted(set(settings.streams))
    normal = distinct_streams(device, counts[-1], 0)
    urgent = max(sum(map(pattern.urgent, range(counts[-1]))) for pattern in patterns.values())
    everything = [*normal, *distinct_streams(device, urgent, _URGENT)]
    # First of all, in the order of the streams: a stream may get its queue at its first use.
    queues = shared_queues(issuer, everything)
    queue_of = {index: number for number, queue in enumerate(queues) for index in queue}

    def typical(kernels: Sequence[Kernel], stream_of: Callable[[Kernel], torch.Stream]) -> Timed:
        """Return the repetition of median length: a single one may have met something else on the device."""
        runs = [issuer.run(kernels, stream_of) for _ in range(settings.repeats)]
        return sorted(runs, key=lambda run: elapsed_ns(run.kernels))[len(runs) // 2]

    def point(name: str, pattern: Pattern, streams: int) -> StreamsPoint:
        kernels, indices, by_queue = pattern.kernels(streams), list[int](), dict[int, list[int]]()
        for stream in range(streams):  # those of normal priority stand first among all streams, then the urgent ones
            urgent_before = sum(map(pattern.urgent, range(stream)))
            index = len(normal) + urgent_before if pattern.urgent(stream) else stream - urgent_before
            indices.append(index)
            by_queue.setdefault(queue_of[index], []).append(stream)

        def spread(kernel: Kernel) -> torch.Stream:
            return everything[indices[kernel.stream]]

        issuer.run(kernels, spread)  # warms up
        peers.gather(f"point/{name}/{streams}", True)
        serial = typical(kernels, lambda _kernel: everything[0])
        timed = typical(kernels, spread)
        serial_ns, spread_ns = elapsed_ns(serial.kernels), elapsed_ns(timed.kernels)
        return StreamsPoint(
            streams=streams,
            kernels=len(kernels),
            concurrency=concurrency(timed.kernels),
            most_at_once=most_at_once(timed.kernels),
            serial_ns=serial_ns,
            elapsed_ns=spread_ns,
            gain=serial_ns / spread_ns,
            issued_in_time=timed.issued_in_time,
            shared_queues=[sharing for sharing in by_queue.values() if len(sharing) > 1],
        )

    results, size = [], topology.world_size
    for name, pattern in patterns.items():
        if size < pattern.ranks:
            missing = f"needs {pattern.ranks} ranks, and this run has {size}; start it with --nproc_per_node 2"
            results.append(StreamsPattern(name, pattern.says, [], skipped=missing))
            continue
        points = [point(name, pattern, streams) for streams in counts]
        gains = {measured.streams: measured.gain for measured in points}
        results.append(StreamsPattern(name, pattern.says, points, knee(gains, settings.knee_tolerance)))
    return StreamsRank(
        rank=topology.rank,
        device=device_name(device),
        environment={name: os.environ[name] for name in QUEUE_VARIABLES if name in os.environ},
        queues=[own for queue in queues if (own := [index for index in queue if index < len(normal)])],
        patterns=results,
    )
