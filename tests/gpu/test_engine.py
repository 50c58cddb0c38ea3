"""The engine's own steps on one card: nothing waits for the device, every collective is seen, nothing changes."""

from __future__ import annotations

import warnings

import pytest
import torch

from aorta.distributed import cuda
from aorta.distributed.topology import read_topology
from aorta.records.schema import Step
from aorta.runner.isolated_baselines import Baselines
from tests.gpu.device import MODES, needs_gpu
from tests.loop import Loop

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning"),
    # FSDP warns that the scorer returns a view; nothing is written into it.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
SMALL = ("training.device=cuda", "workload.num_layers=2", "dataset.num_samples=256", "training.log_interval=1")
STRATEGIES = ("ddp", "fsdp")


def loop(device: torch.device, lines: list[Step], strategy: str, mode: str) -> Loop:
    words = (*SMALL, f"parallel={strategy}", f"instrument.mode={mode}")
    return Loop(words, read_topology(), device, lines.append)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_step_waits_for_the_device(
    device: torch.device, strategy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Step] = []
    one = loop(device, lines, strategy, mode)
    for _ in range(3):  # communicators, buckets and page-locked memory are made
        one.step()

    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the loop synchronised with the device")

    # torch's own check sees its operators; explicit waits have to be caught by name.
    with monkeypatch.context() as caught:
        caught.setattr(torch.cuda, "synchronize", forbidden)
        caught.setattr(torch.cuda.Event, "synchronize", forbidden)
        caught.setattr(torch.cuda.Stream, "synchronize", forbidden)
        with cuda.no_synchronisation():
            for _ in range(10):
                one.step()
    one.finish()
    assert len(lines) == 13
    assert all(line.loss is not None for line in lines)


def test_the_check_notices_a_synchronisation(device: torch.device) -> None:
    with cuda.no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=device).item()


def test_no_warning_of_torch_s_is_left_over(device: torch.device) -> None:
    """torch warns once a process that this mode is a prototype, and a warning is an error in tests."""
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said, cuda.no_synchronisation():
            warnings.simplefilter("always")
        assert said == []


@pytest.mark.parametrize("mode", ["dedicated", "observe"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_collective_is_seen(device: torch.device, strategy: str, mode: str) -> None:
    lines: list[Step] = []
    one = loop(device, lines, strategy, mode)
    for _ in range(6):
        one.step()
    one.finish()
    assert [line.coverage.reason for line in lines] == [None] * 6
    assert all(line.coverage.complete for line in lines)
    if strategy == "ddp":  # FSDP2 exchanges nothing with itself
        assert all(line.coverage.seen for line in lines)
    rows = [row for line in lines for row in line.collectives]
    assert {row.end_source for row in rows} <= {"event"}
    assert all(row.start_ns is not None and row.end_ns is not None and row.end_ns >= row.start_ns for row in rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_the_same_in_every_mode(device: torch.device, strategy: str) -> None:
    losses = {}
    for mode in MODES:
        lines: list[Step] = []
        one = loop(device, lines, strategy, mode)
        for _ in range(10):
            one.step()
        one.finish()
        losses[mode] = [line.loss for line in lines]
    assert losses["dedicated"] == losses["observe"] == losses["off"]


def test_a_pause_leaves_nothing_on_the_path(device: torch.device) -> None:
    lines: list[Step] = []
    one = loop(device, lines, "ddp", "dedicated")
    one.step()
    with one.instrument.paused():
        one.step()
    one.step()
    one.finish()
    assert [bool(line.collectives) for line in lines] == [True, False, True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_isolated_baselines_leave_training_as_it_was(device: torch.device, strategy: str) -> None:
    lines: list[Step] = []
    one = loop(device, lines, strategy, "dedicated")
    for _ in range(3):
        one.step()
    parts = [getattr(p, "_local_tensor", p).detach() for p in one.model.parameters()]
    before = [part.clone() for part in parts]
    Baselines(one.step_of_training, one.batches, lambda: True, steps=4, warmup=1).run()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
    one.finish()
    compute = [line for line in lines if line.phase == "compute_only"]
    comm = [line for line in lines if line.phase == "comm_only"]
    assert len(compute) == 4
    assert all(line.coverage.complete and line.coverage.issued == 0 for line in compute)
    wanted = sorted((row.kind, row.bytes) for row in lines[2].collectives)
    assert len(comm) == (4 if wanted else 0)  # FSDP2 exchanges nothing with itself
    assert all(sorted((row.kind, row.bytes) for row in line.collectives) == wanted for line in comm)
