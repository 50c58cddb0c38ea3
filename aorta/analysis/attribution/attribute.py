"""Explains where the difference in exposed communication between two sides of a comparison lies
(docs/dev/attribution.md).

Each side is one dataset or several launches, which are read one at a time: one sentence, the ranked causes, and every
breakdown of the difference; and of each side the achieved TFLOP/s, from the model FLOPs of its manifest. A multiply-add
counts as 2 operations. A backward pass takes two products for each of the forward pass (the gradient of the weight and
of the input), but only one where the input needs no gradient. Kaplan et al., "Scaling Laws for Neural Language Models",
arXiv 2001.08361, section 2.1, counts the same way; a test holds the number to torch's own counter.

Must not: judge whether there is a difference (`compare` does), hold two launches, or count recomputation or work that
is no matrix product, so that two stacks are measured against the same work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.attribution_sentence import sentence
from aorta.analysis.attribution.breakdown import Means, computing, dimensions, ranked, stragglers
from aorta.analysis.attribution.keys import (
    BUBBLE_PART,
    TRANSFER,
    UNEXPLAINED,
    UNKNOWN_PART,
    WAIT,
    ExposedKey,
    LateRank,
    Totals,
)
from aorta.analysis.documents.comparison import AttributedSide, Attribution, AttributionRow, FactDifference
from aorta.analysis.documents.dataset import ExposedBreakdown, ExposedRow
from aorta.analysis.exposed import RankInput, exposed_of_rank
from aorta.analysis.frames import Exposed, Ints
from aorta.analysis.groups import Groups
from aorta.analysis.host_bound import ONE_RANK
from aorta.analysis.load.engines import Engine, Local, progress
from aorta.analysis.load.records import Manifest, config_of
from aorta.analysis.run import ExposedSums, Run
from aorta.errors import InputError

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
_NO_SETTING: Final = ("label", "instrument.interceptor", "environment.LD_PRELOAD", "environment.LD_LIBRARY_PATH")
"""Differences that no setting makes: a name, what was compiled on the machine, and where libraries come from."""
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_KERNELS: Final = "host-bound: the profiler's kernels say how much is exposed, but not in which block or collective"
_NOTHING: Final = "no step after warm-up whose exposed communication is known"


class _Seen:
    """Passes launches on one by one and keeps the facts of the first, so that none has to be held or read again. Ends
    with the first whose marks do not bear its exposed communication and its computation: `host_bound` says why.
    """

    def __init__(self, launches: Launches) -> None:
        self._launches = [launches] if isinstance(launches, LabelledRun) else launches
        self.parallel = ""
        self.flops: tuple[float | None, str | None] = (None, _NOTHING)
        self.host_bound: str | None = None

    def __iter__(self) -> Iterator[LabelledRun]:
        first = True
        for dataset in self._launches:
            if first:
                self.parallel = dataset.run.source.parallel or ""
                self.flops = flops_per_rank_step(dataset.run.manifest)
                first = False
            for basis in map(dataset.pace.basis, _RESTS_ON):
                if basis.source != "marks":
                    self.host_bound = basis.reason or _KERNELS
            if self.host_bound is not None:
                return
            yield dataset
            del dataset  # otherwise the next launch is loaded while this one is still in memory


def attribute(
    reference: Launches,
    candidate: Launches,
    engine: Engine | None = None,
    differences: Sequence[FactDifference] = (),
) -> Attribution:
    """Compute `attribution` of a comparison. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.
        engine: where records are read again; by default this machine.
        differences: `manifest_differences` of it; all but those of the headers are named in the sentence.

    Raises:
        InputError: a record cannot be read again.
    """
    seen = {"reference": _Seen(reference), "candidate": _Seen(candidate)}
    totals = {side: totals_of(launches, engine) for side, launches in seen.items()}
    unknown = [f"{side}: {launches.host_bound}" for side, launches in seen.items() if launches.host_bound is not None]
    if unknown:
        return Attribution(definition=DEFINITION, sentence=None, reason="; ".join(unknown))
    empty = [side for side, side_totals in totals.items() if not side_totals.sums.rank_steps]
    if empty:
        return Attribution(definition=DEFINITION, sentence=None, reason=f"{' and '.join(empty)}: {_NOTHING}")
    means = Means(totals["reference"], totals["candidate"])
    alike = {launches.parallel for launches in seen.values()}
    parallel = alike.pop() if len(alike) == 1 else ""
    found = dimensions(means, parallel)
    late, blocks = stragglers(means), computing(means)
    text, lead = sentence(means, found, blocks, late, _configured(differences), parallel)
    return Attribution(
        definition=DEFINITION,
        unit="ms per step and rank",
        sentence=text,
        reason=None,
        difference_ms=means.difference_ms,
        **{side: _side(means, side_totals, seen[side]) for side, side_totals in totals.items()},
        causes=ranked(found, late, lead),
        dimensions=found._asdict(),
        stragglers=late,
        computing=blocks,
    )


def exposed_breakdown(dataset: LabelledRun, engine: Engine | None = None) -> ExposedBreakdown:
    """Break the exposed communication of one run down by group, collective, region of the step, part and rank: the
    difference from a run that has none.

    Raises:
        InputError: a record cannot be read again.
    """
    if dataset.pace.basis("overlap_ratio").reason == ONE_RANK:
        return ExposedBreakdown(reason=ONE_RANK)
    seen = _Seen(dataset)
    totals, nothing = totals_of(seen, engine), Totals(sums=ExposedSums(rank_steps=1))
    if seen.host_bound is not None:
        return ExposedBreakdown(reason=seen.host_bound)
    if not totals.sums.rank_steps:
        return ExposedBreakdown(reason=_NOTHING)
    means = Means(nothing, totals)
    found = dimensions(means, seen.parallel)

    def rows(listed: Sequence[AttributionRow]) -> list[ExposedRow]:
        return [ExposedRow(row.what, row.candidate_ms, row.share) for row in listed]

    return ExposedBreakdown(
        reason=None,
        rank_steps=totals.sums.rank_steps,
        exposed_ms=means.difference_ms,
        group=rows(found.group),
        collective=rows(found.collective),
        region=rows(found.place),
        part=rows(found.part),
        rank=rows(found.rank),
    )


def _side(means: Means, side_totals: Totals, seen: _Seen) -> AttributedSide:
    sums = side_totals.sums
    compute_ms = means.ms(side_totals, sums.compute_ns)
    flops, reason = seen.flops
    achieved = tflops(flops, compute_ms)
    if flops is not None and achieved is None:
        reason = "nothing was computed"
    return AttributedSide(
        launches=side_totals.launches,
        rank_steps=sums.rank_steps,
        rank_steps_left_out=sums.left_out,
        window_ms=means.ms(side_totals, sums.window_ns),
        comm_ms=means.ms(side_totals, sums.comm_ns),
        compute_comm_ms=means.ms(side_totals, sums.hidden_ns),
        exposed_comm_ms=means.ms(side_totals, sums.exposed_ns),
        exposed_comm_ns=sums.exposed_ns,
        compute_ms=compute_ms,
        untold_ns=sum(length for key, length in side_totals.exposed.items() if key.kind == UNEXPLAINED),
        flops_per_rank_step=flops,
        achieved_tflops=achieved,
        achieved_tflops_reason=reason,
    )


def _configured(differences: Sequence[FactDifference]) -> list[tuple[str, object, object]]:
    """Return the settings and variables in which the sides differ, and their libraries; a label sets nothing."""
    return [
        (key, each.reference, each.candidate)
        for each in differences
        if not each.key.startswith("header.") and (key := each.key.removeprefix("config.")) not in _NO_SETTING
    ]


def totals_of(launches: Iterable[LabelledRun], engine: Engine | None = None) -> Totals:
    """Add up all launches of one side. A rank-step counts once, whichever launch it belongs to.

    Raises:
        InputError: a record cannot be read again.
    """
    totals = Totals()
    for dataset in launches:
        totals.launches += 1
        for exposed, sums in _exposed(dataset.run, engine or Local()):
            for rank, of_rank in sums.items():
                totals.add(rank, of_rank)
            add_exposed(totals, dataset.run, exposed, dataset.collectives.wait_ns)
        for entry in dataset.collectives.stragglers:
            if entry.rank is not None and entry.late_ms is not None:
                late = LateRank(entry.group, tuple(entry.group_ranks), entry.rank)
                totals.stragglers[late] += 1
                totals.late_ms[late].append(entry.late_ms)
                totals.bases[late].add(str(entry.basis))
        del dataset  # otherwise the next launch is loaded while this one is still in memory
    return totals


def add_exposed(totals: Totals, run: Run, exposed: Exposed, wait_ns: Ints) -> None:
    """Add exposed communication, by collective, region, and whether the rank was then waiting for a peer.

    Args:
        exposed: its rows are those of the run.
        wait_ns: of each collective of the run; negative where it is unknown.
    """
    name, wait_ns = run.collectives.name[exposed.row], wait_ns[exposed.row]
    length_ns = exposed.to_ns - exposed.from_ns
    waited_ns = np.clip(wait_ns - exposed.from_ns, 0, length_ns)
    unknown = ~exposed.bubble & (wait_ns < 0)
    known = ~exposed.bubble & ~unknown
    lengths = {WAIT: waited_ns * known, TRANSFER: (length_ns - waited_ns) * known}
    lengths |= {BUBBLE_PART: length_ns * exposed.bubble, UNKNOWN_PART: length_ns * unknown}
    sizes = [len(members) or None for members in run.frames.members]
    by = Groups(name, exposed.order, exposed.region)
    keys = list(zip(*(column[by.first].tolist() for column in (name, exposed.order, exposed.region)), strict=True))
    for part, of_pieces in lengths.items():
        for (code, order, region), total in zip(keys, by.reduce(np.add, of_pieces).tolist(), strict=True):
            if total:
                what, (phase, block) = run.collectives.names[code], exposed.regions[region]
                key = ExposedKey(what.kind, what.group, sizes[code], what.bytes, order, phase, block, part)
                totals.exposed[key] += total
    rank = run.rank_of_step[run.collectives.step[exposed.row]]
    by = Groups(name, rank)
    for at, total in zip(by.first.tolist(), by.reduce(np.add, lengths[WAIT]).tolist(), strict=True):
        if total:
            totals.waits[run.collectives.names[name[at]].group, sizes[name[at]], int(rank[at])] += total


def _exposed(run: Run, engine: Engine) -> Iterator[tuple[Exposed, Mapping[int, ExposedSums]]]:
    """Yield the exposed communication of a run with the sums of its ranks: all at once where it was read with the
    steps, else rank by rank, made of their details.
    """
    if run.frames.exposed is not None:
        sums = {rank: tables.exposed_sums for rank, tables in run.ranks.items() if tables.exposed_sums is not None}
        yield run.frames.exposed, sums
        return
    inputs = [RankInput.of(tables) for tables in run.ranks.values()]
    first_row = run.frames.first_row.tolist()
    with progress(len(inputs), f"attributing {run.location}") as tick:
        for rank, first, found in zip(run.ranks, first_row[:-1], engine.map(exposed_of_rank, inputs), strict=True):
            tick()
            if isinstance(found, InputError):
                raise found
            pieces, of_rank = found
            yield replace(pieces, row=pieces.row + np.int32(first)), {rank: of_rank}


NO_MANIFEST: Final = "there is no manifest"
_OWN: Final = "flops_per_step"
"""Key of a manifest's `plan`, for training loops that state their own FLOPs."""
_SIZE_LIMIT: Final = 1 << 48
"""Beyond any tensor's side; six of these multiplied are still a float."""


def flops_per_rank_step(manifest: Manifest | None) -> tuple[float | None, str | None]:
    """Return model FLOPs of one optimizer step on one rank and None, or None and the reason why they are not known."""
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


def tflops(flops: float | None, compute_ms: float) -> float | None:
    """Return TFLOP/s (1e12 a second) while computing; None where the work is not known, or nothing computed."""
    return None if flops is None or not compute_ms else flops / compute_ms / 1e9
