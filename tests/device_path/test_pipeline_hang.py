"""A pipeline of four stages, healthy and with a fault: who its Flight Recorder's dumps accuse, whole and cut short."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from aorta.autopsy.evidence import ThreadStack, Verdict
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from tests.device_path.launch import launched
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]

RANKS: Final = range(4)
NO_SEND = "has not issued send 8 of the default group (to rank 3)"
NO_RECEIVE = "has not issued recv 8 of the default group (from rank 1)"
NO_ALL_REDUCE = "has not issued all_reduce 2 of dp"
CIRCLE = "waits in all_reduce 2 of dp for ranks that wait for it in "
ANSWERS = {
    "none": ("not_stuck", None, None),
    "does_not_send": ("rank_did_not_join", NO_SEND, CIRCLE + "recv 8 of the default group"),
    "stays_before_sending": ("rank_did_not_join", NO_SEND, NO_SEND),
    "does_not_receive": ("rank_did_not_join", NO_RECEIVE, CIRCLE + "send 8 of the default group"),
    "skips_the_all_reduce": ("rank_did_not_join", NO_ALL_REDUCE, NO_ALL_REDUCE),
    "stuck_inside": ("stuck_inside", None, None),
    "leaves": ("rank_did_not_join", NO_ALL_REDUCE, NO_ALL_REDUCE),
}
"""Of each fault of rank 2: the answer and why it is accused, without and with TORCH_NCCL_ENABLE_TIMING, by which the
circle of a rank that skipped a message is seen.
"""


def dumps(folder: Path) -> list[dict[str, Any]]:
    return [pickle.loads((folder / f"trace_{rank}").read_bytes()) for rank in RANKS]


def judged(folder: Path, of_ranks: list[dict[str, Any]]) -> Verdict:
    for rank, one in enumerate(of_ranks):
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(one))
    return judge(read_dumps([folder]))


def cut_short(whole: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Dumps of rings that kept few entries, and of unfinished work only: of one rank, and of all."""
    for kept in (1, 2, 3, 4, 5, 7, 10):
        cut = [{**one, "entries": one["entries"][-kept:]} for one in whole]
        yield cut
        yield from ([cut[at] if at == rank else one for at, one in enumerate(whole)] for rank in RANKS)
    active = [{**one, "entries": [entry for entry in one["entries"] if entry["state"] != "completed"]} for one in whole]
    yield active
    yield from ([active[at] if at == rank else one for at, one in enumerate(whole)] for rank in RANKS)


@pytest.mark.parametrize(
    ("fault", "messages"),
    [*((fault, "batched") for fault in ANSWERS), ("none", "unbatched"), ("does_not_send", "unbatched")],
)
def test_a_pipeline_is_judged_by_its_dumps(fault: str, messages: str, tmp_path: Path) -> None:
    launched("tests.device_path.program_pipeline_hang", str(tmp_path), fault, messages, ranks=len(RANKS))
    kind, *reasons = ANSWERS[fault]
    for form, reason in zip(("untimed", "timed"), reasons, strict=True):
        verdict = judge(read_dumps([tmp_path / form]))
        culprits = [(one.rank, one.reason) for one in verdict.culprits]
        assert (form, culprits) == (form, [(2, reason)] if reason else [])
        assert verdict.kind == ("order_swapped" if (reason or "").startswith(CIRCLE) else kind)
        for cut in cut_short(dumps(tmp_path / form)):
            (tmp_path / "cut").mkdir(exist_ok=True)
            less = judged(tmp_path / "cut", cut)
            assert [one.rank for one in less.culprits] in ([], [2] if reason else [])
            # Of a batch of messages without its end nobody knows whether it is over: then nothing is decided, and said.
            open_ended = any("lacks entries or finished work" in note for note in less.notes)
            assert reason or less.kind == kind or (open_ended and less.kind == "cannot_decide")
    if fault == "leaves":
        evidence = read_dumps([tmp_path / "timed"])
        frames = tuple(json.loads((tmp_path / "stack_2.json").read_text()))
        evidence[2].stacks = [ThreadStack(name="MainThread", frames=frames)]
        (one,) = judge(evidence).culprits
        assert (one.rank, one.kind) == (2, "stuck_outside")
        assert one.reason == "is in destroy_process_group and has not issued all_reduce 2 of dp"
