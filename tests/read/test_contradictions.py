"""What a trace says of one thing twice has to agree: each of these is null, with the reason, or refused.

`contradiction_cases.json` has of each case the format of the traces, how they are changed, and words of what is said.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aorta.read.ledger import WHOLE
from aorta.read.traces.consistency import rounded, unrecorded
from tests.read.answers import answer, judge
from tests.read.evidence_jobs import job
from tests.read.mutants import mutation
from tests.read.tables import COMPUTE, row, trace

CASES = json.loads(Path(__file__).with_name("contradiction_cases.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_what_contradicts_itself_is_no_number(name: str) -> None:
    source, form, why = CASES[name]
    files = job(source)
    seen = answer(mutation(form)(files, random.Random(1)))
    said = [seen.refused or "", *seen.notes, *(own.why for values in seen.values.values() for own in values)]
    assert any(why in text for text in said), said
    lag = "the device lags" if "late" in name else ""
    assert judge(answer(files), seen, lag).wrong == []


@pytest.mark.parametrize(("kernels", "lacking"), [((4, 10, 10, 10), {0}), ((4, 10, 4, 10), set())])
def test_steps_of_two_sorts_lack_nothing(kernels: Sequence[int], lacking: set[int]) -> None:
    """A kernel after another, and nothing from then on: gradients are accumulated in every second step."""
    begun = [12 * step + at for step, count in enumerate(kernels) for at in range(count)]
    steps = [(step, 12 * step, 12 * step + 12) for step in range(len(kernels))]
    seen = unrecorded(trace([row(COMPUTE, start, start + 1) for start in begun], steps=steps))
    assert {gap.step for gap in seen.gaps} - {WHOLE} == lacking


@pytest.mark.parametrize(("grain_ns", "wrong"), [(250, False), (1_000_000, True)])
def test_what_a_tool_rounds_of_times_matters_beside_lengths(grain_ns: int, wrong: bool) -> None:
    """250 ns: microseconds since 1970 in a float of 64 bits."""
    lengths_ns = np.arange(20_001, 20_101, dtype=np.int64)
    starts_ns = np.arange(100) * 2_000_137 // grain_ns * grain_ns
    assert (rounded(starts_ns, lengths_ns) is not None) is wrong
