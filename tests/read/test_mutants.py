"""Evidence that is taken away is never 0: a report of a trace that lacks some says so, or what it says of all; and
siblings of what public cases showed are right, or null or bounded with the reason.

`mutant_cases.json`: of each format some mutants, one of each rule, in the short gate too (`said`); traces of rank 0 by
names and hosts, and how many processes they are of; folders, by node and rank, of which a process's is `node0/rank1`.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from aorta.records.schema import Coverage
from tests.analysis.builders import collective, footer, header, line_of, metrics, step
from tests.read.answers import Line, Records, answer, judge, record_answer, shares
from tests.read.evidence_jobs import JOBS, Shape, device_rows, drawn_shape, job, kineto_job, sums_ms
from tests.read.evidence_rows import MARK, later
from tests.read.mutants import KINDS, MUTATIONS, siblings, verdicts
from tests.read.mutations import facts

CASES: Final = json.loads(Path(__file__).with_name("mutant_cases.json").read_text())
BY_NAME: Final = ("kineto-cuda", "nsys")
"""Formats in which each name of `drawn_shape` is read; the others share how names are read."""
_ALL_OF_A_KERNEL: Final = "every fourth kernel and all that tells of it lost"
KNOWN: Final = {
    "kineto-cpu": {"a step twice"},
    "kineto-cuda": {_ALL_OF_A_KERNEL},
    "kineto-rocm": {_ALL_OF_A_KERNEL},
    "nsys": {_ALL_OF_A_KERNEL, "every third collective and all that tells of it lost"},
}
"""Mutants that are wrong: nothing in them claims what is missing, as no call launches the operators of a CPU, Kineto's
kernels have no number that counts, and nsys has none at all.
"""


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, seed) for name in JOBS for seed in ((None, 1, 2, 3, 5, 6, 7) if name in BY_NAME else (None, 3))],
)
def test_healthy_traces_are_read_in_full(name: str, seed: int | None) -> None:
    """The whole of a trace is what a sweep over the rows of the job gives."""
    shape = Shape() if seed is None else drawn_shape(seed)
    found = answer(job(name, shape))
    assert found.refused is None
    for rank in range(shape.ranks):
        right = sums_ms(list(device_rows(rank, shape)))
        if name == "kineto-cpu":
            del right["copy_ms"]
        assert {metric: found.values["whole", metric][rank].value for metric in right} == pytest.approx(right)


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_mutants(name: str) -> None:
    found = verdicts(job(name))
    wrong = {mutant: each.wrong[:3] for mutant, each in found.items() if each.outcome == "wrong"}
    assert wrong.keys() == KNOWN.get(name, set()), (shares(found), wrong)


@pytest.mark.parametrize("format", CASES["said"])
def test_what_is_missing_is_said(format: str) -> None:  # noqa: A002 - the reader's name
    healthy = job(format)
    right = answer(healthy)
    mutants = {name: MUTATIONS[name](healthy, random.Random(2)) for name in CASES["said"][format]}
    found = {name: judge(right, answer(files), name) for name, files in mutants.items()}
    assert {name: (each.outcome, each.wrong) for name, each in found.items()} == dict.fromkeys(found, ("null", []))


def test_a_step_that_the_recording_cut_is_left_out() -> None:
    healthy = job("kineto-cuda")
    found = answer(MUTATIONS["cut within a step, and its mark"](healthy, random.Random(2)))
    assert judge(answer(healthy), found, "cut within a step").wrong == []
    assert len(found.values["step", "window_ms"]) == 2 * 2
    assert any("began or ended within step 9, which is left out" in note for note in found.notes)


OfRecords: TypeAlias = Callable[[Records], Records]


def by_lines(how: dict[str, Any]) -> OfRecords:
    """Change lines `of` a kind, if not steps, in every file or the `last`: only some `steps` are left, some of their
    `collectives`, so many `times`; values are `set` or `add`ed to, metrics of a pattern are `scale`d, or lost.
    """

    def change(line: Line) -> Line:
        line = copy.deepcopy(line)
        for place, value in how.get("set", {}).items():
            *outer, name = place.split(".")
            (line[outer[0]] if outer else line)[name] = value
        line |= {name: line[name] + more for name, more in how.get("add", {}).items()}
        if "scale" in how:
            pattern, by = how["scale"]
            scaled = {
                name: value and by and value * by for name, value in line["overlap"].items() if re.search(pattern, name)
            }
            kept = {name: value for name, value in line["overlap"].items() if name not in scaled}
            line["overlap"] = kept if by is None else kept | scaled
        if "collectives" in how:
            line["collectives"] = [line["collectives"][at] for at in how["collectives"]]
        return line

    def lines_of(line: Line) -> list[Line]:
        if line["record"] != how.get("of", "step"):
            return [line]
        left = "steps" not in how or line["global_step"] in how["steps"]
        return [change(line)] * (how.get("times", 1) if left else 0)

    return lambda records: {
        name: lines if how.get("last") and name != max(records) else [each for line in lines for each in lines_of(line)]
        for name, lines in records.items()
    }


def _ends_lost(line: Line) -> Line:
    rows = line.get("collectives") or ()
    return line | ({"collectives": [[*row[:7], None, *row[8:]] for row in rows]} if rows else {})


RECORD_MUTATIONS: Final[Mapping[str, OfRecords]] = {
    **{name: by_lines(how) for name, how in CASES["records"].items()},
    "a rank's file lost": lambda records: {name: records[name] for name in sorted(records)[:-1]},
    "a rank's file cut at its half": lambda records: records | {max(records): records[max(records)][:5]},
    "a rank's file twice": lambda records: records | {"rank_01_metrics.jsonl": records["rank_1_metrics.jsonl"]},
    "steps in another order": lambda records: {
        name: [lines[0], *reversed(lines[1:-1]), lines[-1]] for name, lines in records.items()
    },
    "ends of collectives lost": lambda records: {name: [*map(_ends_lost, lines)] for name, lines in records.items()},
}


def record_lines() -> Records:
    """The records of two ranks, eight steps of 10 ms in which two of three all-reduces are hidden."""
    coverage, files = Coverage(3, 3, complete=True), {}
    for rank in range(2):
        lines = []
        for number in range(8):
            rows = [collective(seq=3 * number + at, start_ms=3.0 * at, end_ms=3.0 * at + 1) for at in range(3)]
            overlap = metrics(10, 6 + 0.01 * number, 3, 2)
            lines.append(step(rank, 2, number, overlap=overlap, coverage=coverage, collectives=rows))
        every = [header(rank, 2), *lines, footer(len(lines))]
        files[f"rank_{rank}_metrics.jsonl"] = [json.loads(line_of(line)) for line in every]
    return files


def test_records_that_lack_evidence_give_the_same_numbers_or_none() -> None:
    healthy = record_lines()
    right = record_answer(healthy)
    assert right.values["run", "overlap_ratio"][0].value == pytest.approx(2 / 3)
    found = {name: judge(right, record_answer(change(healthy))) for name, change in RECORD_MUTATIONS.items()}
    assert {name: each.wrong for name, each in found.items() if each.outcome == "wrong"} == {}
    told = {name for name, each in found.items() if each.outcome in ("null", "refused")}
    needed = {"a rank's file lost", "collectives lost", "half of the collectives lost", "a model that is not recorded"}
    assert told >= needed


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


@pytest.mark.parametrize("case", CASES["traces of one rank"])
def test_processes_of_two_hosts_are_no_windows_of_one(case: dict[str, Any]) -> None:
    """Without marks, a later trace of a rank is a later window of its process only on its host, and by its name."""
    file = kineto_job(0, shape=drawn_shape(len(case["names"][0])))
    file = file.changed(row for row in file.rows if row.what != MARK)
    next_minute = file.changed(later(row, 60_000_000_000) for row in file.rows)
    files = [
        replace(each.changed(host=host), path=Path(name))
        for each, host, name in zip((file, next_minute), case["hosts"], case["names"], strict=True)
    ]
    found = answer(files)
    count = case["processes"]
    assert (len(found.values.get(("whole", "compute_ms"), ())), found.refused is None) == (count, count > 0)


@pytest.mark.parametrize("case", CASES["folders of nodes"])
def test_local_ranks_in_folders_of_nodes_are_one_job(case: dict[str, str]) -> None:
    """Four processes whose ranks are unknown, or a refusal that says both what they may be, and how to go on."""
    folder = case["folder"]
    files = facts(rank=None)(job(case["format"], replace(drawn_shape(len(folder)), ranks=4)), random.Random(0))
    moved = [
        replace(each, path=Path(folder.format(at // 2, at % 2, "ab"[at // 2]), each.path.name))
        for at, each in enumerate(files)
    ]
    right, found = answer(files), answer(moved)
    assert (found.refused is not None) == ("refused" in case)
    if found.refused is not None:
        assert re.search(r"several jobs[\s\S]*nodes of one job", found.refused)
        return
    assert sorted(found.values["whole", "compute_ms"]) == sorted(right.values["whole", "compute_ms"])
    assert any("number the ranks of each node anew" in note for note in found.notes)


def test_ranks_that_several_processes_have_by_name_alone_are_nobodys() -> None:
    files = facts(rank=None)(job("nsys", replace(drawn_shape(3), ranks=4)), random.Random(0))
    moved = [replace(each, path=Path(f"n{at // 2}-rank{at % 2}{each.path.suffix}")) for at, each in enumerate(files)]
    right, found = answer(files), answer(moved)
    assert sorted(found.values["whole", "compute_ms"]) == sorted(right.values["whole", "compute_ms"])
    assert sum("its rank is unknown" in note for note in found.notes) == len(files)


def test_whole_traces_are_no_steps() -> None:
    """Ranks that mark no steps have none, beside one that does."""
    first, *others = job("kineto-cuda", drawn_shape(2))
    unmarked = [file.changed(row for row in file.rows if row.what != MARK) for file in others]
    right, found = answer([first, *others]), answer([first, *unmarked])
    steps = len(right.values["step", "window_ms"]) // (1 + len(others))
    assert len(found.values["step", "window_ms"]) == steps
    assert len(found.values["whole", "window_ms"]) == 1 + len(others)
    assert not any("missing" in note for note in found.notes)
