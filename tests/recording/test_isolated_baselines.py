"""Isolated baselines behind real trainings: training does not notice them, and each is what it says it is.

Run on every rank it trains with them and without, one after another, in one launch. Arguments: a folder, then names of
`CASES`. Each leaves `FOLDER/CASE-with`, those of `COMPARED` also `FOLDER/CASE-without`, all trained on for two more
steps behind the record, and `FOLDER/CASE.rank_<r>.json`: digests of everything training depends on. With `fail` as the
only name, rank 1 fails in its first compute-only step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from aorta.distributed.peers import Peers
from aorta.distributed.topology import process_group, read_topology, select_device
from aorta.errors import AortaError
from aorta.instrument.emulation.stand_in import StandIn
from aorta.recording import isolated_baselines
from aorta.recording import train as training
from aorta.recording.isolated_baselines import Baselines
from aorta.recording.rank_process import start_logging
from aorta.recording.train import run_training
from aorta.recording.train_step import TrainStep
from tests.loop import resolved
from tests.rank_records import RankRecord
from tests.recording.modes import COMPILED
from tests.recording.test_endings import start, wait_for_steps
from tests.runs import HANGS_S, once, program, record, succeeded
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

    isolated_baselines.StandIn = Failing  # type: ignore[misc]
    try:
        # Long enough that rank 0 is still computing when it is told.
        code = run_training(resolved(*TINY, f"training.output_dir={folder}", "baseline.steps=100000"))
    except AortaError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        code = error.exit_code
    sys.exit(code)


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
    """Of each rank its digests and its record with baselines."""
    for rank in range(4 if name in FOUR else 2):
        told = json.loads((folder / f"{name}.rank_{rank}.json").read_text())
        yield told, record(folder / f"{name}-with", rank)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_what_training_depends_on_is_put_back(folder, name):
    for told, _ in ranks(folder, name):
        assert told["with"]["after"] == told["with"]["before"]
        assert told["with"]["later"]["optimizer"] != told["with"]["after"]["optimizer"]


@pytest.mark.parametrize("name", COMPARED)
def test_training_is_bit_identical_with_and_without(folder, name):
    for rank, (told, kept) in enumerate(ranks(folder, name)):
        for when in ("before", "later"):
            assert told["with"][when] == told["without"][when]
        losses = [step.loss for step in kept.steps]
        assert losses == [step.loss for step in record(folder / f"{name}-without", rank).steps]
        assert None not in losses


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


@pytest.mark.thorough
def test_a_signal_during_a_phase_ends_it_on_all_ranks_after_the_same_step(tmp_path):
    run = start(tmp_path, "training.max_steps=4", "baseline=true", "baseline.steps=100000")
    try:
        os.kill(wait_for_steps(tmp_path, 12), signal.SIGTERM)
        run.communicate(timeout=HANGS_S)
    finally:
        run.terminate()  # the launcher ends its ranks
        run.wait(timeout=HANGS_S)
    kept = [record(tmp_path, rank) for rank in (0, 1)]
    for one in kept:
        assert (one.footer.reason, one.footer.signal, one.footer.exit_code) == ("signal", "SIGTERM", 143)
        assert len(one.steps) == 4
        assert {step.phase for step in one.isolated} == {"compute_only"}
    assert len(kept[0].isolated) == len(kept[1].isolated) > 0


@pytest.mark.thorough
def test_a_rank_that_fails_in_a_phase_leaves_nobody_waiting(tmp_path):
    # A hang would be the launch's timeout.
    done = program("tests.recording.test_isolated_baselines", str(tmp_path), "fail", launcher="torchrun")
    assert done.returncode != 0
    kept = [record(tmp_path, rank) for rank in (0, 1)]
    assert [len(one.steps) for one in kept] == [4, 4]
    assert "made to fail" in kept[1].footer.error
    # Told through the store, or ended by the launcher in between, whichever came first.
    told = "rank 1 failed: RuntimeError: made to fail" in (kept[0].footer.error or "")
    assert told or kept[0].footer.reason == "signal"


if __name__ == "__main__":
    main(*sys.argv[1:])
