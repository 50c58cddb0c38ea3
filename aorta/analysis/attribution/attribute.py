"""Explains where the difference in exposed communication between two sides of a comparison lies
(docs/dev/attribution.md).

Each side is one dataset or several launches, which are read one at a time. The result is every
breakdown of the difference, and of each side the achieved TFLOP/s, from the model FLOPs of its manifest.

Must not: judge whether there is a difference (`compare` does) or what its cause is (`account` does), hold two launches,
or count recomputation or work that is no matrix product, so that two stacks are measured against the same
work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import (
    UNEXPLAINED,
    Means,
    Totals,
    computing,
    dimensions,
    totals_of,
)
from aorta.analysis.cautions import ONE_RANK
from aorta.documents.comparison import AttributedSide, Attribution
from aorta.documents.dataset import ExposedBreakdown, ExposedRow
from aorta.read.record import Manifest, config_of
from aorta.read.run import ExposedSums

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
_NOTHING: Final = "no step after warm-up whose exposed communication is known"


def attribute(reference: Launches, candidate: Launches) -> Attribution:
    """Compute `attribution` of a comparison. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.

    Raises:
        InputError: a record cannot be read again.
    """
    sides = {
        side: totals_of([launches] if isinstance(launches, LabelledRun) else launches)
        for side, launches in (("reference", reference), ("candidate", candidate))
    }
    unknown = [f"{side}: {totals.host_bound}" for side, totals in sides.items() if totals.host_bound is not None]
    if unknown:
        return Attribution(definition=DEFINITION, reason="; ".join(unknown))
    empty = [side for side, totals in sides.items() if not totals.sums.rank_steps]
    if empty:
        return Attribution(definition=DEFINITION, reason=f"{' and '.join(empty)}: {_NOTHING}")
    means = Means(**sides)
    parallel = means.reference.parallel if means.reference.parallel == means.candidate.parallel else ""
    return Attribution(
        definition=DEFINITION,
        unit="ms per step and rank",
        reason=None,
        difference_ms=means.difference_ms,
        **{side: _side(totals) for side, totals in sides.items()},
        dimensions=dimensions(means, parallel),
        computing=computing(means),
    )


def exposed_breakdown(dataset: LabelledRun) -> ExposedBreakdown:
    """Break the exposed communication of one run down by group, collective, region of the step, part and rank: the
    difference from a run that has none.

    Raises:
        InputError: a record cannot be read again.
    """
    if dataset.pace.basis("overlap_ratio").reason == ONE_RANK:
        return ExposedBreakdown(reason=ONE_RANK)
    totals = totals_of([dataset])
    if totals.host_bound is not None or not totals.sums.rank_steps:
        return ExposedBreakdown(reason=totals.host_bound or _NOTHING)
    means = Means(Totals(sums=ExposedSums(rank_steps=1)), totals)
    found = dimensions(means, totals.parallel)
    rows = {
        name: [ExposedRow(row.what, row.candidate_ms, row.share) for row in found[name]]
        for name in ("group", "collective", "region", "part", "rank")
    }
    steps = totals.sums.rank_steps
    return ExposedBreakdown(reason=None, rank_steps=steps, exposed_ms=means.difference_ms, **rows)


def _side(totals: Totals) -> AttributedSide:
    sums, compute_ms = totals.sums, totals.ms(totals.sums.compute_ns)
    flops, reason = flops_per_rank_step(totals.manifest)
    return AttributedSide(
        launches=totals.launches,
        rank_steps=sums.rank_steps,
        rank_steps_left_out=sums.left_out,
        window_ms=totals.ms(sums.window_ns),
        comm_ms=totals.ms(sums.comm_ns),
        compute_comm_ms=totals.ms(sums.hidden_ns),
        exposed_comm_ms=totals.ms(sums.exposed_ns),
        exposed_comm_ns=sums.exposed_ns,
        compute_ms=compute_ms,
        untold_ns=sum(length_ns for key, length_ns in totals.exposed.items() if key.kind == UNEXPLAINED),
        flops_per_rank_step=flops,
        achieved_tflops=flops / compute_ms / 1e9 if flops is not None and compute_ms else None,
        achieved_tflops_reason=reason if flops is None or compute_ms else "nothing was computed",
    )


NO_MANIFEST: Final = "there is no manifest"
_OWN: Final = "flops_per_step"
"""Key of a manifest's `plan`, for training loops that state their own FLOPs."""
_SIZE_LIMIT: Final = 1 << 48
"""Beyond any tensor's side; six of these multiplied are still a float."""


def flops_per_rank_step(manifest: Manifest | None) -> tuple[float | None, str | None]:
    """Return model FLOPs of one optimizer step on one rank and None, or None and the reason why they are not known.

    A multiply-add counts as 2 operations. A backward pass takes two products for each of the forward pass (the gradient
    of the weight and of the input), but only one where the input needs no gradient. Kaplan et al., "Scaling Laws for
    Neural Language Models", arXiv 2001.08361, section 2.1, counts the same way; a test holds the number to torch's own
    counter.
    """
    if manifest is None:
        return None, NO_MANIFEST
    plan = manifest.get("plan")
    stated = plan.get(_OWN) if isinstance(plan, Mapping) else None
    if isinstance(stated, int | float) and stated > 0:
        return float(stated), None
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
