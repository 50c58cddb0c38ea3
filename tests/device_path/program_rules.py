"""Two ranks go through the loop of `scenario`, in every mode and with both taps, and then through all `scenes`.

Enters: a folder. Leaves: `rank_<r>.json`: what each loop found wrong and what it used, and what each scene told. Run by
`test_rules`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.records.schema import InstrumentMode
from tests.device_path.program_overlap import one_clock
from tests.device_path.rig import groups
from tests.device_path.scenario import run, use
from tests.device_path.scenes import play

WAYS: tuple[tuple[InstrumentMode, bool], ...] = (
    ("dedicated", False),
    ("dedicated", True),
    ("observe", False),
    ("observe", True),
)


def main() -> None:
    """Every way."""
    folder = Path(sys.argv[1])
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    one_clock()
    told: dict[str, Any] = {}
    with process_group(topology, device, 300):
        own = groups(device)
        nothing, shape = run(device, own, "off", native=False)
        told["off"] = {"wrong": nothing, "use": use(device, own, "off", native=False)._asdict()}
        for mode, native in WAYS:
            name = f"{mode}-{'compiled' if native else 'python'}"
            told[name] = {
                "wrong": run(device, own, mode, native=native, shape=shape)[0],
                "use": use(device, own, mode, native=native)._asdict(),
            }
        told["scenes"] = play(device, own)
    (folder / f"rank_{topology.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
