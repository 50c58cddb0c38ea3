"""Two ranks go through the loop of `scenario` once for each mutant of the device path.

Enters: a folder. Leaves: `rank_<r>.json`: by mutant what was found wrong. Run by `test_mutants`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.instrument.instrumentation import Instrumentation
from tests.device_path.mutants import MUTANTS, Mutant, mutated
from tests.device_path.program_overlap import one_clock
from tests.device_path.rig import Groups, groups
from tests.device_path.scenario import Shape, Use, run, use

NONE = "the code as it is"


def main() -> None:
    """Every mutant; the code as it is comes first and last."""
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    one_clock()
    told: dict[str, Any] = {}
    with process_group(topology, device, 300):
        own = groups(device)
        _, shape = run(device, own, "off", native=False)
        used = use(device, own, "off", native=False)
        told[NONE] = as_it_is(device, own, shape, used)
        for mutant in MUTANTS:
            if only and not any(word in mutant.name for word in only):
                continue
            sys.stderr.write(f"{time.monotonic():.2f}: {mutant.name}\n")  # which one it is, should it hang
            with mutated(mutant) as made:
                told[mutant.name] = found(mutant, device, own, shape, used, made)
        told[f"{NONE}, again"] = as_it_is(device, own, shape, used)
    (folder / f"rank_{topology.rank}.json").write_text(json.dumps(told))


def as_it_is(device: torch.device, own: Groups, shape: Shape, used: Use) -> list[str]:
    """In both modes, by what catches mutants."""
    wrong = []
    for mode in ("dedicated", "observe"):
        for seen in ("loop", "use"):
            nothing = Mutant("", "", "", "", mode, seen)
            wrong += found(nothing, device, own, shape, used, Instrumentation)
    return wrong


def found(mutant: Mutant, device: torch.device, own: Groups, shape: Shape, used: Use, make: Any) -> list[str]:
    """What is wrong with a mutant; an exception is as well."""
    try:
        if mutant.seen == "loop":
            return run(device, own, mutant.mode, native=False, make=make, shape=shape)[0]
        needed = use(device, own, mutant.mode, native=False, make=make)
    except Exception as error:  # noqa: BLE001 whatever it is, it was noticed
        return [f"raised {type(error).__name__}: {error}"]
    return [] if needed == used else [f"{needed} in place of {used}"]


if __name__ == "__main__":
    main()
