"""Counts the model FLOPs of one optimizer step on one rank, from which the achieved TFLOP/s follow.

Reads the manifest (`run.json`) and returns a number, or the reason why there is none. A multiply-add counts as 2
operations. A backward pass takes two products for each of the forward pass (the gradient of the weight and of the
input), but only one where the input needs no gradient. Kaplan et al., "Scaling Laws for Neural Language Models", arXiv
2001.08361, section 2.1, counts the same way; a test holds the number to torch's own counter. Must not: count
recomputation, or work that is no matrix product; these are model FLOPs, so that two stacks are measured against the
same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.load.run_facts import Manifest, config_of

NO_MANIFEST: Final = "there is no manifest"
_OWN: Final = "flops_per_step"
"""Key of a manifest's `plan`, for training loops that state their own FLOPs."""
_SIZE_LIMIT: Final = 1 << 48
"""Beyond any tensor's side; six of these multiplied are still a float."""


def flops_per_rank_step(manifest: Manifest | None) -> tuple[float | None, str | None]:
    """Model FLOPs of one optimizer step on one rank and None, or None and the reason why they are not known."""
    if manifest is None:
        return None, NO_MANIFEST
    plan = manifest.get("plan")
    told = plan.get(_OWN) if isinstance(plan, Mapping) else None
    if isinstance(told, int | float) and told > 0:
        return float(told), None
    config = config_of(manifest)
    workload, parallel = (config.get(name) for name in ("workload", "parallel"))
    name = workload.get("name") if isinstance(workload, Mapping) else None
    if name != "ranking":
        return None, f"AORTA does not count the FLOPs of workload {name!r}, and the manifest's plan has no {_OWN}"
    strategy = parallel.get("strategy") if isinstance(parallel, Mapping) else None
    if strategy in ("tp", "fsdp_tp"):
        return None, f"parallel={strategy}: ranks share a layer, and how much of it each computes is not counted"
    if strategy in ("pp", "fsdp_pp"):
        return None, f"parallel={strategy}: ranks compute different layers, and which each computes is not counted"
    try:
        return _ranking(config), None
    except (KeyError, TypeError) as error:
        return None, f"the manifest's configuration lacks a size that the count needs ({error})"


def _ranking(config: Mapping[str, Any]) -> float:
    def size(group: str, name: str) -> int:
        value = config[group][name]
        if type(value) is not int or not 0 <= value < _SIZE_LIMIT:
            raise TypeError(f"{group}.{name} is no size: {str(value)[:40]}")
        return value

    items, width = size("dataset", "sequence_length"), size("workload", "model_dim")
    layer = 4 * width * width + 2 * items * width + 2 * width * size("workload", "mlp_hidden_dim")
    forward = size("workload", "num_layers") * layer + size("workload", "embedding_dim") * width + width
    of_data = size("workload", "dense_features") * width  # the features are data: no gradient goes to them
    multiply_adds = 3 * forward + 2 * of_data
    samples = size("training", "batch_size") * size("training", "gradient_accumulation")
    return float(2 * multiply_adds * items * samples)


def tflops(flops: float | None, compute_ms: float) -> float | None:
    """Achieved TFLOP/s (1e12 a second) while computing; None where the work is not known, or nothing computed."""
    return None if flops is None or not compute_ms else flops / compute_ms / 1e9
