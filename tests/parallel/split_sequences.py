"""Run on every rank: decoders whose sequences the ranks share, against one rank that has the whole sequences.

Ends with an error where loss or gradients differ by more than what float64 (float32 where positions are turned) leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from aorta.config.schema import CP, FSDPCP, Precision
from aorta.config.workload import Dimensions
from aorta.distributed.topology import process_group, read_topology
from aorta.parallel import context, fsdp
from aorta.parallel.plan import ParallelizedModel
from aorta.workload.gpt import GptModel

CPU = torch.device("cpu")
SAMPLES, CHUNK, VOCABULARY = 3, 3, 50


def main() -> None:
    """Grouped heads and others, under every strategy that fits the ranks."""
    topology = read_topology()
    with process_group(topology, CPU, 120.0):
        for kv_heads in (2, 4):
            dims = Dimensions(2, 32, 4, kv_heads, 48, VOCABULARY)
            compare(dims, topology.world_size, replicated)
            if topology.world_size == 4:
                compare(dims, 2, sharded)


def replicated(model: GptModel) -> ParallelizedModel:
    """Copied to every rank."""
    return context.parallelize(model, model.causal_attentions(), CP(), Precision.none, CPU)


def sharded(model: GptModel) -> ParallelizedModel:
    """Over all four ranks, of which two share sequences."""
    settings = FSDPCP(cp_size=2)
    return fsdp.parallelize(
        model, list(model.blocks()), (), (), model.causal_attentions(), settings, Precision.none, CPU
    )


def compare(dims: Dimensions, sharing: int, parallelize: Callable[[GptModel], ParallelizedModel]) -> None:
    """The mean of the ranks' losses and every gradient."""
    torch.manual_seed(0)
    alone = GptModel(dims).double()
    over_ranks = parallelize(deepcopy(alone))
    assert over_ranks.data_size * sharing == dist.get_world_size()
    tokens = torch.randint(VOCABULARY, (over_ranks.data_size, SAMPLES, 2 * sharing * CHUNK + 1))
    expected = loss_of(alone(tokens.flatten(0, 1)[:, :-1]), tokens.flatten(0, 1)[:, 1:])
    expected.backward()

    own = tokens[over_ranks.data_rank]
    inputs, target = over_ranks.cut((own[:, :-1],), own[:, 1:])
    assert target.shape == (SAMPLES, 2 * CHUNK)
    with over_ranks.micro_batch(True):
        loss = loss_of(over_ranks.module(*inputs), target)
        loss.backward()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-6, atol=0)
    for (name, parameter), reference in zip(over_ranks.module.named_parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(
            whole, reference.grad, rtol=1e-5, atol=1e-8, msg=lambda why, name=name: f"{name}: {why}"
        )


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """In the type of the logits."""
    return cross_entropy(logits.flatten(0, 1), following.flatten())


if __name__ == "__main__":
    main()
