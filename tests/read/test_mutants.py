"""Evidence that is taken away is never 0: a report of a trace that lacks some says so, or what it says of all; and
siblings of what public cases showed are right, or null or bounded with the reason."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from aorta.records.schema import Coverage
from tests.analysis.builders import collective, footer, header, line_of, metrics, step
from tests.read.answers import Line, Records, answer, judge, record_answer, shares
from tests.read.evidence_jobs import JOBS, Shape, device_rows, drawn_shape, job, kineto_job, sums_ms
from tests.read.evidence_rows import MARK, later
from tests.read.mutants import KINDS, MUTATIONS, siblings, verdicts
from tests.read.mutations import facts

_ALL_OF_A_KERNEL: Final = "every fourth kernel and all that tells of it lost"
KNOWN: Final = {
    "kineto-cpu": {"a tenth of all events lost", "a step twice"},
    "rocpd": {"a tenth of all device rows lost"},
    "kineto-cuda": {_ALL_OF_A_KERNEL},
    "kineto-rocm": {_ALL_OF_A_KERNEL},
    "nsys": {_ALL_OF_A_KERNEL, "every third collective and all that tells of it lost"},
}
"""Mutants that are wrong: nothing in them claims what is missing, as no call launches the operators of a CPU, rocpd
links no copies, Kineto's kernels have no number that counts, and nsys has none at all.
"""


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [None, 1, 2, 3, 5, 6, 7])
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


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("kernels begin and end in events of their own", "kineto-cuda"),
        ("a third of the computation ends before it starts", "nsys"),
        ("a fifth of the communication lasts longer than half an hour", "rocprofv3-json"),
        ("the device lags by less than nothing", "kineto-rocm"),
        ("calls of XPU, a third of the computation lost", "kineto-cuda"),
        ("every third collective and all that tells of it lost", "kineto-cuda"),
        ("every fourth kernel and all that tells of it lost", "rocprofv3-csv"),
        ("kernels communicate and multiply", "nsys"),
        ("arguments of collectives contradict their kernels", "kineto-cuda"),
        ("cut within the last step, without calls", "rocprofv3-csv"),
        ("communication again, a little later", "nsys"),
        ("kernels again on another stream, a little later", "rocprofv3-csv"),
        ("numbers of launches permuted", "kineto-cuda"),
        ("one collective runs an hour later", "rocprofv3-json"),
        ("one kernel begins 5 ms early", "kineto-rocm"),
        ("computation of the last step lost, and its calls", "kineto-cuda"),
        ("communication in another file", "nsys"),
        ("devices of another number from the middle on", "kineto-cuda"),
        ("the device's clock of one rank is slower by a tenth", "nsys"),
        ("computation of one rank in another unit", "rocpd"),
        ("copies on another device", "nsys"),
        ("a step twice", "kineto-rocm"),
        ("a step lost with its mark", "rocprofv3-csv"),
        ("communication by copies of the device, without operators", "kineto-cuda"),
    ],
)
def test_what_is_missing_is_said(name: str, format: str) -> None:  # noqa: A002 - the reader's name
    """A mutant of each rule, in the short gate too."""
    healthy = job(format)
    found = judge(answer(healthy), answer(MUTATIONS[name](healthy, random.Random(2))), name)
    assert (found.outcome, found.wrong) == ("null", [])


def test_a_step_that_the_recording_cut_is_left_out() -> None:
    healthy = job("kineto-cuda")
    found = answer(MUTATIONS["cut within a step, and its mark"](healthy, random.Random(2)))
    assert judge(answer(healthy), found, "cut within a step").wrong == []
    assert len(found.values["step", "window_ms"]) == 2 * 2
    assert any("began or ended within step 9, which is left out" in note for note in found.notes)


def in_steps(change: Callable[[Line, int], Line | None], *, last_only: bool = False) -> Callable[[Records], Records]:
    """Change steps, or leave them out, by their place in the file."""

    def of(lines: list[Line]) -> list[Line]:
        found, at = [], 0
        for line in lines:
            kept: Line | None = line
            if line["record"] == "step":
                kept, at = change(copy.deepcopy(line), at), at + 1
            found += [] if kept is None else [kept]
        return found

    return lambda records: {
        name: lines if last_only and name != max(records) else of(lines) for name, lines in records.items()
    }


def in_lines(name: str, **values: Any) -> Callable[[Records], Records]:
    """Set fields of one kind of line in the last file."""
    return lambda records: {
        file: [line | values if line["record"] == name and file == max(records) else line for line in lines]
        for file, lines in records.items()
    }


def _shifted(line: Line, by_ns: int) -> Line:
    return line | {key: line[key] + by_ns for key in ("start_mono_ns", "end_mono_ns", "t_start_ns", "t_end_ns")}


def _covered(line: Line, **values: Any) -> Line:
    return line | {"coverage": line["coverage"] | values}


def _measured(line: Line, **values: float) -> Line:
    return line | {"overlap": line["overlap"] | values}


RECORD_MUTATIONS: Final[Mapping[str, Callable[[Records], Records]]] = {
    "a rank's file lost": lambda records: {name: records[name] for name in sorted(records)[:-1]},
    "a rank's file cut at its half": lambda records: {
        name: lines[: len(lines) // 2] if name == max(records) else lines for name, lines in records.items()
    },
    "a rank's file twice": lambda records: records | {"rank_01_metrics.jsonl": records["rank_1_metrics.jsonl"]},
    "both files are of rank 0": in_lines("header", rank=0),
    "another attempt": in_lines("header", attempt=1),
    "footers lost": lambda records: {name: lines[:-1] for name, lines in records.items()},
    "a footer that counts more steps": in_lines("footer", steps_written=99),
    "groups lost": in_lines("footer", groups={}),
    "every second step lost": in_steps(lambda line, at: None if at % 2 else line),
    "the last steps lost": in_steps(lambda line, at: None if at > 5 else line),
    "steps of one rank lost": in_steps(lambda line, at: None if at % 3 else line, last_only=True),
    "steps twice": lambda records: {
        name: [each for line in lines for each in [line] * (1 + (line["record"] == "step"))]
        for name, lines in records.items()
    },
    "steps in another order": lambda records: {
        name: [lines[0], *reversed(lines[1:-1]), lines[-1]] for name, lines in records.items()
    },
    "collectives lost": in_steps(lambda line, at: line | {"collectives": []}),
    "half of the collectives lost": in_steps(lambda line, at: line | {"collectives": line["collectives"][::2]}),
    "collectives of one rank lost": in_steps(lambda line, at: line | {"collectives": []}, last_only=True),
    "more collectives issued than seen": in_steps(lambda line, at: _covered(line, issued=9)),
    "a model that is not recorded": in_steps(lambda line, at: _covered(line, unwatched=line["coverage"]["seen"])),
    "collectives between steps": in_steps(lambda line, at: _covered(line, outside=3)),
    "steps of another rank's size of the world": in_steps(lambda line, at: line | {"world_size": 4}, last_only=True),
    "metrics lost": in_steps(lambda line, at: line | {"overlap": {"window_ms": line["overlap"]["window_ms"]}}),
    "exposed time lost": in_steps(
        lambda line, at: line | {"overlap": {k: v for k, v in line["overlap"].items() if "exposed" not in k}}
    ),
    "times of a rank lost": in_steps(lambda line, at: line | {"start_mono_ns": None}, last_only=True),
    "clocks an hour apart": in_steps(lambda line, at: _shifted(line, 3_600_000_000_000), last_only=True),
    "metrics of a rank in another unit": in_steps(
        lambda line, at: (
            line | {"overlap": {k: v / 1000 if v and k.endswith("_ms") else v for k, v in line["overlap"].items()}}
        ),
        last_only=True,
    ),
    "computation in another unit": in_steps(
        lambda line, at: _measured(line, compute_ms=line["overlap"]["compute_ms"] / 1000)
    ),
    "a ratio that is not of its parts": in_steps(lambda line, at: _measured(line, overlap_ratio=0.1)),
    "half of a kind of collectives": in_steps(lambda line, at: _measured(line, allreduce_ms=1.5)),
    "steps twice as long as their windows": in_steps(
        lambda line, at: line | {"end_mono_ns": line["end_mono_ns"] + 10_000_000}
    ),
    "ends of collectives lost": in_steps(
        lambda line, at: line | {"collectives": [[*row[:7], None, *row[8:]] for row in line["collectives"]]}
    ),
}


def record_lines() -> Records:
    """The records of two ranks, eight steps of 10 ms in which two of three all-reduces are hidden."""
    files = {}
    for rank in range(2):
        lines = [
            step(
                rank,
                2,
                number,
                overlap=metrics(10, 6 + 0.01 * number, 3, 2),
                coverage=Coverage(3, 3, complete=True),
                collectives=[
                    collective(seq=3 * number + at, start_ms=3.0 * at, end_ms=3.0 * at + 1) for at in range(3)
                ],
            )
            for number in range(8)
        ]
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
    assert told >= {
        "a rank's file lost",
        "collectives lost",
        "half of the collectives lost",
        "a model that is not recorded",
    }


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
        for each, host, name in zip(
            (file, file.changed(later(row, 60_000_000_000) for row in file.rows)), hosts, names, strict=True
        )
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
