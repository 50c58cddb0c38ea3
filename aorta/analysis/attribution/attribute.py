"""Explains where the difference in exposed communication between two sides of a comparison lies
(docs/dev/attribution.md).

Each side is one dataset or several launches. The result is plain JSON values: one sentence, the ranked causes, and
every breakdown of the difference. Must not: judge whether there is a difference; `compare` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.attribution_sentence import sentence
from aorta.analysis.attribution.breakdown import Means, computing, dimensions, stragglers
from aorta.analysis.attribution.causes import ranked
from aorta.analysis.attribution.flops import flops_per_rank_step, tflops
from aorta.analysis.attribution.keys import UNEXPLAINED, Totals
from aorta.analysis.attribution.totals import totals_of
from aorta.analysis.load.engines import Engine

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
_NO_SETTING: Final = ("label", "instrument.host_tap")
"""Differences that no key of the configuration makes: a name, and what was compiled on the machine."""
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_KERNELS: Final = (
    "host-bound: the profiler's kernels say how much is exposed, and not behind which block or which collective"
)
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
    differences: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Compute `comparison["attribution"]`. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.
        engine: where records are read again; by default this machine.
        differences: `comparison["manifest_differences"]`; those of the configuration are named in the sentence.

    Raises:
        InputError: a record cannot be read again.
    """
    seen = {"reference": _Seen(reference), "candidate": _Seen(candidate)}
    totals = {side: totals_of(launches, engine) for side, launches in seen.items()}
    unknown = [f"{side}: {launches.host_bound}" for side, launches in seen.items() if launches.host_bound is not None]
    if unknown:
        return {"definition": DEFINITION, "sentence": None, "reason": "; ".join(unknown)}
    empty = [side for side, side_totals in totals.items() if not side_totals.sums.rank_steps]
    if empty:
        return {"definition": DEFINITION, "sentence": None, "reason": f"{' and '.join(empty)}: {_NOTHING}"}
    means = Means(totals["reference"], totals["candidate"])
    alike = {launches.parallel for launches in seen.values()}
    parallel = alike.pop() if len(alike) == 1 else ""
    found = dimensions(means, parallel)
    late, blocks = stragglers(means), computing(means)
    text, lead = sentence(means, {**found, "computing": blocks}, late, _configured(differences), parallel)
    return {
        "definition": DEFINITION,
        "unit": "ms per step and rank",
        "sentence": text,
        "reason": None,
        "difference_ms": means.difference_ms,
        **{side: _side(means, side_totals, seen[side]) for side, side_totals in totals.items()},
        "causes": ranked(found, late, lead),
        "dimensions": found,
        "stragglers": late,
        "computing": blocks,
    }


def _side(means: Means, side_totals: Totals, seen: _Seen) -> dict[str, Any]:
    sums = side_totals.sums
    compute_ms = means.ms(side_totals, sums.compute_ns)
    flops, reason = seen.flops
    achieved = tflops(flops, compute_ms)
    if flops is not None and achieved is None:
        reason = "nothing was computed"
    return {
        "launches": side_totals.launches,
        "rank_steps": sums.rank_steps,
        "rank_steps_left_out": sums.left_out,
        "window_ms": means.ms(side_totals, sums.window_ns),
        "comm_ms": means.ms(side_totals, sums.comm_ns),
        "compute_comm_ms": means.ms(side_totals, sums.hidden_ns),
        "exposed_comm_ms": means.ms(side_totals, sums.exposed_ns),
        "exposed_comm_ns": sums.exposed_ns,
        "compute_ms": compute_ms,
        "untold_ns": sum(length for key, length in side_totals.exposed.items() if key.kind == UNEXPLAINED),
        "flops_per_rank_step": flops,
        "achieved_tflops": achieved,
        "achieved_tflops_reason": reason,
    }


def _configured(differences: Sequence[Mapping[str, Any]]) -> list[tuple[str, object, object]]:
    """Settings in which the sides differ, by the key that a command line sets; a label sets nothing."""
    return [
        (key, each["reference"], each["candidate"])
        for each in differences
        if (key := each["key"].removeprefix("config.")) != each["key"] and key not in _NO_SETTING
    ]
