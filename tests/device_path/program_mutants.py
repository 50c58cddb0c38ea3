"""Two ranks go through the loop of `scenario` and the `scenes` with mutants of the device path, one after another.

Enters: a folder, the tap, and the names of mutants of Python; an empty name is the code as it is. Leaves:
`rank_<r>.json`: by name what `program_rules.answers` has said, which stops at the first loop with something wrong. Run
by `test_mutants` and `run_mutants`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.device_path.mutants import instrument
from tests.device_path.program_rules import answers, off, one_of_the_ranks
from tests.device_path.rig import groups


def main() -> None:
    """Every mutant that is named."""
    folder, tap, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    assert tap in ("python", "compiled")
    told: dict[str, Any] = {}
    with one_of_the_ranks() as device:
        own = groups(device)
        without = off(device, own)
        for name in names:
            sys.stderr.write(f"{time.monotonic():.2f}: {name}\n")  # which one it is, should it hang
            with instrument(name) as make:
                told[name] = {"off": without} | answers(device, own, without, [tap], make, hasty=True)
    (folder / f"rank_{device.index}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
