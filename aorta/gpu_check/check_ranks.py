"""One rank of the check, started by torchrun: the findings of all ranks become one table.

Arguments are the report's path, the strategies, the number of compared pairs of blocks, and overrides of train.py. Rank
0 prints every row of every rank and writes the report. Exits with 0 once that is done: findings are in the report. Must
not decide what a row says.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from aorta.command_line import command
from aorta.distributed import cuda
from aorta.distributed.accelerator import device_name
from aorta.distributed.environment_checks import knobs_found, one_connection, streams_used
from aorta.distributed.process_group import process_group
from aorta.distributed.topology import platform_of, read_topology, select_device
from aorta.errors import EXIT_OK
from aorta.gpu_check import races
from aorta.gpu_check.case import PAIRS, Case
from aorta.gpu_check.check_table import CheckReport, CheckRow, CheckVerdict, render, report_of
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import Platform
from aorta.records.whole_files import whole_file

_STREAMS = streams_used({-1: 3}, groups=1, looking=True)
"""Streams of a rank under fsdp, which opens three of priority -1."""


def main(path: Path, strategies: Sequence[str], words: Sequence[str], pairs: int = PAIRS) -> CheckReport | None:
    """Check; the report, on rank 0."""
    topology = read_topology()
    device = select_device(cuda.TYPE, topology.local_rank)
    with process_group(topology, device, 300) as peers:
        rows = [*knob_rows(os.environ, platform_of(device)), *race_rows(device)]
        for strategy in strategies:
            rows += Case(strategy, topology, device, words, pairs).rows()
            gc.collect()  # free one case's model before the next
        everybody = peers.gather("rows", msgspec.to_builtins(rows))
        if topology.rank:
            return None
        facts: dict[str, Any] = {
            "created_unix_ns": time.time_ns(),
            "device": device_name(device),
            "platform": platform_of(device),
            "world_size": topology.world_size,
            "torch": str(torch.__version__),
            "nccl": cuda.nccl_version(),
            "words": list(words),
        }
        report = report_of(facts, msgspec.convert(everybody, list[list[CheckRow]]))
        sys.stdout.write(render(report))
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        return report


def knob_rows(environment: Mapping[str, str], platform: Platform) -> list[CheckRow]:
    """Settings that silently change the answer; one hardware queue for all streams has a row in any case on CUDA."""
    rows = []
    if platform == "cuda":
        value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
        verdict = CheckVerdict.FAILED if one_connection(environment) else CheckVerdict.OK
        found = "not set" if value is None else f"={value}"
        bound = "not 1: timing events stop all overlap"
        rows.append(CheckRow("knobs", "CUDA_DEVICE_MAX_CONNECTIONS", found, bound, verdict))
    for knob in knobs_found(environment, platform, _STREAMS, timing_events=False):
        name, _, reason = knob.text.partition(":")
        rows.append(CheckRow("knobs", name, reason.strip(), "for information", CheckVerdict.INFORMATION))
    return rows


def race_rows(device: torch.device) -> list[CheckRow]:
    """K7, with collectives on dedicated streams, through the interceptor that a run would have here."""
    busy = torch.Stream(device)
    checks = {
        "slow producer": lambda kind: races.slow_producer(kind, device),
        "late consumer": lambda kind: races.late_consumer(kind, device, busy),
        "memory pressure": lambda kind: races.memory_pressure(kind, device, busy),
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    with Instrumentation(device, "dedicated", rank, size, read_clocks(), lambda _: None, native=True) as instrument:
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            found = {f"{check}, {kind}": checks[check](races.KINDS[kind]) for check in checks for kind in races.KINDS}
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


@command("gpu_check")
def _check(words: Sequence[str]) -> int:
    main(Path(words[0]), words[1].split(","), words[3:], int(words[2]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(_check(sys.argv[1:]))
