"""Every form of collective on two ranks: kind, group, number, bytes and dtype; or coverage says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import program, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.thorough]

# The full array's bytes, by hand: float32 but for the first; all-to-all: one rank's send buffer.
EXPECTED: dict[str, list[tuple[str, int]]] = {
    "all_reduce": [("allreduce", 24)],
    "reduce_scatter": [("reducescatter", 24)],
    "all_gather": [("allgather", 24)],
    "all_gather_list": [("allgather", 24)],
    "broadcast": [("broadcast", 12)],
    "all_to_all": [("alltoall", 16)],
    "all_to_all_list": [("alltoall", 16)],
    "reduce": [("reduce", 12)],
    "gather": [("gather", 24)],
    "scatter": [("scatter", 24)],
    "barrier": [("barrier", 0)],
    "coalesced_all_reduce": [("allreduce", 20)],
    "coalesced_all_gather": [("allgather", 40)],
    "functional_all_reduce": [("allreduce", 12)],
    "functional_all_gather": [("allgather", 24)],
    "functional_reduce_scatter": [("reducescatter", 24)],
    "functional_all_to_all": [("alltoall", 16)],
    "functional_coalesced_all_reduce": [("allreduce", 24)],
    "functional_coalesced_all_gather": [("allgather", 48)],
    "all_reduce_again": [("allreduce", 12)],
}
KINDS_ONLY = {
    "object_all_gather": ["allgather", "allgather"],
    "object_broadcast": ["broadcast", "broadcast"],
    "object_gather": ["allgather", "gather"],
    "object_scatter": ["broadcast", "scatter", "scatter"],
}
# gloo builds these of several collectives of its own, and counts each; the last passes no operator at all.
UNCOVERED = (
    "reduce_scatter_list",
    "coalesced_reduce_scatter",
    "functional_coalesced_reduce_scatter",
    "monitored_barrier",
)


def told_by(module: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """What the two ranks of `python -m MODULE FOLDER` wrote down."""
    succeeded(program(module, str(folder), *words))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module", params=["python", "native"])
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Ends stamped from Python, and by the compiled part where it was built."""
    return told_by("tests.instrument.kinds", tmp_path_factory.mktemp("kinds"), request.param)


def test_every_form_is_looked_at(told: list[dict[str, Any]]) -> None:
    assert set(told[0]) == {*EXPECTED, *KINDS_ONLY, *UNCOVERED, "send", "exchange"}


@pytest.mark.parametrize("name", [*EXPECTED, *KINDS_ONLY])
def test_it_is_seen_the_same_on_both_ranks(told: list[dict[str, Any]], name: str) -> None:
    first, second = told[0][name], told[1][name]
    for one in (first, second):
        assert one["complete"], one["reason"]
        assert all(ended for *_, ended in one["rows"])
        kinds = [kind for kind, *_ in one["rows"]]
        assert kinds == KINDS_ONLY.get(name, [kind for kind, _ in EXPECTED.get(name, [])])
    if name in EXPECTED:
        assert [(kind, size) for kind, _, _, size, _, _ in first["rows"]] == EXPECTED[name]
        # Group, number, bytes and dtype: what ranks are matched by (sends and receives before do not shift them).
        assert first["rows"] == second["rows"]


def test_the_type_is_the_tensors(told: list[dict[str, Any]]) -> None:
    assert told[0]["all_reduce"]["rows"][0][4] == "float64"
    assert told[0]["broadcast"]["rows"][0][4] == "float32"
    assert told[0]["barrier"]["rows"][0][4] is None


def test_sends_and_receives_have_numbers_of_their_own(told: list[dict[str, Any]]) -> None:
    rows = [
        [(kind, seq, size) for kind, _, seq, size, _, _ in (*one["send"]["rows"], *one["exchange"]["rows"])]
        for one in told
    ]
    assert rows[0] == [("send", 0, 8), ("send", 1, 8), ("recv", 0, 8)]
    assert rows[1] == [("recv", 0, 8), ("send", 0, 8), ("recv", 1, 8)]
    assert all(one[name]["complete"] for one in told for name in ("send", "exchange"))


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_cannot_be_matched_to_the_backends_count_says_so(told: list[dict[str, Any]], name: str) -> None:
    for one in told:
        assert not one[name]["complete"]
        assert one[name]["issued"] == 2
        assert "the backends counted 2 collectives" in one[name]["reason"]
        assert one[name]["ratio"] is None
