"""A pipeline of four stages, healthy and with a fault: who its Flight Recorder's dumps accuse, whole and cut short."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy.evidence import ThreadStack
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.autopsy.verdict import Verdict
from tests.device_path.launch import launched
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]

DID_NOT_JOIN = [(2, "rank_did_not_join")]
ANSWERS = {
    "none": ("not_stuck", []),
    "does_not_send": ("order_swapped", [(2, "order_swapped")]),
    "stays_before_sending": ("rank_did_not_join", DID_NOT_JOIN),
    "does_not_receive": ("order_swapped", [(2, "order_swapped")]),
    "skips_the_all_reduce": ("rank_did_not_join", DID_NOT_JOIN),
    "stuck_inside": ("stuck_inside", []),
    "leaves": ("rank_did_not_join", DID_NOT_JOIN),
}
"""Of each fault of rank 2: what the dumps say, and who is accused."""


def answer(verdict: Verdict) -> tuple[str, list[tuple[int, str]]]:
    return verdict.kind, [(one.rank, one.kind) for one in verdict.culprits]


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        *((fault, "batched") for fault in ANSWERS),
        *((fault, "unbatched") for fault in ("none", "does_not_send")),
    ],
)
def test_a_pipeline_is_judged_by_its_dumps(fault: str, messages: str, tmp_path: Path) -> None:
    launched("tests.device_path.program_pipeline_hang", str(tmp_path), fault, messages, ranks=4)
    for form in ("timed", "untimed"):
        verdict = judge(read_dumps([tmp_path / form]))
        assert (form, answer(verdict)) == (form, ANSWERS[fault])
