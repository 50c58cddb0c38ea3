"""The pipeline of `program`, followed by its isolated baselines, on the same emulated link.

Enters: a folder and the cases as JSON. Leaves: one folder a case with the record of each rank. Nothing here computes
what is expected.
"""

from __future__ import annotations

from pathlib import Path

from aorta.distributed.peers import Peers
from aorta.instrument.emulation.rehearsal import Rehearsal, Replay
from aorta.instrument.emulation.stand_in import StandIn
from tests.known_answers.program import CPU, Case, main, recorded


def run(case: Case, folder: Path, peers: Peers, place: Path | None) -> None:
    with recorded(case, folder, peers, place) as rank:
        instrument = rank.instrument
        rank.phase("train", rank.train, case.warmup)
        rehearsal = Rehearsal(CPU)
        rank.timetable.block_ns = 0
        with instrument.replaced(rehearsal):
            rank.train()
        with instrument.replaced(StandIn(CPU, instrument.clock, instrument.recorder.on_stall)):
            rank.phase("compute_only", rank.train)
        rank.phase("comm_only", Replay(rehearsal.events).run)


if __name__ == "__main__":
    main(run)
