"""The dimensions of the decoders that `workload.size` names, and how many parameters they make.

Must not import torch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aorta.config.schema import Gpt


class Dimensions(NamedTuple):
    """Of a decoder. The fields are called as in the configuration."""

    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_hidden_dim: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        """Numbers in one head of queries, keys or values."""
        return self.model_dim // self.num_heads


SIZES: Final = {
    "10m": Dimensions(8, 256, 8, 4, 704, 8_000),
    "100m": Dimensions(12, 768, 12, 4, 2_048, 16_000),
    "350m": Dimensions(24, 1_024, 16, 8, 2_816, 32_000),
    "1b": Dimensions(22, 2_048, 32, 4, 5_632, 32_000),
    "3b": Dimensions(26, 3_200, 32, 32, 8_640, 32_000),
    "7b": Dimensions(32, 4_096, 32, 32, 11_008, 32_000),
}
"""Name -> dimensions; 1b, 3b and 7b are those of TinyLlama (arXiv 2401.02385), OpenLLaMA 3B, and Llama 2 7B (arXiv
2307.09288)."""


def dimensions_of(workload: Gpt) -> Dimensions:
    """Those of its size, but for the ones that it sets itself; `workload.size` must be one of `SIZES`."""
    own = {name: value for name in Dimensions._fields if (value := getattr(workload, name)) is not None}
    return SIZES[workload.size]._replace(**own)


def parameters_of_attention(dims: Dimensions) -> int:
    """Queries and output are square; keys and values have a share of the heads. No biases."""
    return 2 * dims.model_dim**2 + 2 * dims.model_dim * dims.num_kv_heads * dims.head_dim


def parameters_of_feed_forward(dims: Dimensions) -> int:
    """SwiGLU's three matrices."""
    return 3 * dims.model_dim * dims.mlp_hidden_dim


def parameter_count(dims: Dimensions) -> int:
    """Of the whole decoder: two norms a layer and one at the end; embedding and head are not tied."""
    layer = parameters_of_attention(dims) + parameters_of_feed_forward(dims) + 2 * dims.model_dim
    return dims.num_layers * layer + dims.model_dim + 2 * dims.vocab_size * dims.model_dim
