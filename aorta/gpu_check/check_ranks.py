"""One rank of the check, started by torchrun: races, one strategy after another, and the findings of all ranks as one
table.

Arguments are the report's path, the strategies, the number of compared pairs of blocks, and overrides of train.py. Rank
0 prints every row of every rank and writes the report. Exits with 0 once that is done: findings are in the report.

A strategy's record is compared with torch.profiler's kernels of the same steps (docs/dev/measuring.md, K2 and R4). Must
not use anything of the record to decide what is communication in the trace.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from msgspec import UnsetType
from torch.profiler import profile

from aorta.command_line import command, to_stdout
from aorta.config.fabric import emulated_ranks
from aorta.config.schema import Config, EmulatedFabric
from aorta.distributed import cuda
from aorta.distributed.environment_checks import one_connection, setting_warnings, streams_used
from aorta.distributed.topology import (
    Topology,
    device_name,
    platform_of,
    process_group,
    profiled,
    read_topology,
    select_device,
    share_device,
)
from aorta.errors import EXIT_OK
from aorta.gpu_check.check_table import (
    CheckReport,
    CheckRow,
    CheckVerdict,
    busy_row,
    busy_share,
    collective_rows,
    matched,
    pooled_ratio,
    ratio_between,
    ratio_row,
    render,
    report_of,
    sharing,
    time_row,
    windows,
)
from aorta.gpu_check.races import KINDS, late_consumer, memory_pressure, slow_producer
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import emulated_ranks as backend_of_ranks
from aorta.instrument.instrumentation import Instrumentation
from aorta.recording.train_step import Loop, resolved
from aorta.records.clocks import read_clocks
from aorta.records.files import write_whole
from aorta.records.schema import Platform, Step
from aorta.records.step_line import StepFacts

WARM_UP, PROFILED = 10, 6
BLOCK, PAIRS = 20, 10
"""Steps of one timed block, and the default number of comparisons between blocks with and without instrumentation."""
MOST_COST = 1.01
_LIMIT_S = 300


EMULATED_RANKS = (
    "fabric=emulated",
    "fabric.ranks=8",
    # 100 Gb/s Ethernet (IEEE 802.3bj) divided by 8 bits: slow beside the copies that fill outputs.
    "fabric.inter_bandwidth_gb_per_s=12.5",
    "fabric.inter_latency_us=5",
)
"""What a single rank stands for: NCCL runs no kernels for one."""


def chosen(strategy: str, words: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return the configuration of one case: the full-size workload, changed by the caller's overrides; a single rank
    stands for several.
    """
    return (
        "experiment=full",
        "training.device=cuda",
        "instrument.mode=dedicated",
        *(EMULATED_RANKS if ranks == 1 else ()),
        *words,
        f"parallel={strategy}",
    )


class StrategyCheck:
    """One strategy on one rank.

    Args:
        config: as `chosen` makes it.
        pairs: number of comparisons between blocks with and without instrumentation.
        shared: whether other ranks are on its device, and whether under MPS; None: it is alone there.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        device: torch.device,
        pairs: int = PAIRS,
        *,
        shared: bool | None = None,
    ) -> None:
        self.name, self.device, self.pairs, self.shared = config.parallel.strategy, device, pairs, shared
        self.ranks = emulated_ranks(config.fabric)
        self.lines: list[Step] = []
        self.loop = Loop(config, topology, device, self.lines.append)

    def rows(self) -> list[CheckRow]:
        """Measure everything and return its rows, in this order: the profiler slows what comes after it."""
        for _ in range(WARM_UP):
            self.loop.step()
        torch.accelerator.synchronize()
        waited = "none"
        try:
            with cuda.no_synchronisation():
                for _ in range(PROFILED):
                    self.loop.step()
        except RuntimeError as error:
            waited = str(error).splitlines()[0]
        cost, block_ms = self._cost()
        trace = self._profiled()
        self.loop.finish()
        own = self.lines[-PROFILED:]
        steps = [(line.t_start_ns, line.t_end_ns) for line in own]
        collectives = [
            [
                (line.t_start_ns + row.start_ns, line.t_start_ns + row.end_ns)
                for row in line.collectives
                if row.start_ns is not None and row.end_ns is not None
            ]
            for line in own
        ]
        seen, ahead_ns = windows(
            trace,
            steps,
            self.device.index or 0,
            emulated=self.ranks is not None,
            collectives=[row for own_step in collectives for row in own_step],
        )
        share = busy_share(seen, steps)
        lead_ms, undecided = (_median(own, name) for name in ("host_lead_ms", "undecided_share"))
        ratio = ratio_between(_ends(own, "compute_comm_ms"), _ends(own, "exposed_comm_ms"))
        complete = sum(line.coverage.complete for line in own)
        on, again = (median(pair[arm] for pair in cost) for arm in (0, 1))
        blocks = [
            [(line.t_start_ns + row.start_ns, line.t_start_ns + row.end_ns) for row in line.compute] for line in own
        ]
        timed = [
            ratio_row(self.name, ratio, pooled_ratio(seen, blocks), share, lead_ms),
            time_row(
                self.name,
                "step time, instrumented / off",
                f"{on:.4f} (off again: {again:.4f}), {block_ms:.1f} ms a step",
                f"<= {MOST_COST}",
                share,
                on <= MOST_COST,
            ),
        ]
        ratios, taken = timed
        if self.shared is False:
            ratios, taken = (sharing(line, "no MPS: ranks take turns on the device") for line in timed)
        elif self.shared:
            taken = sharing(taken, "ranks share the device: the other's kernels slow this one's")
        who = "a process of its own" if self.ranks is None else f"one of {self.ranks}, emulated"
        lead = "-" if lead_ms is None else f"{lead_ms:.3f} ms; {undecided or 0:.0%} of the blocks' time is undecided"
        row = partial(_row, self.name)
        return [
            row("rank", who, "for information", None),
            busy_row(self.name, share, lead_ms),
            row("host ahead of the device", lead, "for information", None),
            ratios,
            *collective_rows(self.name, matched(collectives, seen), share, ahead_ns, emulated=self.ranks is not None),
            taken,
            row("coverage", f"{complete} of {len(own)} steps", "all", complete == len(own)),
            row(f"synchronisations in {PROFILED} steps", waited, "none", waited == "none"),
            row("host waits in the trace", str(sum(w.host_waits for w in seen)), "for information", None),
        ]

    def _cost(self) -> tuple[list[tuple[float, float]], float]:
        """Return (on / off, off again / off) of each pair of blocks, and a step's milliseconds in the last one off."""
        pairs, off_ms = [], 0.0
        for turn in range(self.pairs):
            arms = ("off", "on", "again") if turn % 2 == 0 else ("again", "on", "off")
            block = {arm: self._block_ms(on=arm == "on") for arm in arms}
            off_ms = block["off"]
            pairs.append((block["on"] / off_ms, block["again"] / off_ms))
        return pairs, off_ms

    def _block_ms(self, *, on: bool) -> float:
        with nullcontext() if on else self.loop.instrument.paused():
            self.loop.step()
            torch.accelerator.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(BLOCK):
                self.loop.step()
            torch.accelerator.synchronize()
        taken = torch.tensor([(time.perf_counter_ns() - begin) / 1e6 / BLOCK])
        if self.ranks is None:  # otherwise there are no others
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def _profiled(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            # There is one cycle, whose events are not needed: keeping them takes seconds.
            warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
            with profile(activities=profiled()) as profiler:
                for _ in range(PROFILED):
                    self.loop.step()
                torch.accelerator.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_text())
        return trace


def _row(case: str, what: str, finding: str, bound: str, passed: bool | None) -> CheckRow:
    verdict = CheckVerdict.INFORMATION if passed is None else CheckVerdict.OK if passed else CheckVerdict.FAILED
    return CheckRow(case, what, finding, bound, verdict)


def _median(lines: list[Step], name: str) -> float | None:
    values = [value for line in lines if (value := line.overlap.get(name)) is not None]
    return median(values) if values else None


def _ends(lines: list[Step], name: str) -> tuple[float, float] | None:
    """Return the bounds of a metric's sum over all steps; None where it is not known of a step."""
    low = high = 0.0
    for line in lines:
        value = line.overlap[name]
        bounds = {} if isinstance(line.bounds, UnsetType) else line.bounds
        if value is None and name not in bounds:
            return None
        least, most = bounds[name] if value is None else (value, value)
        low, high = low + least, high + most
    return low, high


_STREAMS: Final = streams_used({-1: 3}, groups=1, looking=True)
"""Streams of a rank under fsdp, which opens three of priority -1."""


def main(path: Path, strategies: Sequence[str], words: Sequence[str], pairs: int = PAIRS) -> CheckReport | None:
    topology = read_topology()
    configs = [resolved(*chosen(strategy, words, topology.world_size)).config for strategy in strategies]
    ranks_per_device = configs[0].training.ranks_per_device
    device = select_device(cuda.TYPE, topology.local_rank, ranks_per_device)
    information = partial(CheckRow, bound="for information", verdict=CheckVerdict.INFORMATION)
    rows: list[CheckRow] = []
    if ranks_per_device > 1:  # what lets NCCL run several ranks on one device
        mps = "runs" if cuda.mps_runs() else "not found: ranks take turns on their device"
        settings = share_device(topology.rank, cuda.nccl_version())
        reported = {"MPS": mps, **{name: f"={value}" for name, value in settings.items()}}
        rows += [information("shared device", name, value) for name, value in reported.items()]
    shared, alone = cuda.mps_runs() if ranks_per_device > 1 else None, topology.world_size == 1

    def checked(config: Config) -> list[CheckRow]:
        judged = StrategyCheck(config, topology, device, pairs, shared=shared).rows()
        gc.collect()  # free one case's model before the next
        return judged

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


def setting_rows(environment: Mapping[str, str], platform: Platform) -> list[CheckRow]:
    """Check settings that silently change the answer; on CUDA one hardware queue for all streams always has a row."""
    rows = []
    if platform == "cuda":
        value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
        seen, bound = "not set" if value is None else f"={value}", "not 1: timing events stop all overlap"
        rows.append(_row("knobs", "CUDA_DEVICE_MAX_CONNECTIONS", seen, bound, not one_connection(environment)))
    for knob in setting_warnings(environment, platform, _STREAMS, timing_events=False):
        name, _, reason = knob.text.partition(":")
        rows.append(_row("knobs", name, reason.strip(), "for information", None))
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
        if instrument.why_off is not None:
            return [_row("race", "interceptor", instrument.why_off, "compiled", passed=False)]
        with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
            results = {f"{check}, {kind}": checks[check](KINDS[kind]) for check in checks for kind in KINDS}
        instrument.recorder.finish()
    return [
        _row("race", name, "right" if good else "WRONG VALUES", "right values", good) for name, good in results.items()
    ]


@command()
def _check(words: Sequence[str]) -> int:
    main(Path(words[0]), words[1].split(","), words[3:], int(words[2]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(_check(sys.argv[1:]))
