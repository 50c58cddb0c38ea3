"""Checks one strategy on one rank: compares the record with torch.profiler's kernels of the same steps.

It gives rows of the table (docs/dev/measuring.md, K2 and R4): the overlap ratio; each collective's duration, start and
end; the cost of the instrumentation; that no step waits for the device. Must not use anything of the record to decide
what is communication in the trace.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UnsetType
from torch.profiler import profile

from aorta.config.fabric import emulated_ranks
from aorta.config.schema import Config
from aorta.distributed import cuda
from aorta.distributed.topology import Topology, profiled
from aorta.gpu_check.check_table import (
    CheckRow,
    CheckVerdict,
    busy_row,
    busy_share,
    collective_rows,
    lead_row,
    matched,
    pooled_ratio,
    ratio_between,
    ratio_row,
    taking_turns,
    time_row,
    windows,
)
from aorta.records.schema import Step
from aorta.runner.train_step import Loop

WARM_UP, PROFILED = 10, 6
BLOCK, PAIRS = 20, 10
"""Steps of one timed block, and the default number of comparisons between blocks with and without instrumentation."""
MOST_COST = 1.01


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
        turns: whether other ranks take turns with this one on its device.
    """

    def __init__(
        self, config: Config, topology: Topology, device: torch.device, pairs: int = PAIRS, *, turns: bool = False
    ) -> None:
        self.name, self.device, self.pairs, self.turns = config.parallel.strategy, device, pairs, turns
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
        seen = windows(trace, steps, self.device.index or 0, emulated=self.ranks is not None)
        share = busy_share(seen, steps)
        lead_ms, undecided = (_median(own, name) for name in ("host_lead_ms", "undecided_share"))
        ratio = ratio_between(_ends(own, "compute_comm_ms"), _ends(own, "exposed_comm_ms"))
        complete = sum(line.coverage.complete for line in own)
        found = f"{median(pair[0] for pair in cost):.4f} (off again: {median(pair[1] for pair in cost):.4f})"
        blocks = [
            [(line.t_start_ns + row.start_ns, line.t_start_ns + row.end_ns) for row in line.compute] for line in own
        ]
        collectives = [
            [
                (line.t_start_ns + row.start_ns, line.t_start_ns + row.end_ns)
                for row in line.collectives
                if row.start_ns is not None and row.end_ns is not None
            ]
            for line in own
        ]
        ratios = ratio_row(self.name, ratio, pooled_ratio(seen, blocks), share, lead_ms)
        taken = time_row(
            self.name,
            "step time, instrumented / off",
            f"{found}, {block_ms:.1f} ms a step",
            f"<= {MOST_COST}",
            share,
            median(pair[0] for pair in cost) <= MOST_COST,
        )
        who = "a process of its own" if self.ranks is None else f"one of {self.ranks}, emulated"
        return [
            _row(self.name, "rank", who, "for information", None),
            busy_row(self.name, share, lead_ms),
            lead_row(self.name, lead_ms, undecided),
            taking_turns(ratios) if self.turns else ratios,
            *collective_rows(self.name, matched(collectives, seen), share),
            taking_turns(taken) if self.turns else taken,
            _row(self.name, "coverage", f"{complete} of {len(own)} steps", "all", complete == len(own)),
            _row(self.name, f"synchronisations in {PROFILED} steps", waited, "none", waited == "none"),
            _row(self.name, "host waits in the trace", str(sum(w.host_waits for w in seen)), "for information", None),
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
    """Return at least and at most of a metric, of all steps together; None where it is not known of one."""
    low = high = 0.0
    for line in lines:
        value = line.overlap[name]
        bounds = {} if isinstance(line.bounds, UnsetType) else line.bounds
        if value is None and name not in bounds:
            return None
        least, most = bounds[name] if value is None else (value, value)
        low, high = low + least, high + most
    return low, high
