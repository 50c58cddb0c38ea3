"""Whole runs on two gloo ranks: what is hidden, how accumulation trains, and runs that observe
one of several steps. Learning rate and clipping by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from aorta.config.schema import Config, Optimizer, Ranking, Scheduler
from aorta.instrument.sampling import LEAST_OBSERVED, drawn, seed_of
from aorta.recording.train_step import clip, make_optimizer, make_schedule
from aorta.timeline.overlap import NOT_SAMPLED
from aorta.workload import task_of
from tests.known_answers.again import undisturbed
from tests.runs import losses, record, train

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "allreduce"), ("fsdp", "allgather")])
def test_with_overlap_part_of_it_is_hidden_and_without_nothing(tmp_path_factory, strategy, kind):
    # The default sizes: a small model's all-reduce can end before the next block begins to compute.
    sizes = ("workload.model_dim=128", "workload.num_layers=4", "workload.mlp_hidden_dim=512", "training.max_steps=16")

    def trained(folder: Path, overlap: str) -> Path:
        train(folder, f"parallel={strategy}", f"parallel.overlap={overlap}", *sizes)
        return folder

    def hides(folder: Path) -> None:
        for rank in (0, 1):
            on = [s for s in record(folder, rank).steps if not s.warmup]
            assert any((s.overlap[f"compute_{kind}_ms"] or 0) > 0 and (s.overlap["overlap_ratio"] or 0) > 0 for s in on)

    with_overlap = undisturbed(tmp_path_factory, "hides", lambda folder: trained(folder / "on", "true"), hides)
    hides(with_overlap)
    without = trained(with_overlap.with_name("off"), "false")
    for rank in (0, 1):
        on, off = ([s for s in record(folder, rank).steps if not s.warmup] for folder in (with_overlap, without))
        assert all(s.overlap["overlap_ratio"] == 0 for s in off)
        assert all(s.overlap[f"exposed_{kind}_ms"] == s.overlap[f"{kind}_ms"] for s in off)
        # The same buckets, the same arithmetic: only the time moved.
        rows = [sorted((c.kind, c.bytes) for c in steps[-1].collectives) for steps in (on, off)]
        assert rows[0] == rows[1]
    assert losses(with_overlap) == losses(without)


def test_accumulated_micro_batches_train_like_one_batch(tmp_path):
    words = ("workload.dropout=0", "scheduler.warmup_steps=1", "training.max_steps=6")
    train(tmp_path / "whole", "training.batch_size=8", *words)
    train(tmp_path / "parts", "training.batch_size=4", "training.gradient_accumulation=2", *words)

    def mean_losses(folder: Path) -> list[float]:
        return [(a or 0) / 2 + (b or 0) / 2 for a, b in zip(losses(folder, 0), losses(folder, 1), strict=True)]

    # The same samples a step over both ranks, summed in another order.
    assert mean_losses(tmp_path / "parts") == pytest.approx(mean_losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize(
    ("warmup", "total", "rates"),
    [
        (4, 10, [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]),
        (0, 2, [1.0, 0.5, 0]),
        (2, None, [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["to the peak and to zero", "from the peak", "without an end"],
)
def test_warm_up_is_linear_to_the_peak_and_decay_linear_to_zero(warmup, total, rates):
    scheduler = Scheduler(warmup_steps=warmup, total_steps=total)
    config = Config(optimizer=Optimizer(lr=1.0), workload=Ranking(), scheduler=scheduler)
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))], task_of(config))
    schedule = make_schedule(optimizer, config)
    for rate in rates:
        assert schedule.get_last_lr() == [pytest.approx(rate)]
        optimizer.step()
        schedule.step()


def test_clipping_scales_to_the_norm_and_returns_the_one_before():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip(nn.ParameterList(parameters), 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-5)
    assert parameters[2].grad is None


EVERY, STEPS = 4, 24


def test_ranks_observe_the_same_steps_and_train_as_ever(tmp_path):
    """Of FSDP, and of both modes on a device: `tests/device_path/test_training.py`."""
    more = ("parallel=ddp", f"training.max_steps={STEPS}", "training.checkpoint_interval=10")
    train(tmp_path / "whole", *more)
    train(tmp_path / "sampled", *more, f"instrument.every={EVERY}")
    run_id = json.loads((tmp_path / "sampled" / "run.json").read_text())["run_id"]
    expected = [number for number in range(STEPS) if drawn(number, EVERY, seed_of(run_id))]
    numbers = []
    for rank in range(2):
        whole, sampled = (record(tmp_path / side, rank) for side in ("whole", "sampled"))
        assert [line.loss for line in sampled.steps] == [line.loss for line in whole.steps]
        assert [line.global_step for line in sampled.steps if line.coverage.complete] == expected
        assert sampled.header.every == str(EVERY)
        for line, as_ever in zip(sampled.steps, whole.steps, strict=True):
            if line.global_step in expected:
                assert line.drawn == EVERY
                assert [row.kind for row in line.collectives] == [row.kind for row in as_ever.collectives]
                assert None not in (line.overlap["compute_ms"], line.overlap["comm_ms"])
            else:
                assert (line.coverage.reason, line.coverage.unwatched) == (NOT_SAMPLED, 0)
                assert set(line.overlap) == {"window_ms", "aorta_ms"}
                assert (line.collectives, line.compute, line.stalls, line.aux) == ([], [], [], [])
        numbers.append([(row.group, row.seq) for line in sampled.steps for row in line.collectives])
    # Collectives are numbered in every step, so that those of ranks match.
    assert numbers[0] == numbers[1]
    assert len({*numbers[0]}) == len(numbers[0])
    assert max(seq for _, seq in numbers[0]) > 2 * len(numbers[0])


def test_auto_chooses_one_number_for_all_ranks_and_says_which(tmp_path):
    """By what: `tests/instrument/test_sampling.py`."""
    done = train(tmp_path, "training.max_steps=40", "instrument.every=auto", "telemetry.warmup_steps=2")
    manifest = json.loads((tmp_path / "run.json").read_text())
    sampling = manifest["sampling"]
    every, first, seed = (sampling[name] for name in ("every", "from_step", "seed"))
    assert (sampling["asked"], seed) == ("auto", seed_of(manifest["run_id"]))
    assert f"instrument.every=auto: 1 in {every} steps is observed" in done.stderr + done.stdout
    assert sampling["observed_us"] > sampling["passed_us"] > 0
    for steps in (record(tmp_path, rank).steps for rank in range(2)):
        observed = [line.global_step for line in steps if line.coverage.complete]
        assert observed[:LEAST_OBSERVED] == list(range(LEAST_OBSERVED))
        assert [at for at in observed if at >= first] == [at for at in range(first, 40) if drawn(at, every, seed)]
