"""Rules of `workload=...`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from aorta.config.rules.bounds import at_least
from aorta.config.schema import Config, Ranking, Rpc


def workload_rules(config: Config) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.workload, Ranking):
        yield from _ranking_rules(config.workload)
    if isinstance(config.workload, Rpc):
        yield from _rpc_rules(config.workload)


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


def _rpc_rules(workload: Rpc) -> Iterator[str]:
    names = ("num_worker_threads", "windows", "calls", "tensor_size")
    yield from at_least(1, {f"workload.{name}": getattr(workload, name) for name in names})
    if not 0 < workload.timeout_s < math.inf:
        yield f"workload.timeout_s={workload.timeout_s}: must be greater than 0 and finite"
    try:
        distinct = len({workload.worker_name.format(rank=rank, number=rank + 1) for rank in range(2)}) == 2
    except (KeyError, IndexError, ValueError):
        distinct = False
    if not distinct:
        yield f"workload.worker_name={workload.worker_name!r}: a name with {{rank}} or {{number}} in it, no other {{}}"
