"""Bubbles of a pipeline against the formulas of its schedules, on the simulated device.

Stages are equal by construction, and transfers take a ten-thousandth of a layer, so each rank waits for as long as the
schedule says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

from tests.device_path.trainings import COLLECTIVE, seen
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]


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
        strategy = "pp" if self.beside == 1 else "fsdp_pp"
        what = f"{self.workload}-{strategy}-{self.schedule}-{self.ranks}x{self.micro_batches}"
        return f"{what}-{self.mode}-{self.transfer[0]}"

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
    *(Case(ranks, count, "observe") for ranks, count in ((2, 4), (4, 4), (4, 8))),
    *(Case(ranks, count, "dedicated") for ranks, count in ((2, 4), (4, 8))),
    Case(2, 4, "dedicated", "gpipe"),
    Case(2, 4, "dedicated", "interleaved_1f1b", 2),
    *(Case(2, 4, mode, workload="gpt") for mode in ("observe", "dedicated")),
]
SLOW = [Case(2, 4, mode, transfer=COLLECTIVE) for mode in ("dedicated", "observe")]
"""Transfers take a part of a layer: a bubble contains them."""
ROUNDING_NS = 100
"""Of some ten marks a step."""
ZERO_BUBBLE = Case(2, 4, "dedicated", "zbv_zero_bubble", 2)
BESIDE = [
    *(Case(2, 4, mode, workload=name, beside=2) for mode, name in (("observe", "ranking"), ("dedicated", "gpt"))),
    Case(2, 4, "dedicated", "interleaved_1f1b", 2, beside=2),
    Case(2, 4, "dedicated", transfer=COLLECTIVE, beside=2),
]
EVERY = (*CASES, *SLOW, ZERO_BUBBLE, *BESIDE)
Told = dict[str, list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Of each case the steps of each rank; one launch for two ranks and one for four."""
    found: Told = {}
    for ranks in (2, 4):
        cases = {case.name: (case.words, case.transfer) for case in EVERY if case.ranks * case.beside == ranks}
        found |= on_devices(seen, tmp_path_factory.mktemp("pipeline"), cases, ranks)
    return found


def whole(overlap: dict[str, Any]) -> bool:
    """Bubbles and computation are the whole time in the pipeline: nothing is left to idle time or counts twice."""
    return bool(overlap["bubble_ms"] + overlap["compute_ms"] == pytest.approx(overlap["pipeline_ms"], rel=1e-3))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bubbles_and_transfers_are_those_of_the_schedule(told: Told, case: Case) -> None:
    """A rank at an end of the pipeline has one neighbour, one in the middle two; with two stages a rank all are in the
    middle but for the first and the last stage. One all-reduce exchanges the norm of the gradients.
    """
    last = case.ranks * case.stages - 1
    for rank, steps in enumerate(told[case.name]):
        mine = [rank + turn * case.ranks for turn in range(case.stages)]
        boundaries = sum((stage > 0) + (stage < last) for stage in mine)
        for step in steps:
            overlap = step["overlap"]
            assert overlap["bubble_share"] == pytest.approx(case.share, rel=0.01)
            assert whole(overlap)
            assert overlap["idle_ms"] == pytest.approx(0, abs=1e-3)
            assert step["lanes_ms"]["bubble"] == overlap["bubble_ms"]
            assert step["coverage"]
            messages = boundaries * case.micro_batches
            assert Counter(step["kinds"]) == {"send": messages, "recv": messages, "allreduce": 1}


@pytest.mark.parametrize("case", BESIDE, ids=lambda case: case.name)
def test_pipelines_beside_each_other_have_the_bubbles_of_one(told: Told, case: Case) -> None:
    """Gathering parameters and scattering gradients is communication, and no bubble."""
    alone = next(each for each in CASES if (each.ranks, each.micro_batches, each.schedule) == case[:2] + case[3:4])
    for rank, steps in enumerate(told[case.name]):
        for step in steps:
            assert step["coverage"]
            kinds, one = Counter(step["kinds"]), Counter(told[alone.name][rank // case.beside][0]["kinds"])
            assert min(kinds["allgather"], kinds["reducescatter"]) > 0
            assert (kinds["send"], kinds["recv"]) == (one["send"], one["recv"])
            if case.transfer == alone.transfer:
                assert step["overlap"]["bubble_share"] == pytest.approx(case.share, rel=0.01)


def test_a_zero_bubble_schedule_waits_less_than_1f1b(told: Told) -> None:
    plain = Case(2, 4, "dedicated")
    for steps, usual in zip(told[ZERO_BUBBLE.name], told[plain.name], strict=True):
        for step, other in zip(steps, usual, strict=True):
            assert step["coverage"]
            assert step["overlap"]["bubble_share"] < 0.6 * other["overlap"]["bubble_share"]
            assert whole(step["overlap"])


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_ratio_and_lengths_are_the_devices_own(told: Told, case: Case) -> None:
    """A bubble is when the computing stream stands still, in dedicated mode, where no transfer runs on that stream
    itself, and without FSDP, whose collectives stop it too.
    """
    for step in (step for steps in told[case.name] for step in steps):
        overlap, truth = step["overlap"], step["truth"]
        for metric in ("compute_ms", "comm_ms", "compute_comm_ms", "exposed_comm_ms"):
            assert overlap[metric] * 1e6 == pytest.approx(truth[metric], abs=ROUNDING_NS), metric
        assert overlap["overlap_ratio"] == pytest.approx(truth["compute_comm_ms"] / truth["comm_ms"], abs=1e-3)
        if case.mode == "dedicated" and case.beside == 1:
            assert overlap["bubble_ms"] * 1e6 == pytest.approx(step["still_ns"], abs=ROUNDING_NS)
