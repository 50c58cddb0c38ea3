"""What `scripts/one_card.sh` asks of a card that is no command of AORTA: `python -m benchmarks.one_card PART ...`.

    facts                    what it is measured on: Python, torch, CUDA or HIP, NCCL or RCCL, the devices
    cost PAIRS OVERRIDE...   step times with the instrument paused and recording, in turn, in both modes
    values RUN RUN...        of the same training in several modes: the losses that were read
    record RUN               of a run with a calibration: what that cost, host-bound steps, marks against kernels
    trace RUN SUMMARY        of a run with a capture: the ratio by a trace (a report's summary.json) and by the record
    stuck FOLDER             a rank (of two) whose last collective waits behind a kernel that does not end, on rank 1

Regimes: one process and one device; `stuck` is started by torchrun, and two ranks share the device unless there are
two. Each prints one JSON object last. Exit 1: `values` are not finite, or more than 1 % apart; `record` found no
calibration, a problem in it, or a ratio of the kernels that is outside of what the marks allow; `trace`: both are not
known, or further apart. (Captures on the simulated device have its host alone.)
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import platform
import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.distributed import cuda
from aorta.distributed.topology import process_group, read_topology
from aorta.gpu_check.check_table import busy_share, collective_rows, matched, windows
from aorta.recording.train_step import Loop, resolved
from aorta.records.record_file import stream
from aorta.records.schema import Calibration, Step
from tests.simulated import device as simulated
from tests.simulated import load

WARM_UP, BLOCK = 3, 5
STUCK_S, SETTLES_S = 120, 5
"""How long the kernel lasts, and when after the last launch each rank writes its ring."""
HOLDS_WITHIN = 0.02
"""As `aorta check-gpu` asks of ratios."""


def show(figures: dict[str, Any]) -> None:
    """The last line."""
    sys.stdout.write(json.dumps(figures) + "\n")


def facts() -> dict[str, Any]:
    """What it is measured on."""
    devices = [torch.cuda.get_device_properties(index) for index in range(cuda.device_count())]
    collectives = torch.cuda.nccl.version() if devices else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": collectives and ".".join(map(str, collectives)),
        "devices": [f"{device.name}, {device.total_memory >> 20} MiB" for device in devices],
    }


def cost(pairs: int, words: list[str]) -> dict[str, Any]:
    """Median step times of alternating blocks, by mode."""
    topology, device = read_topology(), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    found: dict[str, Any] = {}
    with process_group(topology, device, 300):
        for mode in ("observe", "dedicated"):
            chosen = resolved("training.device=cuda", *words, f"instrument.mode={mode}").config
            loop = Loop(chosen, topology, device, lambda _line: None)
            for _ in range(WARM_UP):
                loop.step()
            blocks: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(pairs):
                for arm in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                    blocks[arm].append(_block_ms(loop, on=arm == "on"))
            loop.finish()
            off, on = median(blocks["off"]), median(blocks["on"])
            found[mode] = {"off_ms": off, "on_ms": on, "on_over_off": on / off if off else None}
            del loop
            gc.collect()
            torch.cuda.empty_cache()
    return found


def _block_ms(loop: Loop, *, on: bool) -> float:
    with nullcontext() if on else loop.instrument.paused():
        loop.step()
        torch.accelerator.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(BLOCK):
            loop.step()
        torch.accelerator.synchronize()
    return (time.perf_counter_ns() - begin) / 1e6 / BLOCK


def values(runs: list[Path]) -> tuple[dict[str, Any], bool]:
    """The first rank's losses in each run, null where one was not finite. Atomics order sums differently each time."""
    told: dict[str, list[float | None]] = {}
    for run in runs:
        steps = [line for line in stream(run / "rank_0_metrics.jsonl", []) if isinstance(line, Step)]
        told[run.name] = [step.loss for step in steps if not step.reasons.get("loss", "").startswith("not read")]
    same = all(
        None not in losses and max(losses) - min(losses) <= 0.01 * abs(losses[0])
        for losses in zip(*told.values(), strict=True)
    )
    return told, any(told.values()) and same


def record(run: Path) -> tuple[dict[str, Any], bool]:
    """What the run's first rank says of its calibration, and of a host that is slower than the device."""
    lines = list(stream(run / "rank_0_metrics.jsonl", []))
    steps = [line for line in lines if isinstance(line, Step)]
    calibrations = [line for line in lines if isinstance(line, Calibration)]
    told = {
        "calibrations": [msgspec.to_builtins(line) for line in calibrations],
        "host_lead_ms": _median(steps, "host_lead_ms"),
        "undecided_share": _median(steps, "undecided_share"),
        "overlap_ratio": _median(steps, "overlap_ratio"),
    }
    held = all(
        line.problem is None
        and (
            line.ratio_by_kernels is None
            or line.ratio_by_marks is None
            or line.ratio_by_kernels <= line.ratio_by_marks + HOLDS_WITHIN
        )
        for line in calibrations
    )
    return told, bool(calibrations) and held


def trace(run: Path, summary: Path) -> tuple[dict[str, Any], bool]:
    """The same steps by trace and by record (docs/dev/measuring.md, K2): the ratio of a report, and each collective
    beside its kernel as `aorta check-gpu` compares them.
    """
    (path,) = (run / "torch_profiler/rank0").glob("*.json*")
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    numbers = {int(number) for number in re.findall(rb"ProfilerStep#(\d+)", text)}
    lines = stream(run / "rank_0_metrics.jsonl", [])
    steps = [line for line in lines if isinstance(line, Step) and line.global_step in numbers]
    known = [line.overlap for line in steps]
    comm, hidden = (_sum(known, name) for name in ("comm_ms", "compute_comm_ms"))
    by_record = hidden / comm if comm and hidden is not None else None
    (dataset,) = json.loads(summary.read_text())["datasets"].values()
    by_trace = dataset["metrics"]["overlap_ratio"]["median"]
    told = {"steps": sorted(numbers), "ratio_by_trace": by_trace, "ratio_by_record": by_record}
    collectives = [
        [
            (line.t_start_ns + row.start_ns, line.t_start_ns + row.end_ns)
            for row in line.collectives
            if row.start_ns is not None and row.end_ns is not None
        ]
        for line in steps
    ]
    ranges = [(line.t_start_ns, line.t_end_ns) for line in steps]
    seen, ahead_ns = windows(json.loads(text), ranges, 0, collectives=[one for own in collectives for one in own])
    rows = collective_rows("trace", matched(collectives, seen), busy_share(seen, ranges), ahead_ns)
    told["collectives"] = {row.what: row.value for row in rows}
    if by_trace is None or by_record is None:
        return told, load.loaded()
    return told, abs(by_trace - by_record) <= HOLDS_WITHIN


def _sum(overlaps: list[dict[str, float | None]], name: str) -> float | None:
    values = [overlap.get(name) for overlap in overlaps]
    return None if not values or None in values else sum(value for value in values if value is not None)


def _median(steps: list[Step], name: str) -> float | None:
    values = [value for step in steps if (value := step.overlap.get(name)) is not None]
    return median(values) if values else None


def stuck(folder: Path) -> None:
    """One rank."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % cuda.device_count())
    torch.cuda.set_device(device)
    if cuda.device_count() == 1:  # NCCL refuses two ranks of one host on one device
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
    if load.loaded():
        simulated.real_delays(sleep_ns=STUCK_S * 1_000_000_000)
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # a ring then has which rank's device began the collective
    dist.init_process_group("nccl", device_id=device)
    x, model = torch.ones(1024, device=device), nn.Linear(4, 4).to(device)
    with aorta.record(folder / "run", model=model, watchdog_timeout_s=0) as recording:
        for step in range(5):
            if step == 4 and rank == 1:
                cuda.spin(STUCK_S * 2_000_000_000)
            dist.all_reduce(x)
            if step == 4:
                threading.Timer(SETTLES_S, _leave_ring, (folder, rank)).start()
            torch.cuda.synchronize()
            recording.step()


def _leave_ring(folder: Path, rank: int) -> None:
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # of builds with NCCL
    if dump is not None:
        (folder / "rings").mkdir(exist_ok=True)
        (folder / "rings" / f"comm_lib_trace_rank_{rank}").write_bytes(dump())
    (folder / f"settled_{rank}").touch()


def main(words: list[str]) -> int:
    """Run one part."""
    match words:
        case ["facts"]:
            show(facts())
        case ["cost", pairs, *overrides]:
            show(cost(int(pairs), overrides))
        case ["values", *runs]:
            told, held = values([Path(run) for run in runs])
            show(told)
            return 0 if held else 1
        case ["record", run]:
            told, held = record(Path(run))
            show(told)
            return 0 if held else 1
        case ["trace", run, summary]:
            told, held = trace(Path(run), Path(summary))
            show(told)
            return 0 if held else 1
        case ["stuck", folder]:
            stuck(Path(folder))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
