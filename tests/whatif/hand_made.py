"""Programs written down by hand, in a few words:

    program([[10, issue(), 20, Wait(0), 5]] * 2, cost_ns=[15])

Numbers are own time in nanoseconds, `Compute(20)` is own time inside a block's range. The program as it is
replays as written; nothing is read from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from aorta.config.schema import EmulatedFabric
from aorta.whatif.program import Issued, Operation, ProgramSpans, RankLayout, RunProgram, StepProgram, What
from aorta.whatif.replay import LONG_AGO, replay


class Compute(NamedTuple):
    ns: int


class Wait(NamedTuple):
    place: int
    wake_ns: int = 0
    back: int = 0


Words = Sequence[int | Issued | Wait | Compute]


def issue(
    kind: str = "allreduce", size: int = 1000, ranks: tuple[int, ...] = (0, 1), group: str = "0", link: int | None = 0
) -> Issued:
    return Issued(kind, group, size, ranks, link)


def program(
    ranks: Sequence[Words],
    cost_ns: Sequence[int],
    *,
    steps: int = 1,
    backend_ns: Sequence[int] | None = None,
    between_ns: Sequence[int] | None = None,
    network: EmulatedFabric | None = None,
) -> RunProgram:
    """A program of equal steps.

    Args:
        cost_ns, backend_ns: of each collective, by place.
        between_ns: own time of each rank between two steps.
    """
    made = [_rank(words) for words in ranks]
    layouts = list(dict.fromkeys(layout for layout, _, _, _ in made))
    operations = max(len(host) for _, host, _, _ in made)
    host, wake = np.zeros((operations, len(ranks)), np.int64), np.zeros((operations, len(ranks)), np.int64)
    rows = []
    for column, (_, own, wakes, spans) in enumerate(made):
        host[: len(own), column], wake[: len(wakes), column] = own, wakes
        rows += [(column, *span) for span in spans]
    rank, *ends = np.array(rows, np.int64).reshape(-1, 5).T
    links = 1 + max((issued.link or 0) for layout in layouts for issued in layout.issued)

    def step(number: int) -> StepProgram:
        before = np.array(between_ns if number and between_ns is not None else [0] * len(ranks))
        return StepProgram(
            global_step=number,
            layouts=tuple(layouts.index(layout) for layout, _, _, _ in made),
            host_ns=np.concatenate([before[None, :], host[1:]]),
            wake_ns=wake,
            cost_ns=np.array(cost_ns, np.int64)[:, None],
            network_ns=None if network is None else np.array(cost_ns, np.int64)[:, None],
            backend_ns=None if backend_ns is None else np.array([[ns] * len(ranks) for ns in backend_ns], np.int64),
            spans=ProgramSpans(rank, np.ones(len(rank), bool), *ends),
        )

    made_of = RunProgram(
        ranks=tuple(range(len(ranks))),
        world_size=len(ranks),
        layouts=tuple(layouts),
        steps=[step(number) for number in range(steps)],
        start_ns=np.zeros(len(ranks), np.int64),
        busy_ns=np.full((links, len(ranks)), LONG_AGO, np.int64),
        recorded_ns=np.zeros((steps, len(ranks)), np.int64),
        recorded_ratio=np.full((steps, len(ranks)), np.nan),
        recorded_exposed_ms=np.full((steps, len(ranks)), np.nan),
        backend="gloo",
        network=network,
        law=network is not None,
        collectives=len(cost_ns) * len(ranks) * steps,
        backend_was_limit=0,
        arrival_unknown=0,
    )
    return recorded(made_of)


def recorded(made: RunProgram) -> RunProgram:
    """The same with the durations that it replays to as those recorded."""
    times = replay(made)
    return replace(made, recorded_ns=times.end_ns - times.begin_ns)


def step_ns(made: RunProgram, index: int = 0) -> int:
    times = replay(made)
    return int((times.end_ns - times.begin_ns)[index].max())


def _rank(words: Words) -> tuple[RankLayout, list[int], list[int], list[tuple[int, int, int, int]]]:
    operations, issued = [Operation(What.BEGIN)], list[Issued]()
    own, wakes, spans = [0], [0], []
    since = 0
    for word in words:
        match word:
            case int():
                since += word
                continue
            case Compute(ns):
                after = len(operations) - 1
                spans.append((after, since, after, since + ns))
                since += ns
                continue
            case Issued():
                operations.append(Operation(What.ISSUE, len(issued)))
                issued.append(word)
                wakes.append(0)
            case Wait(place, wake_ns, back):
                operations.append(Operation(What.WAIT, place, back))
                wakes.append(wake_ns)
        own.append(since)
        since = 0
    operations.append(Operation(What.END))
    return RankLayout(tuple(operations), tuple(issued)), [*own, since], [*wakes, 0], spans
