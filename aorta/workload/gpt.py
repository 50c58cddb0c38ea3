"""A decoder of language models: embedding, pre-norm layers of causal attention and SwiGLU, norm, head; and the same
with a mixture of experts: a router, experts with limited room, and a loss that balances them.

`tokens` [batch, positions] int -> `logits` [batch, positions, vocabulary]. RMSNorm: Zhang and Sennrich, arXiv
1910.07467. Rotary positions: Su et al., arXiv 2104.09864. SwiGLU: Shazeer, arXiv 2002.05202. Grouped heads: Ainslie et
al., arXiv 2305.13245. A stage of a pipeline is the same module with some of the parts.

With experts, shapes do not depend on what the router chooses, so that nothing has to be read from the device: an expert
has `capacity` rows, those without a token are zeros, and tokens that find no room are dropped: only the residual path
takes them on. Top-k routing and capacity: Lepikhin et al., "GShard", arXiv 2006.16668. Must not know how the model is
distributed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from aorta.config.schema import Config, Moe
from aorta.config.workload import Dimensions
from aorta.workload.tasks import InMemory, Model, layers_of

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
INITIAL_STD = 0.02
"""Of GPT-2 (Radford et al., 2019), whose projections into the residual path are smaller by sqrt(2 x layers)."""


def rotated(heads_BHSE: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Return queries or keys with each pair (i, i + half) turned by the position times base^(-i / half), in float32."""
    half = heads_BHSE.shape[-1] // 2
    exponents = torch.arange(half, device=positions_S.device, dtype=torch.float32) / half
    angles_SE = positions_S.float().unsqueeze(-1) * ROTARY_BASE**-exponents  # noqa: N806
    cos, sin = angles_SE.cos(), angles_SE.sin()
    first, second = heads_BHSE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(heads_BHSE.dtype)


class CausalAttention(nn.Module):
    """Each query sees the key of its own position and those before it. Queries are [batch, heads, positions, width];
    keys and values have as many heads or fewer, and as many positions or more: then the queries are those of the last.
    """

    def forward(self, query_BHSE: torch.Tensor, key_BGTE: torch.Tensor, value_BGTE: torch.Tensor) -> torch.Tensor:  # noqa: N803
        grouped = query_BHSE.shape[1] != key_BGTE.shape[1]
        queries, keys = query_BHSE.shape[2], key_BGTE.shape[2]
        if queries == keys:
            return scaled_dot_product_attention(query_BHSE, key_BGTE, value_BGTE, is_causal=True, enable_gqa=grouped)
        # `is_causal` would take the queries for those of the first positions, and torch's `causal_lower_right`
        # fails its tests on ROCm (pytorch#118641). Fused kernels of accelerators that take a mask do not group heads.
        visible_ST = torch.ones(queries, keys, dtype=torch.bool, device=query_BHSE.device).tril(keys - queries)  # noqa: N806
        if grouped:
            times = query_BHSE.shape[1] // key_BGTE.shape[1]
            key_BGTE, value_BGTE = (  # noqa: N806
                tensor.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2) for tensor in (key_BGTE, value_BGTE)
            )
        return scaled_dot_product_attention(query_BHSE, key_BGTE, value_BGTE, attn_mask=visible_ST)


class Attention(nn.Module):
    """Causal self-attention with as many heads as the projections yield on this rank."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        of_keys = dims.num_kv_heads * dims.head_dim
        self.wq = nn.Linear(dims.model_dim, dims.model_dim, bias=False)
        self.wk = nn.Linear(dims.model_dim, of_keys, bias=False)
        self.wv = nn.Linear(dims.model_dim, of_keys, bias=False)
        self.wo = nn.Linear(dims.model_dim, dims.model_dim, bias=False)
        self.core = CausalAttention()
        self._head_dim = dims.head_dim

    def forward(self, hidden_BSD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:  # noqa: N803
        query, key, value = (
            project(hidden_BSD).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        query, key = rotated(query, positions_S), rotated(key, positions_S)
        heads_BHSE = self.core(query, key, value)  # noqa: N806
        out: torch.Tensor = self.wo(heads_BHSE.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.w1 = nn.Linear(dims.model_dim, dims.mlp_hidden_dim, bias=False)
        self.w3 = nn.Linear(dims.model_dim, dims.mlp_hidden_dim, bias=False)
        self.w2 = nn.Linear(dims.mlp_hidden_dim, dims.model_dim, bias=False)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.w2(silu(self.w1(hidden_BSD)) * self.w3(hidden_BSD))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, dims: Dimensions, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dims.model_dim, eps=NORM_EPS)
        self.attention = Attention(dims)
        self.feed_forward_norm = nn.RMSNorm(dims.model_dim, eps=NORM_EPS)
        self.feed_forward = feed_forward

    def forward(self, hidden_BSD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:  # noqa: N803
        hidden_BSD = hidden_BSD + self.attention(self.attention_norm(hidden_BSD), positions_S)  # noqa: N806
        out: torch.Tensor = hidden_BSD + self.feed_forward(self.feed_forward_norm(hidden_BSD))
        return out


class GptModel(Model):
    """`embed`, `layers` (keyed by the index of the layer, as a string), `norm` and `head`; the first and the last two
    are None in a stage of a pipeline that has not got them.
    """

    def __init__(self, dims: Dimensions, feed_forward: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        make = feed_forward or (lambda _index: FeedForward(dims))
        self.embed: nn.Embedding | None = nn.Embedding(dims.vocab_size, dims.model_dim)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(dims, make(index)) for index in range(dims.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(dims.model_dim, eps=NORM_EPS)
        self.head: nn.Linear | None = nn.Linear(dims.model_dim, dims.vocab_size, bias=False)
        into_residual = INITIAL_STD / math.sqrt(2 * dims.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=into_residual if name.endswith(_INTO_RESIDUAL) else INITIAL_STD)

    def pipeline_stage(self, index: int, count: int) -> GptModel:
        """Return an even share of the layers, with the embedding in the first stage, norm and head in the last."""
        stage = GptModel.__new__(GptModel)
        Model.__init__(stage)
        stage.embed = self.embed if index == 0 else None
        kept = layers_of(index, count, len(self.layers))
        stage.layers = nn.ModuleDict({str(layer): self.layers[str(layer)] for layer in kept})
        stage.norm, stage.head = (self.norm, self.head) if index == count - 1 else (None, None)
        return stage

    def forward(self, tokens_BS: torch.Tensor, positions_S: torch.Tensor | None = None) -> torch.Tensor:  # noqa: N803
        """Return logits of tokens; without `embed` the input is hidden states [batch, positions, width], without `head`
        the output is. `positions_S`: given where positions do not count from 0, as on a rank with part of a sequence.
        """
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)  # noqa: N806
        hidden = tokens_BS if self.embed is None else self.embed(tokens_BS)
        for layer in self.layers.values():
            hidden = layer(hidden, positions_S)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)

    def tensor_parallel_parts(self) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        for layer in self.layers.values():
            assert isinstance(layer, DecoderLayer)
            yield layer.attention, {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}
            if isinstance(layer.feed_forward, FeedForward):
                yield layer.feed_forward, {"w1": "columns", "w3": "columns", "w2": "rows"}

    def causal_attentions(self) -> Iterator[nn.Module]:
        for layer in self.layers.values():
            assert isinstance(layer, DecoderLayer)
            yield layer.attention.core

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield `embed`, `layers.0` and so on, `norm`, `head`: those that this stage has."""
        if self.embed is not None:
            yield "embed", self.embed
        for index, layer in self.layers.items():
            yield f"layers.{index}", layer
        if self.norm is not None:
            yield "norm", self.norm
        if self.head is not None:
            yield "head", self.head


_INTO_RESIDUAL = ("wo.weight", "w2.weight", "w2")


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of the logits [batch, positions, vocabulary] against the tokens that follow, in float32."""

    def forward(self, logits_BSV: torch.Tensor, following_BS: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return cross_entropy(logits_BSV.flatten(0, 1).float(), following_BS.flatten().long())


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
    """Sends each token to `top_k` experts, and adds their outputs with the router's probabilities as weights."""

    def __init__(self, dims: Dimensions, settings: Moe, balance_weight: float) -> None:
        super().__init__()
        self.router = nn.Linear(dims.model_dim, settings.num_experts, bias=False)
        self.experts = ExpertFeedForward(dims, settings.num_experts)
        self._count, self._top_k = settings.num_experts, settings.top_k
        self._capacity_factor, self._balance_weight = settings.capacity_factor, balance_weight

    def capacity(self, tokens: int) -> int:
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
        # In a tuple, where nn.Module does not look for children; a strategy may wrap the layers in others.
        self._experts = tuple(mixture.experts for mixture in self.modules() if isinstance(mixture, MixtureOfExperts))

    def experts(self) -> Iterator[nn.Module]:
        yield from self._experts


def _local(parameter: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


REPEATED = 0.75
"""How often a token is followed by its own successor, rather than by any token."""


class Tokens(NamedTuple):
    """Some samples: tokens [B, S + 1] int32; the model sees all but the last and predicts all but the first."""

    tokens: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.tokens[:, :-1],)

    @property
    def target(self) -> torch.Tensor:
        return self.tokens[:, 1:]


class SyntheticText(InMemory[Tokens]):
    """Sequences in which each token has one successor that mostly follows it, so there is something to learn."""

    def __init__(self, config: Config, vocab_size: int, device: torch.device) -> None:
        samples, length = config.dataset.num_samples, config.dataset.sequence_length + 1
        generator = torch.Generator().manual_seed(config.dataset.seed)
        successor = torch.randperm(vocab_size, generator=generator, dtype=torch.int32)
        tokens = torch.randint(vocab_size, (samples, length), generator=generator, dtype=torch.int32)
        follows = torch.rand(samples, length, generator=generator) < REPEATED
        for position in range(1, length):
            before = tokens[:, position - 1].long()
            tokens[:, position] = torch.where(follows[:, position], successor[before], tokens[:, position])
        super().__init__(Tokens(tokens.to(device)))
