"""Isolated baselines behind real trainings: training does not notice them, and each is what it says it is.

Run on every rank it trains with them, one case after another, in one launch. Arguments: a folder, then names of
`CASES`. Each leaves `FOLDER/CASE` and `FOLDER/CASE.rank_<r>.json`: digests of everything training depends on, before
and behind its baselines, and behind two more steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from aorta.distributed.peers import Peers
from aorta.distributed.topology import process_group, read_topology, select_device
from aorta.errors import PeerFailed
from aorta.parallel.plan import local_part
from aorta.recording import train as training
from aorta.recording.isolated_baselines import run_baselines
from aorta.recording.rank_process import start_logging
from aorta.recording.train_step import TrainStep
from tests.loop import resolved
from tests.rank_records import RankRecord
from tests.recording.modes import COMPILED
from tests.recording.test_endings import trained_here
from tests.runs import once, program, record, succeeded
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
        "random": (torch.get_rng_state(), random.getstate()),
    }
    return {name: hashlib.sha256(b"|".join(map(_bytes, tree_leaves(part)))).hexdigest() for name, part in parts.items()}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    return local_part(value).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def watched(told: dict[str, Any]) -> Callable[..., Any]:
    """Baselines that digest what training depends on before and after, and train on."""

    def run(step: TrainStep, batches_of: Callable[[], Any], *how: Any) -> None:
        told["before"] = digest(step)
        run_baselines(step, batches_of, *how)
        told["after"] = digest(step)
        batches = batches_of()
        for _ in range(2):
            step.unrecorded(batches)
        told["later"] = digest(step)

    return run


def main(folder: str, *names: str) -> None:
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    device = select_device(resolved(*TINY).config.training.device, topology.local_rank)
    with process_group(topology, device, 120.0) as peers:
        for name in names:
            told: dict[str, Any] = {}
            words = (*TINY, *CASES[name], f"training.output_dir={folder}", f"label={name}")
            training.run_baselines = watched(told)
            own = Peers(dist.PrefixStore(name, peers.store), topology.rank, topology.world_size, 120.0)
            training.TrainingRun(resolved(*words), topology, device, own).run()
            Path(folder, f"{name}.rank_{topology.rank}.json").write_text(json.dumps(told))
        peers.gather("done", True)


pytestmark = pytest.mark.dist
FOUR = ("hsdp", "fsdp_tp")
TWO = tuple(name for name in CASES if name not in FOUR)
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in FOUR else name for name in CASES]
"""Four ranks on two cores take longest."""
STEPS = 3


@pytest.fixture
def folder(tmp_path_factory, name):
    """That of a case. Cases of two ranks run in one launch, those of four in another, when first asked for."""
    ranks, names = (4, FOUR) if name in FOUR else (2, TWO)

    def launch(folder: Path) -> None:
        succeeded(program("tests.recording.test_isolated_baselines", str(folder), *names, ranks=ranks))

    return once(tmp_path_factory, f"isolated-{ranks}", launch)


def ranks(folder: Path, name: str) -> Iterator[tuple[dict[str, Any], RankRecord]]:
    """Of each rank its digests and its record."""
    for rank in range(4 if name in FOUR else 2):
        yield json.loads((folder / f"{name}.rank_{rank}.json").read_text()), record(folder / name, rank)


@pytest.mark.parametrize("name", EVERY)
def test_what_training_depends_on_is_put_back(folder, name):
    for told, _ in ranks(folder, name):
        assert told["after"] == told["before"]
        assert told["later"]["optimizer"] != told["after"]["optimizer"]


@pytest.mark.parametrize("name", EVERY)
def test_the_phases_follow_the_training_and_compute_all_or_issue_all(folder, name):
    phases = ["compute_only"] if name == "none" else ["compute_only", "comm_only"]
    for _, kept in ranks(folder, name):
        assert [(s.phase, s.global_step, s.warmup) for s in kept.isolated] == [
            (phase, number, number < 1) for phase in phases for number in range(STEPS)
        ]
        assert kept.footer.steps_written == len(kept.steps) + len(kept.isolated)
        assert kept.footer.reason == "completed"
        ends = [step.end_mono_ns for step in (*kept.steps, *kept.isolated)]
        assert ends == sorted(ends)
        last = kept.steps[-1]
        blocks = sorted((span.block, span.phase) for span in last.compute)
        for step in kept.isolated[:STEPS]:
            # What passed the seam and what the backends counted: nothing.
            assert (step.coverage.seen, step.coverage.issued, step.coverage.complete) == (0, 0, True)
            assert (step.overlap["comm_ms"], step.overlap["overlap_ratio"]) == (0, None)
            assert sorted((span.block, span.phase) for span in step.compute) == blocks
            assert {span.name for span in step.aux} == {span.name for span in last.aux}
        wanted, *orders = (
            [(row.kind, row.bytes, row.group, row.dtype) for row in step.collectives]
            for step in (last, *kept.isolated[STEPS:])
        )
        for step, order in zip(kept.isolated[STEPS:], orders, strict=True):
            if name == "ddp-after":  # its only step of training was DDP's first, with one bucket for all gradients
                assert sum(row.bytes for row in step.collectives) == sum(row.bytes for row in last.collectives)
            else:
                assert Counter(order) == Counter(wanted)
            assert order == orders[0] != []
            assert step.coverage.complete, step.coverage.reason
            assert (step.compute, step.aux, step.loss, step.lr) == ([], [], None, None)
            assert step.reasons["loss"] == "a comm_only step trains nothing"


@pytest.mark.parametrize("ended_by", ["a signal", "another rank"])
def test_a_phase_ends_with_the_run(tmp_path, monkeypatch, ended_by):
    """That all ranks end it after the same step: `tests/distributed/test_stop_agreement.py`."""
    asked = itertools.count()

    def may_go_on(_peers: Peers) -> None:
        if next(asked) == 5:
            if ended_by == "another rank":
                raise PeerFailed("rank 0 stops: rank 1 failed")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Peers, "raise_if_peer_failed", may_go_on)
    with nullcontext() if ended_by == "a signal" else pytest.raises(PeerFailed):
        assert trained_here(monkeypatch, tmp_path, "baseline.enabled=true", "baseline.steps=100") == 143
    kept = record(tmp_path)
    assert (kept.footer.reason, kept.footer.exit_code) == (("signal", 143) if ended_by == "a signal" else ("error", 5))
    assert (len(kept.steps), {step.phase for step in kept.isolated}) == (8, {"compute_only"})
    assert len(kept.isolated) < 100


if __name__ == "__main__":
    main(*sys.argv[1:])
