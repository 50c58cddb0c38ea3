"""Dumps of the Flight Recorder with fields that torch never updates, each with who holds up the job.

`public_dumps.json` has a dump for each rank, the verdict that is right by construction (`culprits`: rank -> why), and
in `stacks` the innermost frames of the main thread of a rank. NCCL's fields are as `ProcessGroupNCCL` writes them:
messages of a batch share a `p2p_seq_id`, have no events and stay scheduled; an entry named `coalesced` ends the batch
and is updated. gloo has no version, and its work stays scheduled; `retired` says that it has ended.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy.evidence import ThreadStack
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge

CASES = json.loads(Path(__file__).with_name("public_dumps.json").read_text())


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_the_verdict_is_right(case: dict[str, Any], tmp_path: Path) -> None:
    for rank, dump in enumerate(case["dumps"]):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    evidence = read_dumps([tmp_path])
    for rank, frames in case.get("stacks", {}).items():
        evidence[int(rank)].stacks = [ThreadStack(name="MainThread", frames=tuple(frames))]
    verdict = judge(evidence)
    culprits = {str(culprit.rank): culprit.reason for culprit in verdict.culprits}
    assert {"kind": verdict.kind, "culprits": culprits} == case["expect"]
