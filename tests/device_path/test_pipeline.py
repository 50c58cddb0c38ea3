"""Bubbles of a pipeline against the formulas of its schedules, on the simulated device.

Stages are equal by construction, and transfers take a ten-thousandth of a layer, so each rank waits for as long as the
schedule says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.trainings import COLLECTIVE, WARM_UP, compared, lengths, looped
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STEPS = 3
LAYER_NS = 1_000_000
"""Of one layer forward, and of one backward."""
ONCE_A_LAYER = ("aten::gelu", "aten::gelu_backward", "aten::silu", "aten::silu_backward")
"""Of the ranking model and of the decoder."""
ROUNDING_NS = 100
"""Of some ten marks a step of milliseconds."""


class Case(NamedTuple):
    """A pipeline of `ranks` with `stages` a rank, each of one layer of two; `share` is what its schedule promises.
    `beside`: so many pipelines, each stage sharded over the ranks that have it.
    """

    ranks: int
    micro_batches: int
    mode: str
    schedule: str = "1f1b"
    stages: int = 1
    transfer: tuple[int, float] = (100, 0.0)
    workload: str = "ranking"
    beside: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @property
    def words(self) -> list[str]:
        return [
            f"workload={self.workload}",
            "workload.num_layers=4",
            f"parallel={'pp' if self.beside == 1 else 'fsdp_pp'}",
            f"parallel.schedule={self.schedule}",
            f"parallel.microbatches={self.micro_batches}",
            f"parallel.stages_per_rank={self.stages}",
            f"training.batch_size={self.micro_batches}",
            f"instrument.mode={self.mode}",
        ]

    @property
    def share(self) -> float:
        return (self.ranks - 1) / (self.stages * self.micro_batches + self.ranks - 1)


CASES = [
    *(Case(ranks, count, mode) for ranks, count in ((2, 4), (4, 8)) for mode in ("observe", "dedicated")),
    Case(2, 4, "dedicated", "gpipe"),
    Case(2, 4, "dedicated", "interleaved_1f1b", 2),
    *(Case(2, 4, mode, workload="gpt") for mode in ("observe", "dedicated")),
]
SLOW = [Case(2, 4, mode, transfer=COLLECTIVE) for mode in ("dedicated", "observe")]
"""Transfers take a part of a layer: a bubble contains them."""
ZERO_BUBBLE = Case(2, 4, "dedicated", "zbv_zero_bubble", 2)
BESIDE = [
    *(Case(2, 4, mode, workload=name, beside=2) for mode, name in (("observe", "ranking"), ("dedicated", "gpt"))),
    Case(2, 4, "dedicated", "interleaved_1f1b", 2, beside=2),
    Case(2, 4, "dedicated", transfer=COLLECTIVE, beside=2),
]
EVERY = (*CASES, *SLOW, ZERO_BUBBLE, *BESIDE)
Told = dict[str, list[list[dict[str, Any]]]]


def steps_of(
    topology: Topology, device: torch.device, words: list[str], transfer: tuple[int, float]
) -> list[dict[str, Any]]:
    """Behind the warm-up. Nothing but layers and collectives takes time, so that stages of as many layers are equal."""
    lengths(LAYER_NS, transfer, operators=ONCE_A_LAYER)
    lines: list[Step] = []
    with looped(words, topology, device, lines) as loop:
        for _ in range(STEPS):
            loop.step()
    return compared(lines[WARM_UP:], device, within_ns=ROUNDING_NS, ratio_within=1e-3)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Of each case the steps of each rank; one launch for two ranks and one for four."""
    found: Told = {}
    for ranks in (2, 4):
        cases = {case.name: (case.words, case.transfer) for case in EVERY if case.ranks * case.beside == ranks}
        found |= on_devices(steps_of, tmp_path_factory.mktemp("pipeline"), cases, ranks)
    return found


@pytest.mark.parametrize("case", [*CASES, *BESIDE], ids=lambda case: case.name)
def test_bubbles_and_transfers_are_those_of_the_schedule(told: Told, case: Case) -> None:
    """A rank at an end of the pipeline has one neighbour, one in the middle two; with two stages a rank all are in the
    middle but for the first and the last stage. One all-reduce exchanges the norm of the gradients. Of pipelines beside
    each other, gathering parameters and scattering gradients is communication, and no bubble.
    """
    last = case.ranks * case.stages - 1
    for rank, steps in enumerate(told[case.name]):
        own = [rank // case.beside + turn * case.ranks for turn in range(case.stages)]
        messages = case.micro_batches * sum((stage > 0) + (stage < last) for stage in own)
        for step in steps:
            overlap, kinds = step["overlap"], Counter(step["kinds"])
            assert (kinds.pop("send"), kinds.pop("recv")) == (messages, messages)
            if case.transfer != COLLECTIVE:
                assert overlap["bubble_share"] == pytest.approx(case.share, rel=0.01)
            if case.beside > 1:
                assert min(kinds["allgather"], kinds["reducescatter"]) > 0
            else:
                assert kinds == {"allreduce": 1}
                assert overlap["idle_ms"] == pytest.approx(0, abs=1e-3)
                assert step["lanes_ms"]["bubble"] == overlap["bubble_ms"]


def test_a_zero_bubble_schedule_waits_less_than_1f1b(told: Told) -> None:
    plain = Case(2, 4, "dedicated")
    for steps, usual in zip(told[ZERO_BUBBLE.name], told[plain.name], strict=True):
        for step, other in zip(steps, usual, strict=True):
            assert step["overlap"]["bubble_share"] < 0.6 * other["overlap"]["bubble_share"]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_ratio_and_lengths_are_the_devices_own(told: Told, case: Case) -> None:
    """A bubble is when the computing stream stands still, in dedicated mode, where no transfer runs on that stream
    itself, and without FSDP, whose collectives stop it too. Bubbles and computation are the whole time in a pipeline of
    one: nothing is left to idle time or counts twice.
    """
    for step in (step for steps in told[case.name] for step in steps):
        overlap = step["overlap"]
        assert step["complete"]
        assert step["wrong"] == []
        if case.mode == "dedicated" and case.beside == 1:
            assert overlap["bubble_ms"] * 1e6 == pytest.approx(step["still_ns"], abs=ROUNDING_NS)
        if case.beside == 1 and case.transfer != COLLECTIVE:
            assert overlap["bubble_ms"] + overlap["compute_ms"] == pytest.approx(overlap["pipeline_ms"], rel=1e-3)
