"""FSDP that gathers more or fewer blocks ahead.

The all-gather of a block is issued when the block `depth` before it in the same pass has arrived; without prefetching
right before its own wait. A pass that was recorded with this prefetching stays as it was. Must not replay anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

from aorta.analysis.whatif.program import RunProgram, What
from aorta.analysis.whatif.restructure import ROOM, CollectiveCost, Placed, RankView, restructured
from aorta.errors import InputError

SHARDED: Final = ("fsdp", "hsdp", "fsdp_tp")
"""Values of `parallel.strategy` in which every all-gather brings the parameters of a block, so that it can be moved."""


def fsdp(program: RunProgram, text: str, depth: int) -> RunProgram:
    """FSDP that gathers the next `depth` blocks while one computes; 0: each when it is needed.

    Raises:
        InputError: there are no all-gathers that blocks wait for.
    """

    def rearrange(view: RankView) -> tuple[list[Placed], list[CollectiveCost]]:
        needed = _consumers(program, view)
        if not needed:
            raise InputError(f"--set {text}: no block of this run waits for an all-gather")
        gathers = {one.collective for one in needed}
        new = [
            each._replace(turn=each.turn * ROOM)
            for each in view.placed
            if each.what is not What.ISSUE or each.collective not in gathers
        ]
        issues = {each.collective: each for each in view.placed if each.what is What.ISSUE}
        for _, those in groupby(needed, key=lambda one: one.phase):
            of_pass = list(those)
            recorded = [issues[one.collective] for one in of_pass]
            if all(_ahead(of_pass[:at], own) == min(depth, at) for at, own in enumerate(recorded)):
                new += [own._replace(turn=own.turn * ROOM) for own in recorded]
                continue
            for at, one in enumerate(of_pass):
                if at == 0:  # nothing before it in its pass could gather it
                    new.append(recorded[at]._replace(turn=recorded[at].turn * ROOM))
                elif depth == 0:
                    new.append(Placed(one.wait.at_ns, one.wait.turn * ROOM - 1, What.ISSUE, one.collective))
                else:
                    behind = of_pass[max(at - depth, 0)]
                    turn = behind.wait.turn * ROOM + at + 1
                    new.append(Placed(behind.arrived_ns, turn, What.ISSUE, one.collective))
        return new, list(view.costs)

    return restructured(program, rearrange)


def _ahead(before: Sequence[_Needed], own: Placed) -> int:
    """How many blocks ahead an all-gather was issued: so many of those before it began to compute later."""
    return sum(one.begin_ns >= own.at_ns for one in before)


class _Needed(NamedTuple):
    """An all-gather that a block waits for: in which pass, its wait, from when on others can be prefetched, and when
    the block begins to compute.
    """

    collective: int
    phase: str
    wait: Placed
    arrived_ns: int
    begin_ns: int


def _consumers(program: RunProgram, view: RankView) -> list[_Needed]:
    """The all-gathers of a step, each with the block that computes behind its wait, in the order of the waits."""
    begins = sorted((begin, phase) for phase in ("forward", "backward") for _, begin, _ in view.spans(program, phase))
    issues = [each.at_ns for each in view.placed if each.what is What.ISSUE]
    found = []
    for each in view.placed:
        if each.what is not What.WAIT or each.back or view.layout.issued[each.collective].kind != "allgather":
            continue
        behind = next(((begin, phase) for begin, phase in begins if begin >= each.at_ns), None)
        if behind is None:
            continue
        begin, phase = behind
        prefetched = [at for at in issues if each.at_ns < at <= begin]
        found.append(_Needed(each.collective, phase, each, min(prefetched, default=begin), begin))
    return found
