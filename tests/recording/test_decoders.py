"""`workload=gpt` and `workload=moe` on every strategy that takes them, on two and four gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recording.decoders import REFERENCES, SHARED_EXPERTS, STEPS
from tests.runs import once, program, succeeded
from tests.trained_ways import DECODERS, Way

pytestmark = [pytest.mark.dist, pytest.mark.thorough]  # one launch trains all of them


def of_four(name: str) -> str:
    """What a way that is trained on two ranks is called where it was trained on four."""
    return f"{name} of four"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Ranks -> what a launch of so many left: one for two, and one for four."""
    found = {}
    for ranks in (2, 4):
        ways = [way for way in DECODERS if way.ranks == ranks]
        ways += [*SHARED_EXPERTS[1:], *REFERENCES] if ranks == 4 else []
        found[ranks] = launched(tmp_path_factory, ranks, *(way.name for way in ways))
    return found


def launched(factory: pytest.TempPathFactory, ranks: int, *names: str) -> Path:
    def launch(folder: Path) -> None:
        succeeded(program("tests.recording.decoders", str(folder), *names, ranks=ranks))

    return once(factory, f"decoders-{ranks}", launch)


@pytest.fixture(scope="module")
def told(folders: dict[int, Path]) -> dict[str, list[dict[str, Any]]]:
    """Of each way what each rank saw."""
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, folder in folders.items():
        by_rank = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
        for name in by_rank[0]:
            found[of_four(name) if name in found else name] = [of_rank[name] for of_rank in by_rank]
    return found


every_way = pytest.mark.parametrize("way", [*DECODERS, *SHARED_EXPERTS[1:]], ids=lambda way: way.name)


@every_way
def test_every_collective_and_every_block_is_seen(told: dict[str, Any], way: Way) -> None:
    """That training is the same in every mode: `test_every_strategy`, and `tests/device_path/test_training`."""
    for found in told[way.name]:
        assert len(found["losses"]) == STEPS
        assert None not in found["losses"]
        assert all(coverage["complete"] for coverage in found["coverage"]), found["coverage"]
        assert found["blocks"] == ["embed", "head", "layers.0", "layers.1", "loss", "norm"]


SAMPLES_OF_DDP = [
    way
    for way in DECODERS
    if way.strategy in ("fsdp1", "fsdp", "ep") or way.name in ("gpt-tp", "gpt-fsdp_tp", "moe-hsdp")
]


@pytest.mark.parametrize("way", SAMPLES_OF_DDP, ids=lambda way: way.name)
def test_what_trains_on_the_samples_of_ddp_trains_like_it(
    told: dict[str, Any], alone: dict[str, Any], way: Way
) -> None:
    """Losses of each rank and gradient norms: a sum that is a mean, or an expert counted twice, would be far off."""
    ddp = f"{way.workload}-ddp"
    match way.strategy:
        case "tp":  # all ranks share a batch
            reference = [alone] * 2
        case "fsdp_tp":  # two do
            reference = [one for one in told[ddp] for _ in range(2)]
        case _:
            reference = told[of_four(ddp) if way.ranks == 4 else ddp]
    for rank, expected in zip(told[way.name], reference, strict=True):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank saw that trained on its own."""
    folder = launched(tmp_path_factory, 1, "gpt-none")
    found: dict[str, Any] = json.loads((folder / "rank_0.json").read_text())["gpt-none"]
    return found


def test_ranks_that_share_sequences_train_like_one_that_has_them(told: dict[str, Any], alone: dict[str, Any]) -> None:
    """The mean of their losses is its loss, and the gradients have its norm."""
    pairs = [(told["gpt-cp"], alone)]
    pairs += [(told["gpt-fsdp_cp"][2 * at : 2 * at + 2], one) for at, one in enumerate(told["gpt-ddp"])]
    for sharing, expected in pairs:
        losses = [rank["losses"] for rank in sharing]
        assert losses[0] != losses[1]
        means = [sum(values) / len(values) for values in zip(*losses, strict=True)]
        assert means == pytest.approx(expected["losses"], rel=1e-5)
        for rank in sharing:
            assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


def test_attention_gathers_and_scatters_once_a_layer_and_micro_batch(told: dict[str, Any]) -> None:
    kinds = told["gpt-cp"][0]["collectives"]
    assert kinds["allgather"] == kinds["reducescatter"] == STEPS * 2 * 2


def test_tokens_travel_to_experts_on_other_ranks_and_back(told: dict[str, Any]) -> None:
    # Two all-to-alls a layer and micro-batch in forward, two in backward.
    assert told["moe-ep"][0]["collectives"]["alltoall"] == STEPS * 2 * 2 * (2 + 2)
    assert "alltoall" not in told["moe-ddp"][0]["collectives"]


@pytest.mark.parametrize("way", SHARED_EXPERTS, ids=lambda way: way.name)
def test_sharded_experts_train_like_ddp(told: dict[str, Any], folders: dict[int, Path], way: Way) -> None:
    """Losses and norms of every rank; and at the end every element of every parameter."""
    plain = REFERENCES["workload.num_experts=2" in way.more]
    reference = told[of_four(plain.name) if plain in DECODERS else plain.name]
    for rank, other in zip(told[way.name], reference, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-5)
    expected, found = (torch.load(folders[4] / f"{one.name}.pt", weights_only=True) for one in (plain, way))
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-6, msg=name)


def test_sharded_experts_travel_within_their_group_and_are_gathered_between_the_groups(told: dict[str, Any]) -> None:
    for rank, seen in enumerate(told["moe-fsdp_ep"]):
        assert seen["collectives"]["alltoall"] == STEPS * 2 * 2 * (2 + 2)
        of_experts, between = [2 * (rank // 2), 2 * (rank // 2) + 1], [rank % 2, rank % 2 + 2]
        assert sorted(seen["groups"].values()) == sorted([[0, 1, 2, 3], of_experts, between])
