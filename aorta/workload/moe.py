"""The decoder with a mixture of experts: a router, experts with limited room, and a loss that balances them.

Shapes do not depend on what the router chooses, so that nothing has to be read from the device: an expert has
`capacity` rows, those without a token are zeros, and tokens that find no room are dropped: only the residual path takes
them on.
Top-k routing and capacity: Lepikhin et al., "GShard", arXiv 2006.16668. Must not know on which rank an expert is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from aorta.config.groups.workload import Dimensions
from aorta.config.schema import Moe
from aorta.workload.gpt import FeedForward, GptModel


class ExpertFeedForward(nn.Module):
    """SwiGLU once an expert: [experts, capacity, width] -> the same. On a mesh, a rank's own experts."""

    def __init__(self, dims: Dimensions, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, dims.model_dim, dims.mlp_hidden_dim))
        self.w3 = nn.Parameter(torch.empty(experts, dims.model_dim, dims.mlp_hidden_dim))
        self.w2 = nn.Parameter(torch.empty(experts, dims.mlp_hidden_dim, dims.model_dim))

    def forward(self, rows_ECD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        w1, w3, w2 = _local(self.w1), _local(self.w3), _local(self.w2)
        return torch.bmm(silu(torch.bmm(rows_ECD, w1)) * torch.bmm(rows_ECD, w3), w2)


class MixtureOfExperts(nn.Module):
    """Sends each token to `top_k` experts, and adds their outputs with the router's probabilities as weights.

    Args:
        dims: of the decoder.
        settings: of the experts.
        balance_weight: of the load-balancing loss of one micro-batch.
    """

    def __init__(self, dims: Dimensions, settings: Moe, balance_weight: float) -> None:
        super().__init__()
        self.router = nn.Linear(dims.model_dim, settings.num_experts, bias=False)
        self.experts = ExpertFeedForward(dims, settings.num_experts)
        self._count, self._top_k = settings.num_experts, settings.top_k
        self._capacity_factor, self._balance_weight = settings.capacity_factor, balance_weight

    def capacity(self, tokens: int) -> int:
        """Return the rows of an expert for so many tokens on a rank."""
        return math.ceil(self._capacity_factor * self._top_k * tokens / self._count)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        tokens_TD = hidden_BSD.flatten(0, 1)  # noqa: N806
        number_E = torch.arange(self._count, device=tokens_TD.device)  # noqa: N806
        share_TE = self.router(tokens_TD).float().softmax(dim=-1)  # noqa: N806
        weight_TK, expert_TK = share_TE.topk(self._top_k, dim=-1)  # noqa: N806
        # All first choices come before the second ones, so those are dropped first; N = K x T.
        expert_N, weight_N = expert_TK.t().flatten(), weight_TK.t().flatten()  # noqa: N806
        chosen_NE = (expert_N.unsqueeze(-1) == number_E).long()  # noqa: N806
        place_N = ((chosen_NE.cumsum(dim=0) - 1) * chosen_NE).sum(dim=-1)  # noqa: N806
        capacity = self.capacity(len(tokens_TD))
        nowhere = self._count * capacity
        slot_N = torch.where(place_N < capacity, expert_N * capacity + place_N, nowhere)  # noqa: N806
        rows = tokens_TD.new_zeros(nowhere + 1, tokens_TD.shape[-1])
        rows = rows.index_copy(0, slot_N, tokens_TD.repeat(self._top_k, 1))
        out_ECD = self.experts(rows[:-1].view(self._count, capacity, -1))  # noqa: N806
        out = torch.cat((out_ECD.flatten(0, 1), out_ECD.new_zeros(1, out_ECD.shape[-1])))
        mixed_ND = out.index_select(0, slot_N) * weight_N.unsqueeze(-1)  # noqa: N806
        mixed_TD = mixed_ND.view(self._top_k, *tokens_TD.shape).sum(dim=0).to(hidden_BSD.dtype)  # noqa: N806
        balance = balance_loss(share_TE, chosen_NE.sum(dim=0))
        mixed: torch.Tensor = _AddLoss.apply(  # type: ignore[no-untyped-call]
            mixed_TD.view_as(hidden_BSD), self._balance_weight * balance
        )
        return mixed


def balance_loss(share_TE: torch.Tensor, sent_E: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Return 1 where all experts have equal shares, at most their number: experts x sum of (share of what was sent x
    mean probability), Fedus et al., "Switch Transformers", arXiv 2101.03961, equation 4.
    """
    return len(sent_E) * (sent_E / sent_E.sum() * share_TE.mean(dim=0)).sum()


class _AddLoss(torch.autograd.Function):
    """Passes a tensor on; in backward a second loss has the gradient 1, as if it were added to the training's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


class MoeModel(GptModel):
    """The decoder with experts in every `expert_interval`-th layer.

    Args:
        dims: of the decoder; an expert is as wide as its feed-forward part.
        settings: of the experts.
        micro_batches: of a step, over which the load-balancing loss is averaged as the training's loss is.
    """

    def __init__(self, dims: Dimensions, settings: Moe, micro_batches: int = 1) -> None:
        def feed_forward(index: int) -> nn.Module:
            if (index + 1) % settings.expert_interval:
                return FeedForward(dims)
            return MixtureOfExperts(dims, settings, settings.balance_weight / micro_batches)

        super().__init__(dims, feed_forward)
        found = ((index, layer.get_submodule("feed_forward")) for index, layer in self.layers.items())
        # In a tuple, where nn.Module does not look for children; a strategy may wrap the layers in others.
        self._found = tuple((index, mixture) for index, mixture in found if isinstance(mixture, MixtureOfExperts))

    def experts(self) -> Iterator[nn.Module]:
        """Yield the experts of each layer."""
        for index, mixture in self._found:
            if index in self.layers:  # and not dropped, as in a stage of a pipeline
                yield mixture.experts


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, where a strategy has distributed the experts."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part
