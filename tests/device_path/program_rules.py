"""Two ranks go through the loop of `scenario`, in every mode and with both taps, and then through all `scenes`.

Enters: a folder. Leaves: `rank_<r>.json`: what each loop found wrong and what it used, and what each scene told. Run by
`test_rules`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import InstrumentMode
from tests.device_path.ranks import by_rank
from tests.device_path.rig import Groups, groups
from tests.device_path.scenario import run, use
from tests.device_path.scenes import TAPS, play

WAYS: dict[str, InstrumentMode] = {"dedicated": "dedicated", "observe": "observe", "all_dedicated": "dedicated"}
"""The last one: `instrument.dedicated_async`."""


def main() -> None:
    """Every way."""

    def told(_topology: Topology, device: torch.device) -> dict[str, Any]:
        own = groups(device)
        without = off(device, own)
        return {"off": without} | answers(device, own, without)

    by_rank(told)


def off(device: torch.device, own: Groups) -> dict[str, Any]:
    """Without an instrument: what is wrong with the loop itself, what ran, and what it used."""
    wrong, shape = run(device, own, "off", native=False)
    return {"wrong": wrong, "shape": shape, "use": use(device, own, "off", native=False)._asdict()}


def answers(device: torch.device, own: Groups, without: dict[str, Any]) -> dict[str, Any]:
    """What loops and scenes say, by mode and tap, beside what `off` has returned."""
    told: dict[str, Any] = {}
    for tap, (name, mode) in product(TAPS, WAYS.items()):
        asked = {"native": tap == "compiled", "dedicated_async": name == "all_dedicated"}
        way = {"wrong": run(device, own, mode, **asked, shape=without["shape"])[0]}
        told[f"{name}-{tap}"] = way
    for tap, (name, mode) in product(TAPS, WAYS.items()):
        asked = {"native": tap == "compiled", "dedicated_async": name == "all_dedicated"}
        told[f"{name}-{tap}"]["use"] = use(device, own, mode, **asked)._asdict()
    return told | {"scenes": play(device, own)}


if __name__ == "__main__":
    main()
