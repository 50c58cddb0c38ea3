"""Run on every rank: the same training once in every mode, one after another, in one launch.

Arguments: a folder, the steps of a run, then words for `train.py`. Each mode leaves its own run in `FOLDER/MODE`; the
first is `off`. With `compile` among the words, the modes are run again with compiled blocks, in `FOLDER/MODE-compiled`.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from aorta.distributed.peers import Peers
from aorta.distributed.topology import process_group, read_topology, select_device
from aorta.recording.rank_process import start_logging
from aorta.recording.train import TrainingRun
from tests.loop import resolved

MODES = ("off", "observe", "dedicated")
# aot_eager traces and partitions like inductor does, but needs no C++ compiler on the machine.
COMPILED = ("compile.enabled=true", "compile.backend=aot_eager")


def main(folder: str, *words: str) -> None:
    kept = [word for word in words if word != "compile"]
    forms: dict[str, tuple[str, ...]] = {"": ()}
    if "compile" in words:
        forms["-compiled"] = COMPILED
    topology = read_topology()
    start_logging(topology.rank, topology.world_size)
    base = (*kept, f"training.output_dir={folder}", "training.device=cpu")
    device = select_device(resolved(*base).config.training.device, topology.local_rank)
    with process_group(topology, device, 120.0) as peers:
        for suffix, form in forms.items():
            for mode in MODES:
                # On a CPU the two modes are one: each has its tap, the one in Python and the compiled one.
                tap = f"instrument.native={mode == 'dedicated'}"
                run = resolved(*base, *form, f"instrument.mode={mode}", tap, f"label={mode}{suffix}")
                # Each run agrees with its peers under a name of its own, as runs of their own would.
                own = Peers(dist.PrefixStore(mode + suffix, peers.store), topology.rank, topology.world_size, 120.0)
                TrainingRun(run, topology, device, own).run()
        peers.gather("done", True)


if __name__ == "__main__":
    main(*sys.argv[1:])
