"""What `aorta tune` may try: the grid of settings, what the replay of a base run predicts for each, the best of them.

    cells = grid("ddp", overlap=True, gradient_bytes=4 << 20)
    proposals = predicted(base, cells)
    proposals = predicted_again(refined, proposals[0], proposals, base.identity.replayed_ms, "refine-1")
    chosen = best(proposals, count=1, threshold=0.02)

A setting is written as changes of a what-if, and `overrides` says which keys of the configuration make them. Must not
launch anything, or recommend: a prediction alone is no reason to (docs/search.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from aorta.analysis.load.records import load_run
from aorta.analysis.load.run_facts import config_of
from aorta.analysis.whatif import Prediction, Value, parse_changes, program_of
from aorta.analysis.whatif.changes import SHARDED
from aorta.analysis.whatif.prediction import Base, base_of, predict_from
from aorta.errors import InputError
from aorta.records.environment_variables import check_variable, shown_variables

OVERRIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "overlap": ("parallel.overlap={}",),
    "buckets.mb": ("parallel.bucket_cap_mb={}",),
    # Without overlap FSDP gathers nothing ahead, whatever its prefetching says.
    "prefetch": ("parallel.overlap=true", "parallel.forward_prefetch={}", "parallel.backward_prefetch={}"),
}
"""What a what-if changes -> the overrides that make the change in a launch, with `{}` for its value."""
_WORDS: Final = {"on": "true", "off": "false"}
_MIB: Final = 1 << 20
FINEST: Final = 64
"""The smallest bucket tried is at least this part of all gradients: smaller ones cost their latency."""
DEEPEST: Final = 4
"""Blocks gathered ahead at most: each holds the parameters of a block on every rank."""

TRIED: Final = "tried"
BASE: Final = "base"


@dataclass(frozen=True)
class Proposal:
    """One setting that may be launched.

    Attributes:
        changes: of a what-if; none: the replay knows nothing of it.
        environment: variables in place of changes.
        step_ms: the predicted job step, median and interval; None without a prediction.
        gain: part of the base's step that is predicted to be saved.
        source: the run predicted from: "base", or the last refinement whose setting is nearer to this one.
        why: `TRIED`, or why it is not launched.
        flags: what the prediction does not know.
    """

    changes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    step_ms: Value | None = None
    launch_ms: Value | None = None
    gain: float | None = None
    source: str = BASE
    why: str = TRIED
    flags: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for train.py that make it."""
        return overrides(self.changes)

    @property
    def name(self) -> str:
        """What it is, in the words a person copies."""
        return " ".join([*shown_variables(self.environment), *self.overrides])

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, in a stable order."""
        return {
            "name": self.name,
            "changes": list(self.changes),
            "overrides": list(self.overrides),
            "environment": shown_variables(self.environment),
            "predicted_step_ms": None if self.step_ms is None else asdict(self.step_ms),
            "predicted_gain": self.gain,
            "predicted_from": None if self.step_ms is None else self.source,
            "tried": self.why == TRIED,
            "reason": None if self.why == TRIED else self.why,
            "flags": list(self.flags),
        }


@dataclass
class Refined:
    """Proposals, and what refined them beyond the record of the base.

    Attributes:
        launched: settings of which there is a record, in the order in which they were predicted to be best.
        notes: what was not done, and why.
    """

    proposals: list[Proposal]
    launched: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def give_up(self, proposal: Proposal, why: str) -> None:
        """Launch this one no more."""
        self.proposals = [replace(one, why=why) if one.changes == proposal.changes else one for one in self.proposals]

    def hold(self, proposal: Proposal, step_ms: float, source: str) -> None:
        """Note where a launch was not as predicted: then its record moves all its neighbours."""
        prediction = proposal.launch_ms
        if prediction is not None and not prediction.low <= step_ms <= prediction.high:
            self.notes.append(
                f"{source}: {' '.join(proposal.changes)} took {step_ms:.2f} ms a step, where {prediction.value:.2f} "
                f"({prediction.low:.2f} to {prediction.high:.2f}) were predicted from {proposal.source}"
            )


def overrides(changes: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides for train.py that make these changes."""
    words: dict[str, None] = {}
    for change in changes:
        target, _, value = change.partition("=")
        words |= dict.fromkeys(word.format(_WORDS.get(value, value)) for word in OVERRIDES[target])
    return tuple(words)


def grid(strategy: str | None, *, overlap: bool, gradient_bytes: int) -> list[tuple[str, ...]]:
    """Return every setting of a strategy that is looked at, as changes; the base itself is not among them.

    Args:
        overlap: whether the base overlaps.
        gradient_bytes: of a DDP model; 0: not known.
    """
    switched = "overlap=off" if overlap else "overlap=on"
    if strategy in SHARDED:
        # `overlap=off` comes last: to the replay it is the same as gathering nothing ahead.
        depths: list[tuple[str, ...]] = [(f"prefetch={depth}",) for depth in range(DEEPEST + 1)]
        return [*depths, (switched,)] if overlap else depths
    if strategy != "ddp":
        return []
    caps = [f"buckets.mb={cap:g}" for cap in bucket_caps(gradient_bytes)]
    return [*((cap,) for cap in caps), (switched,), *((switched, cap) for cap in caps)]


def bucket_caps(gradient_bytes: int) -> list[float]:
    """Return the sizes of buckets in MiB: powers of two, from a 64th of the gradients to all of them in one."""
    if gradient_bytes <= 0:
        return []
    most = math.ceil(math.log2(gradient_bytes / _MIB))
    least = math.ceil(math.log2(gradient_bytes / _MIB / FINEST))
    return [2.0**power for power in range(least, most + 1)]


def read_base(folder: Path) -> tuple[Base | None, list[Proposal]]:
    """Replay a run and predict every setting of its strategy's grid; None, and no predictions, where it cannot be
    replayed: then the only proposal carries the reason.

    Raises:
        InputError: the folder cannot be read.
    """
    run = load_run(folder, contents=True)
    strategy = next(iter(run.ranks.values())).source.parallel
    if not grid(strategy, overlap=True, gradient_bytes=_MIB):
        return None, [
            Proposal(
                why=f"there are no settings to try for parallel={strategy}; there are for ddp and {', '.join(SHARDED)}"
            )
        ]
    try:
        base = base_of(program_of(run))
    except InputError as refused:
        return None, [Proposal(why=str(refused))]
    parallel = config_of(run.manifest).get("parallel")
    overlap = bool(parallel.get("overlap", True)) if isinstance(parallel, dict) else True
    size = sum(one.bytes for one in base.program.facts.gradient_order)
    return base, predicted(base, grid(strategy, overlap=overlap, gradient_bytes=size))


def replay_of(folder: Path) -> Base:
    """Return the replay of a run. Raises InputError where it cannot be read, or predicted from."""
    return base_of(program_of(load_run(folder, contents=True)))


def predicted(
    base: Base, cells: Sequence[Sequence[str]], made: Sequence[str] = (), base_ms: float | None = None
) -> list[Proposal]:
    """Return what the replay says of each setting, or why it says nothing; the shortest step first.

    Args:
        made: changes that the run predicted from has already; each setting has them too, or others in their place.
        base_ms: step time that gains are a part of; None: that of the run predicted from.
    """
    found: list[Proposal] = []
    seen: dict[tuple[object, ...], tuple[str, ...]] = {}
    for cell in cells:
        one = Proposal(tuple(cell))
        try:
            prediction = predict_from(base, parse_changes([change for change in cell if change not in made]))
        except InputError as refused:
            found.append(replace(one, why=f"not predicted: {refused}"))
            continue
        step = prediction.job_step_ms
        gain = 1 - step.value / (base_ms or base.identity.replayed_ms)
        twin = seen.setdefault(_outcome(prediction), one.changes)
        why = TRIED if twin == one.changes else f"to the replay the same as {' '.join(twin)}"
        launch = prediction.launch_ms
        found.append(replace(one, step_ms=step, launch_ms=launch, gain=gain, why=why, flags=prediction.flags))
    return sorted(found, key=_rank)


def predicted_again(
    refined: Base,
    made: Proposal,
    proposals: Sequence[Proposal],
    base_ms: float,
    source: str,
    known: Collection[tuple[str, ...]] = (),
) -> list[Proposal]:
    """Return the same proposals, the setting that was made and its neighbours predicted anew from its record; the
    shortest step first.

    A neighbour has what the setting changes, to whatever value, and perhaps more; whether there is overlap is the same.
    The less there is to change, the smaller the error of a prediction: docs/dev/what-if-model.md has both.

    Args:
        refined: the replay of a run that has the setting `made`.
        base_ms: step time of the base as replayed.
        source: the name of that run.
        known: settings that have a record of their own: what is said of them stays.
    """
    near = [one for one in proposals if one.changes not in known and _near(made.changes, one.changes)]
    anew = predicted(refined, [one.changes for one in near], made.changes, base_ms)
    kept = [one for one in proposals if one not in near]
    return sorted([*(replace(one, source=source) for one in anew), *kept], key=_rank)


def _near(made: Sequence[str], changes: Sequence[str]) -> bool:
    targets = {change.partition("=")[0] for change in changes}
    return all(
        change in changes or (change.partition("=")[0] in targets and not change.startswith("overlap="))
        for change in made
    )


def _outcome(prediction: Prediction) -> tuple[object, ...]:
    """Return what two settings share that replay alike, as two caps that close the same buckets."""
    values = (prediction.job_step_ms, prediction.overlap_ratio, prediction.exposed_comm_ms)
    return tuple(None if each is None else each.value for each in values)


def _rank(proposal: Proposal) -> tuple[float, int]:
    """Return a sort key: the shortest predicted step, and of equal ones the one that changes less, comes first."""
    return (math.inf if proposal.step_ms is None else proposal.step_ms.value), len(proposal.changes)


def leader(proposals: Sequence[Proposal], threshold: float) -> Proposal | None:
    """Return the one that would be launched first."""
    return next((one for one in best(proposals, 1, threshold) if one.why == TRIED and one.gain is not None), None)


def best(proposals: Sequence[Proposal], count: int, threshold: float) -> list[Proposal]:
    """Return the same proposals, each with whether it is launched: the first `count` that are predicted to gain more
    than `threshold`, a part of the base's step.
    """
    left, judged = count, []
    for one in proposals:
        if one.why != TRIED or one.gain is None:
            judged.append(one)
        elif one.gain <= threshold:
            judged.append(replace(one, why=f"predicted to gain no more than {threshold:.1%}"))
        elif not left:
            judged.append(replace(one, why=f"not among the best {count}" if count else "none was asked for (--try 0)"))
        else:
            judged.append(one)
            left -= 1
    return judged


def of_environment(texts: Sequence[str]) -> list[Proposal]:
    """Return one proposal for each value of `NAME=VALUE,VALUE,...`; the replay knows nothing of any.

    Raises:
        InputError: a text has another form, asks for the same twice, or a known variable does not take its value.
    """
    found: list[Proposal] = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not all(values.split(",")):
            raise InputError(f"--env {text}: expected NAME=VALUE or NAME=VALUE,VALUE,...")
        for value in values.split(","):
            check_variable(name, value)
            one = Proposal(environment={name: value})
            if one in found:
                raise InputError(f"--env {text}: {name}={value} is asked for twice")
            found.append(one)
    return found
