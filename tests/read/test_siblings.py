"""Siblings of what public cases showed are right, or null or bounded with the reason (`tests.read.siblings`)."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.read.answers import answer, judge, shares
from tests.read.evidence_jobs import drawn_shape, job, kineto_job
from tests.read.evidence_rows import MARK
from tests.read.mutations import facts, shifted_ns
from tests.read.siblings import KINDS, siblings

SAME: Final = {"gloo beside device rows"}
"""Kinds in which nothing is missing."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_siblings(kind: str) -> None:
    found, least = {}, "same" if kind in SAME else "null"
    for name, sibling in siblings(kind):
        seen = answer(sibling.files)
        assert not any(re.search(r"\b(None|nan)\b", note) for note in seen.notes), seen.notes
        found[name] = judge(sibling.right, seen, sibling.name)
    wrong = {name: each.wrong[:3] for name, each in found.items() if each.outcome not in ("same", least)}
    # Without operators a trace whose device rows are of unknown categories holds nothing that is read.
    assert wrong in ({}, {"10: kineto-cuda": []}), (shares(found), wrong)


@pytest.mark.parametrize(
    ("names", "hosts", "processes"),
    [
        (("rank0.1.json", "rank0.2.json"), ("a", "a"), 1),
        (("rank0.1.json", "rank0.2.json"), ("a", "b"), 2),
        (("rank0.json", "rank0_1.json"), ("a", "a"), 1),
        (("rank0.json", "rank0 (1).json"), (None, None), 1),
        (("n1_77.rank0.111.pt.trace.json", "n1_77.rank0.222.pt.trace.json"), (None, None), 1),
        (("n1_77.rank0.111.pt.trace.json", "n2_77.rank0.222.pt.trace.json"), (None, None), 2),
        (("nodeA.rank0.json", "nodeB.rank0.json"), (None, None), 2),
        (("alpha_rank0_1.json", "beta_rank0_2.json"), (None, None), 2),
        (("tp0_rank0_1.json", "tp1_rank0_2.json"), ("a", "a"), 2),
        (("rank0-decode.json", "rank0-prefill.json"), ("a", "a"), 2),
        (("rank0/w1.json", "rank0/w2.json"), ("a", "b.example.org"), 2),
        (("job1/rank0.json", "job2/rank0.json"), ("a", "a"), 0),
    ],
)
def test_processes_of_two_hosts_are_no_windows_of_one(
    names: tuple[str, str], hosts: tuple[str | None, str | None], processes: int
) -> None:
    """Without marks, a later trace of a rank is a later window of its process only on its host, and by its name."""
    file = kineto_job(0, shape=drawn_shape(len(names[0])))
    file = file.changed(row for row in file.rows if row.what != MARK)
    files = [
        replace(each.changed(host=host), path=Path(name))
        for each, host, name in zip((file, shifted_ns(file, 60_000_000_000)), hosts, names, strict=True)
    ]
    found = answer(files)
    assert (len(found.values.get(("whole", "compute_ms"), ())), found.refused is None) == (processes, processes > 0)


@pytest.mark.parametrize(
    ("format", "folder", "refused"),
    [
        ("rocprofv3-csv", "node{0}/rank{1}", False),
        ("nsys", "node{0}_rank{1}", False),
        ("rocprofv3-json", "host-{2}/rank{1}", False),
        ("nsys", "j1/node0{0}/rank{1}", False),
        ("rocprofv3-csv", "ip-10-0-0-{0}/rank-{1}", False),
        ("nsys", "compute{0}.cluster/rank{1}", False),
        ("rocprofv3-json", "worker-{0}/rank_{1}", False),
        ("rocprofv3-csv", "hostname{0}/rank{1}", False),
        ("rocprofv3-json", "x/dgx-0{0}_rank{1}", False),
        ("nsys", "n{0}/rank{1}", True),  # as well two jobs
    ],
)
def test_local_ranks_in_folders_of_nodes_are_one_job(format: str, folder: str, refused: bool) -> None:  # noqa: A002
    """Four processes whose ranks are unknown, or a refusal that says both what they may be, and how to go on."""
    files = facts(rank=None)(job(format, replace(drawn_shape(len(folder)), ranks=4)), random.Random(0))
    moved = [
        replace(each, path=Path(folder.format(at // 2, at % 2, "ab"[at // 2]), each.path.name))
        for at, each in enumerate(files)
    ]
    right, found = answer(files), answer(moved)
    assert (found.refused is not None) == refused
    if found.refused is not None:
        assert re.search(r"several jobs[\s\S]*nodes of one job", found.refused)
        return
    assert sorted(found.values["whole", "compute_ms"]) == sorted(right.values["whole", "compute_ms"])
    assert any("number the ranks of each node anew" in note for note in found.notes)


def test_whole_traces_are_no_steps() -> None:
    """Ranks that mark no steps have none, beside one that does."""
    first, *others = job("kineto-cuda", drawn_shape(2))
    unmarked = [file.changed(row for row in file.rows if row.what != MARK) for file in others]
    right, found = answer([first, *others]), answer([first, *unmarked])
    steps = len(right.values["step", "window_ms"]) // (1 + len(others))
    assert len(found.values["step", "window_ms"]) == steps
    assert len(found.values["whole", "window_ms"]) == 1 + len(others)
    assert not any("missing" in note for note in found.notes)
