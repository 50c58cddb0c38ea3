"""Two ranks go through the loop of `scenario`, in every mode and with both taps, and then through all `scenes`.

Enters: a folder. Leaves: `rank_<r>.json`: what each loop found wrong and what it used, and what each scene told. Run by
`test_rules`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.instrument.instrumentation import Instrumentation
from aorta.records.schema import InstrumentMode
from tests.device_path.program_overlap import one_clock
from tests.device_path.rig import Groups, groups
from tests.device_path.scenario import run, use
from tests.device_path.scenes import TAPS, Tap, play

WAYS: dict[str, InstrumentMode] = {"dedicated": "dedicated", "observe": "observe", "all_dedicated": "dedicated"}
"""The last one: `instrument.dedicated_async`."""


def main() -> None:
    """Every way."""
    folder = Path(sys.argv[1])
    with one_of_the_ranks() as device:
        own = groups(device)
        told = {"off": off(device, own)}
        told |= answers(device, own, told["off"], TAPS)
    (folder / f"rank_{device.index}.json").write_text(json.dumps(told))


@contextmanager
def one_of_the_ranks() -> Iterator[torch.device]:
    """This rank's device, with the default process group, for a `with` block."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    one_clock()
    with process_group(topology, device, 300):
        yield device


def off(device: torch.device, own: Groups) -> dict[str, Any]:
    """Without an instrument: what is wrong with the loop itself, what ran, and what it used."""
    wrong, shape = run(device, own, "off", native=False)
    return {"wrong": wrong, "shape": shape, "use": use(device, own, "off", native=False)._asdict()}


def answers(
    device: torch.device,
    own: Groups,
    without: dict[str, Any],
    taps: Sequence[Tap],
    make: Callable[..., Instrumentation] = Instrumentation,
    *,
    hasty: bool = False,
) -> dict[str, Any]:
    """What loops and scenes say, by mode and tap.

    Args:
        without: what `off` has returned. make: makes the instrument.
        hasty: stop as soon as something is wrong with a loop on any rank.
    """
    told: dict[str, Any] = {}
    for tap, (name, mode) in product(taps, WAYS.items()):
        making = partial(make, dedicated_async=name == "all_dedicated")
        way = {"wrong": run(device, own, mode, native=tap == "compiled", make=making, shape=without["shape"])[0]}
        told[f"{name}-{tap}"] = way
        if hasty and anywhere(bool(way["wrong"]), device):
            return told
    for tap, (name, mode) in product(taps, WAYS.items()):
        making = partial(make, dedicated_async=name == "all_dedicated")
        used = use(device, own, mode, native=tap == "compiled", make=making)._asdict()
        told[f"{name}-{tap}"]["use"] = used
        if hasty and anywhere(any(used[what] > most for what, most in without["use"].items()), device):
            return told
    return told | {"scenes": play(device, own, taps, make)}


def anywhere(wrong: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    ranks = torch.tensor(int(wrong), device=device)
    dist.all_reduce(ranks)
    return bool(ranks.item())


if __name__ == "__main__":
    main()
