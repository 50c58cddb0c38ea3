"""`workload=gpt` and `workload=moe` on every strategy that takes them, on two and four gloo ranks.

Run on every rank it trains them, each from the same seed, in one launch. Arguments: a folder, then names of `WAYS`.
Leaves `rank_<r>.json`: name -> losses, gradient norms, coverage, kinds of collectives and their groups.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aorta.distributed.topology import Topology, process_group, read_topology
from aorta.records.schema import Step
from tests.loop import Loop
from tests.runs import once, program, succeeded
from tests.trained_ways import DECODERS, TINY, Way

STEPS = 2
"""The second loss rests on the first update, and what was prefetched in the first step."""
FEW_EXPERTS = "workload.num_experts=2"
SHARED_EXPERTS = [
    Way("moe", "fsdp_ep", ("parallel.ep_size=4",)),  # nothing left to shard
    Way("moe", "fsdp_ep", ("parallel.ep_size=1",)),  # nothing to share
    Way("moe", "fsdp_ep", (FEW_EXPERTS, "parallel.overlap=false")),  # one on a rank: each is cut
]
REFERENCES = [Way("moe", "ddp"), Way("moe", "ddp", (FEW_EXPERTS,))]
"""Of the same samples, on four ranks too."""
WAYS = list(dict.fromkeys((*DECODERS, *SHARED_EXPERTS, *REFERENCES)))


def main(folder: str, *names: str) -> None:
    topology, device = read_topology(), torch.device("cpu")
    ways = [way for way in WAYS if way.name in names]
    with process_group(topology, device, 120.0):
        told = {way.name: trained(way, topology, device) for way in ways}
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(told))


def trained(way: Way, topology: Topology, device: torch.device) -> dict[str, Any]:
    lines: list[Step] = []
    own = ("training.gradient_accumulation=2", "training.device=cpu")
    loop = Loop((*TINY, *way.words, *own), topology, device, lines.append)
    for _ in range(STEPS):
        loop.step()
    loop.finish()
    return {
        "losses": [line.loss for line in lines],
        "grad_norms": [line.grad_norm for line in lines],
        "coverage": [msgspec.to_builtins(line.coverage) for line in lines],
        "collectives": dict(Counter(row.kind for line in lines for row in line.collectives)),
        "groups": {name: group.ranks for name, group in loop.instrument.groups.items()},
        "blocks": sorted({span.block for line in lines for span in line.compute}),
    }


pytestmark = [pytest.mark.dist, pytest.mark.thorough]  # one launch trains all of them


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Ranks -> what a launch of so many left."""

    def launched(ranks: int, *ways: Way) -> Path:
        words = [way.name for way in (*ways, *(way for way in DECODERS if way.ranks == ranks))]

        def launch(folder: Path) -> None:
            succeeded(program("tests.recording.test_decoders", str(folder), *words, ranks=ranks))

        return once(tmp_path_factory, f"decoders-{ranks}", launch)

    return {1: launched(1, Way("gpt", "none")), 2: launched(2), 4: launched(4, *SHARED_EXPERTS, *REFERENCES)}


@pytest.fixture(scope="module")
def told(folders):
    """Name of a way and ranks -> what each rank saw."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for ranks, folder in folders.items():
        by_rank = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
        found |= {(name, ranks): [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
    return found


@pytest.mark.parametrize("way", [*DECODERS, *SHARED_EXPERTS], ids=lambda way: way.name)
def test_every_collective_and_every_block_is_seen(told, way):
    """That training is the same in every mode: `test_every_strategy`, and `tests/device_path/test_training`."""
    for found in told[way.name, way.ranks]:
        assert len(found["losses"]) == STEPS
        assert None not in found["losses"]
        assert all(coverage["complete"] for coverage in found["coverage"]), found["coverage"]
        assert found["blocks"] == ["embed", "head", "layers.0", "layers.1", "loss", "norm"]


@pytest.mark.parametrize(
    ("name", "ranks", "kinds"),
    [
        # Attention gathers and scatters once a layer and micro-batch.
        ("gpt-cp", 2, {"allgather": STEPS * 2 * 2, "reducescatter": STEPS * 2 * 2}),
        # Tokens travel to experts on other ranks and back: two all-to-alls a layer and micro-batch in each direction.
        ("moe-ep", 2, {"alltoall": STEPS * 2 * 2 * (2 + 2)}),
        ("moe-fsdp_ep", 4, {"alltoall": STEPS * 2 * 2 * (2 + 2)}),
    ],
)
def test_what_travels(told, name, ranks, kinds):
    for rank, seen in enumerate(told[name, ranks]):
        assert {kind: seen["collectives"][kind] for kind in kinds} == kinds
        if name == "moe-fsdp_ep":  # within the group that shares experts, and gathered between the groups
            of_experts, between = [2 * (rank // 2), 2 * (rank // 2) + 1], [rank % 2, rank % 2 + 2]
            assert sorted(seen["groups"].values()) == sorted([[0, 1, 2, 3], of_experts, between])


LIKE_DDP = [
    way
    for way in (*DECODERS, *SHARED_EXPERTS)
    if way.strategy in ("fsdp1", "fsdp", "ep", "fsdp_ep") or way.name in ("gpt-tp", "gpt-fsdp_tp", "moe-hsdp")
]


@pytest.mark.parametrize("way", LIKE_DDP, ids=lambda way: way.name)
def test_what_trains_on_the_samples_of_ddp_trains_like_it(told, way):
    """Losses of each rank and gradient norms: a sum that is a mean, or an expert counted twice, would be far off."""
    match way.strategy:
        case "tp":  # all ranks share a batch
            reference = told["gpt-none", 1] * 2
        case "fsdp_tp":  # two do
            reference = [one for one in told["gpt-ddp", 2] for _ in range(2)]
        case _:
            few = (FEW_EXPERTS,) if FEW_EXPERTS in way.more else ()
            reference = told[Way(way.workload, "ddp", few).name, way.ranks]
    for rank, expected in zip(told[way.name, way.ranks], reference, strict=True):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


def test_ranks_that_share_sequences_train_like_one_that_has_them(told):
    """The mean of their losses is its loss, and the gradients have its norm."""
    pairs = [(told["gpt-cp", 2], told["gpt-none", 1][0])]
    pairs += [(told["gpt-fsdp_cp", 4][2 * at : 2 * at + 2], one) for at, one in enumerate(told["gpt-ddp", 2])]
    for sharing, expected in pairs:
        losses = [rank["losses"] for rank in sharing]
        assert losses[0] != losses[1]
        means = [sum(values) / len(values) for values in zip(*losses, strict=True)]
        assert means == pytest.approx(expected["losses"], rel=1e-5)
        for rank in sharing:
            assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
