"""Two ranks go through the loop of `scenario`, in every mode, and then through all `scenes`.

Enters: a folder. Leaves: `rank_<r>.json`: what each loop found wrong and what it used, and what each scene told. Run by
`test_rules`.
"""

from __future__ import annotations

from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import InstrumentMode
from tests.device_path.launch import by_rank
from tests.device_path.rig import Groups, groups
from tests.device_path.scenario import run, use
from tests.device_path.scenes import play

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
    wrong, shape = run(device, own, "off")
    return {"wrong": wrong, "shape": shape, "use": use(device, own, "off")._asdict()}


def answers(device: torch.device, own: Groups, without: dict[str, Any]) -> dict[str, Any]:
    """What loops and scenes say, by mode, beside what `off` has returned."""
    told: dict[str, Any] = {}
    for name, mode in WAYS.items():
        moved = name == "all_dedicated"
        told[name] = {"wrong": run(device, own, mode, dedicated_async=moved, shape=without["shape"])[0]}
    for name, mode in WAYS.items():
        told[name]["use"] = use(device, own, mode, dedicated_async=name == "all_dedicated")._asdict()
    return told | {"scenes": play(device, own)}


if __name__ == "__main__":
    main()
