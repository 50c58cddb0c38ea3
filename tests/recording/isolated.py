"""Run on every rank: trainings with isolated baselines and without, one after another, in one launch.

Arguments: a folder, then names of `CASES`. Each case leaves `FOLDER/CASE-with`, those of `COMPARED` also
`FOLDER/CASE-without`, all trained on for two more steps behind the record, and `FOLDER/CASE.rank_<r>.json`: digests of
everything training depends on.

With `fail` as the only name, rank 1 fails in its first compute-only step.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import aorta.recording.train as training
from aorta.distributed.peers import Peers
from aorta.distributed.topology import process_group, read_topology, select_device
from aorta.instrument.emulation.stand_in import StandIn
from aorta.recording.isolated_baselines import Baselines
from aorta.recording.rank_process import start_logging
from aorta.recording.train import run_training
from aorta.recording.train_step import TrainStep
from tests.loop import resolved
from tests.recording.modes import COMPILED
from tests.trained_ways import TINY as SIZES

TINY = (
    *SIZES,
    "training.max_steps=4",
    "training.gradient_accumulation=2",
    "workload.num_layers=1",
    "telemetry.warmup_steps=1",
    "training.device=cpu",
    "baseline.enabled=true",
    "baseline.steps=3",
)
CASES: dict[str, tuple[str, ...]] = {
    "none": ("parallel=none",),
    "ddp": ("parallel=ddp",),
    "ddp-after": ("parallel=ddp", "parallel.overlap=false", "training.mixed_precision=fp16", "training.max_steps=1"),
    "fsdp1": ("parallel=fsdp1",),
    "fsdp": ("parallel=fsdp", "fabric=emulated", "fabric.inter_bandwidth_gb_per_s=1"),
    "tp-compiled": ("parallel=tp", *COMPILED),
    "cp": ("parallel=cp", "workload=gpt"),
    "hsdp": ("parallel=hsdp",),
    "fsdp_tp": ("parallel=fsdp_tp",),
}
COMPARED = ("ddp", "fsdp")
"""Also trained without baselines."""


def digest(step: TrainStep) -> dict[str, str]:
    """Everything a next step depends on, part by part."""
    module, optimizer = step.model.module, step.optimizer
    state = [(i, k, v) for i, p in enumerate(module.parameters()) for k, v in sorted(optimizer.state[p].items())]
    parts: dict[str, Any] = {
        "parameters": list(module.parameters()),
        "buffers": list(module.buffers()),
        "gradients": [p.grad for p in module.parameters()],
        "optimizer": state,
        "rates": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "schedule": {k: v for k, v in step.schedule.state_dict().items() if k != "lr_lambdas"},
        "scaler": step.scaler.state_dict(),
        "random": torch.get_rng_state(),
    }
    return {name: hashlib.sha256(_bytes(part)).hexdigest() for name, part in parts.items()}


def _bytes(value: Any) -> bytes:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, list | tuple):
        return b"|".join(_bytes(item) for item in value)
    if isinstance(value, dict):
        return b"|".join(_bytes(pair) for pair in sorted(value.items()))
    return repr(value).encode()


def watched(told: dict[str, Any], *, really: bool) -> Callable[..., Any]:
    """Baselines that digest what training depends on before and after, and train on."""

    class Watched(Baselines):
        def run(self) -> None:
            told["before"] = digest(self.step)
            if really:
                super().run()
            told["after"] = digest(self.step)
            batches = self.batches()
            for _ in range(2):
                self.step.unrecorded(batches)
            told["later"] = digest(self.step)

    return Watched


def main(folder: str, *names: str) -> None:
    topology = read_topology()
    if names == ("fail",):
        fail(folder, topology.rank)
    start_logging(topology.rank, topology.world_size)
    device = select_device(resolved(*TINY).config.training.device, topology.local_rank)
    with process_group(topology, device, 120.0) as peers:
        for name in names:
            told: dict[str, Any] = {form: {} for form in ("with", "without")[: 1 + (name in COMPARED)]}
            for form in told:
                words = (*TINY, *CASES[name], f"training.output_dir={folder}", f"label={name}-{form}")
                training.Baselines = watched(told[form], really=form == "with")  # type: ignore[misc,assignment]
                own = Peers(dist.PrefixStore(f"{name}-{form}", peers.store), topology.rank, topology.world_size, 120.0)
                training.TrainingRun(resolved(*words), topology, device, own).run()
            Path(folder, f"{name}.rank_{topology.rank}.json").write_text(json.dumps(told))
        peers.gather("done", True)


def fail(folder: str, rank: int) -> None:
    """A run whose rank 1 fails where no collective would tell the others."""

    class Failing(StandIn):
        def __call__(self, *args: Any) -> Any:
            if rank == 1:
                raise RuntimeError("made to fail")
            return super().__call__(*args)

    import aorta.recording.isolated_baselines as baselines
    from aorta.errors import AortaError

    baselines.StandIn = Failing  # type: ignore[misc]
    try:
        # Long enough that rank 0 is still computing when it is told.
        code = run_training(resolved(*TINY, f"training.output_dir={folder}", "baseline.steps=100000"))
    except AortaError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
