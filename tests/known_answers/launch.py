"""Start `program` on two ranks, on a link whose transfers take exactly as long as asked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.known_answers.program import VALUES, Case
from tests.runs import program, succeeded


def link(transfer_ms: float) -> dict[str, Any]:
    """A fabric on which an all-reduce of one block's gradient takes exactly so long: half latency, half bandwidth.

    On two ranks a ring all-reduce is 2 (n - 1) = 2 latencies, and sends 2 (n - 1) / n = 1 array.
    """
    return {
        "inter_latency_us": transfer_ms * 1e3 / 2 / 2,
        "inter_bandwidth_gb_per_s": VALUES * 4 / (transfer_ms / 2 * 1e6),
    }


def launch(folder: Path, cases: list[Case], module: str = "tests.known_answers.program") -> None:
    """Run the cases one after another in one launch; `folder` then has a run folder for each."""
    succeeded(program(module, str(folder), json.dumps([asdict(case) for case in cases])))
