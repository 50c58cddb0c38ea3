"""Who waited for which collective, on two ranks: the rows of both interceptors against the caller's own clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.records.schema import Gradient
from tests.instrument.taps import compiled_part
from tests.runs import program, succeeded


@pytest.mark.dist
@pytest.mark.parametrize("ends", ["python", "native"])
def test_both_interceptors_tell_every_wait(tmp_path: Path, ends: str) -> None:
    """Against the caller's own clock round each wait, in one launch of two ranks."""
    if ends == "native":
        compiled_part()
    succeeded(program("tests.instrument.waits_of_two", str(tmp_path), ends))
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for name, scene in told["scenes"].items():
            rows = [(group, seq, kind) for group, seq, _, _, kind in scene["waits"]]
            assert rows == [tuple(row) for row in scene["expected"]], name
            for (_, _, enter, leave, _), (before, after) in zip(scene["waits"], scene["round"], strict=True):
                assert before <= enter <= leave <= after, name
        order = [Gradient(block, size) for block, size, _ in told["gradient_order"]]
        assert order == [Gradient("1", 8), Gradient("1", 32), Gradient("0", 16), Gradient("0", 64)]
        assert told["again"] == 0
