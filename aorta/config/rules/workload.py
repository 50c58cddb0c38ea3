"""Rules of `workload=...`."""

from __future__ import annotations

from collections.abc import Iterator

from aorta.config.rules.bounds import at_least
from aorta.config.schema import Config, Ranking


def workload_rules(config: Config) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.workload, Ranking):
        yield from _ranking_rules(config.workload)


def _ranking_rules(workload: Ranking) -> Iterator[str]:
    yield from at_least(
        1,
        {
            f"workload.{name}": getattr(workload, name)
            for name in (
                "model_dim",
                "num_heads",
                "num_layers",
                "mlp_hidden_dim",
                "vocab_size",
                "embedding_dim",
                "categorical_features",
                "dense_features",
            )
        },
    )
    if workload.num_heads >= 1 and workload.model_dim % workload.num_heads:
        yield f"workload.model_dim={workload.model_dim}: must be a multiple of workload.num_heads={workload.num_heads}"
    if not 0 <= workload.dropout < 1:
        yield f"workload.dropout={workload.dropout}: must be in [0, 1)"
