"""Names of kernels from public traces and sources: none that communicates is taken for computation without a doubt, and
none that computes for communication.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from aorta.timeline.classes import communicates, doubtful, launches_communication

NAMES: Final[dict[str, dict[str, list[str]]]] = json.loads((Path(__file__).parent / "kernel_names.json").read_text())
"""What they do -> where they are from -> names. `doubtful` are those of projects that AORTA's table does not have."""


def names(does: str) -> list[str]:
    return [name for each in NAMES[does].values() for name in each]


def test_no_kernel_that_communicates_is_computation_without_a_doubt() -> None:
    assert [name for name in names("communicate") if not communicates(name)] == []
    assert [name for name in names("doubtful") if communicates(name) or not doubtful(name)] == []


def test_no_kernel_that_computes_is_communication() -> None:
    """What an operator of another kind launches stays computation, and few of these names are doubted."""
    assert [name for name in names("compute") if communicates(name) or doubtful(name)] == []


@pytest.mark.parametrize(
    ("text", "issues"),
    [
        ("c10d::allreduce_", True),
        ("_c10d_functional::all_gather_into_tensor", True),
        ("symm_mem::one_shot_all_reduce", True),
        ("symm_mem::fused_all_gather_matmul", False),
        ("record_param_comms", True),
        ("ncclAllReduce", True),
        ("nccl:all_reduce", True),
        ("deep_ep.dispatch", True),
        ("aten::mm", False),
        ("dispatch", False),
    ],
)
def test_operators_and_ranges_that_issue_communication(text: str, issues: bool) -> None:
    assert launches_communication(text) is issues


@pytest.mark.parametrize(
    "part", ["nccl", "userbuffers_", "a", "A", "aA", "combine_", "EpDispatch", "deep_ep::", "<", "_"]
)
def test_a_long_name_takes_linear_time(part: str) -> None:
    # Quadratic patterns would take minutes here, and the test's time-out ends them.
    long = part * (250_000 // len(part))
    communicates(long), doubtful(long), launches_communication(long)
