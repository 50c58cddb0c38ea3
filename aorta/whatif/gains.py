"""Lists what would gain most: changes that nobody can launch, parts of the communication if they were free, and bounds.

    gains(base_of(program)).gains[0].sentence

docs/dev/what-if-model.md defines them. Must not add gains up: a collective may hide another one's time.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.collective_metrics import NO_SLOWER_RANKS
from aorta.documents.explanations import GainEntry, WhatIf
from aorta.documents.formatting import TEXT, rough_interval, rough_ms
from aorta.errors import InputError
from aorta.read.frames import Floats, Ints
from aorta.timeline.overlap import NS_PER_MS
from aorta.whatif.changes import Change, CommSpeed, NoStragglers, apply, parse_changes
from aorta.whatif.prediction import FREE, LEVEL, STATED_ERROR, Base, gain_of, predict_from
from aorta.whatif.program import RunProgram
from aorta.whatif.replay import replay

WORTH: Final = 0.005
"""A gain below this part of the step is not named."""
_NETWORKS: Final = {
    "network.bandwidth=x2": "twice the bandwidth",
    "network.latency=x0.5": "half the latency",
}
"""Another network -> in words."""
_LAUNCHED_BY: Final = {
    "network.bandwidth=x2": {"fabric.intra_bandwidth_gb_per_s", "fabric.inter_bandwidth_gb_per_s"},
    "network.latency=x0.5": {"fabric.intra_latency_us", "fabric.inter_latency_us"},
    "stragglers=none": {"fabric.straggler_rank", "fabric.straggler_ms"},
}
"""A change -> the settings of an emulated network that make it in a launch."""
_What: TypeAlias = Literal["network", "ranks", "kind", "group", "bound"]


def gains(
    base: Base, differing: Collection[str] = (), ask: str = "aorta whatif RUN", *, no_straggler: str | None = None
) -> WhatIf:
    """Return what a step would gain, the largest gain first: every change alone, every kind and group of collectives if
    it alone were free, and bounds.

    Args:
        ask: the command that is asked for more.
        differing: settings in which the run differs from the one that it is compared with. What they changed was
            measured, and is not predicted.
        no_straggler: why no rank is named that holds the others up, if none is. Then no gain without one is predicted:
            the replay takes lateness away that the test over steps takes for chance.
    """
    program, step_ms = base.program, base.identity.replayed_ms
    upper_bound = program.network is None

    def entry(what: _What, name: str, change: str | None, gains_ms: Floats, notes: Sequence[str] = ()) -> GainEntry:
        gain = gain_of(gains_ms, base.identity.missed_ms + STATED_ERROR * abs(float(np.median(gains_ms))))
        share = gain.value / step_ms
        sentence = f"{name}: {'at most ' if upper_bound else ''}{rough_interval(gain.value, gain.low, gain.high)}"
        sentence += f" of the {rough_ms(step_ms)} step, {TEXT.percent(share)}"
        if gain.low <= 0 and not upper_bound:
            sentence += ", which may be nothing"
        return GainEntry(what, name, change, gain.value, gain.low, gain.high, share, upper_bound, list(notes), sentence)

    def replayed(what: _What, name: str, change: Change) -> GainEntry:
        changed = apply(program, [change])
        return entry(what, name, change.text, replay(changed.program).gained_ms(base.times), changed.notes)

    notes = list(predict_from(base, [FREE]).notes)
    free = replay(apply(program, [FREE]).program)
    bounds = [entry("bound", "all communication free", FREE.text, free.gained_ms(base.times))]
    tried = []
    if no_straggler is not None:
        notes.append(f"{NO_SLOWER_RANKS}: not predicted, as no rank is named: {no_straggler}")
    else:
        try:
            bounds.append(replayed("bound", NO_SLOWER_RANKS, NoStragglers("stragglers=none")))
            tried.append(msgspec.structs.replace(bounds[-1], what="ranks"))
        except InputError as error:
            notes.append(str(error))
    # Perfect overlap: a step takes the longer of its time without communication and the time of its busiest link.
    overlapped_ns = np.maximum(free.job_step_ns(), _busiest_link_ns(program))
    hidden_ms = np.maximum(base.times.job_step_ns() - overlapped_ns, 0) / NS_PER_MS
    bounds.append(entry("bound", "perfect overlap", None, hidden_ms))
    for text, words in _NETWORKS.items():
        try:
            tried.append(replayed("network", words, *parse_changes([text])))
        except InputError:  # of a real network the latency is not known
            continue
    worth = []
    for gain in tried:
        if differing and _LAUNCHED_BY[gain.change or ""].issuperset(differing):
            notes.append(f"{gain.name}: not predicted, because this comparison measured {', '.join(sorted(differing))}")
        elif gain.share > WORTH:
            worth.append(gain)
    worth.sort(key=_loss_ms)
    first = worth[0].change if worth else None
    return WhatIf(
        reason=None,
        steps=len(program.steps),
        ranks=len(program.ranks),
        level=LEVEL,
        step_ms=step_ms,
        check=base.identity.problem(),
        gains=worth,
        marginals=sorted((replayed(*part) for part in _parts(program)), key=_loss_ms),
        bounds=bounds,
        notes=notes,
        command=f"{ask} --set {shlex.quote(first or 'network.bandwidth=x2')}",
    )


def _loss_ms(gain: GainEntry) -> float:
    return -gain.gain_ms


def _parts(program: RunProgram) -> Iterator[tuple[_What, str, CommSpeed]]:
    """Yield the kinds of collectives, and the groups where there are several: what, name, the change that frees it.
    Groups that other ranks use in each other's place (the disjoint groups of a mesh) are one.
    """
    every = [(position, issued) for layout in program.layouts for position, issued in enumerate(layout.issued)]
    for kind in sorted({issued.kind for _, issued in every}):
        yield "kind", kind, CommSpeed(f"comm.kind.{kind}=free", np.inf, kind=kind)
    together: dict[tuple[int, str, int], set[str]] = defaultdict(set)  # position, kind, number of ranks -> groups
    for position, issued in every:
        together[position, issued.kind, len(issued.ranks)].add(issued.group)
    family = {issued.group: {issued.group} for _, issued in every}
    for names in together.values():
        merged = set().union(*(family[name] for name in names))
        family |= dict.fromkeys(merged, merged)
    families = sorted({tuple(sorted(names)) for names in family.values()})
    for groups in families if len(families) > 1 else ():
        named = "default group" if groups == ("0",) else f"group{'s' * (len(groups) > 1)} {', '.join(groups)}"
        yield "group", named, CommSpeed(f"comm.group.{','.join(groups)}=free", np.inf, groups=groups)


def _busiest_link_ns(program: RunProgram) -> Ints:
    """Return for how long the busiest link of each step transfers."""
    busiest_ns = np.zeros(len(program.steps), np.int64)
    for index, step in enumerate(program.steps):
        for column in range(step.cost_ns.shape[1]):
            busy_ns: dict[object, int] = defaultdict(int)
            for position, issued in enumerate(program.layouts[step.layouts[column]].issued):
                # Without a link it waits for no other: it can run beside all of them.
                link = ("alone", position) if issued.link is None else issued.link
                busy_ns[link] += int(step.cost_ns[position, column])
            busiest_ns[index] = max(busiest_ns[index], *busy_ns.values(), 0)
    return busiest_ns
