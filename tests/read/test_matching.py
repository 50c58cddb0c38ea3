"""What a collective cost, across ranks. Expected numbers are worked out by hand or by plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aorta.analysis
from aorta.read.frames import UNNUMBERED, Groups
from aorta.records.schema import Collective
from aorta.timeline.classes import UNKNOWN_KIND
from tests.analysis.builders import collective, footer, header, metrics, step, write_rank

HALF = metrics(10, 8, 4, 2)


def run_of(folder: Path, per_rank: list[list[Collective]], groups: list[dict[str, list[int]] | None] | None = None):
    """One step a rank with those collectives; `groups` None for a rank means it was killed."""
    size = len(per_rank)
    for rank, rows in enumerate(per_rank):
        known = groups[rank] if groups else {"world": list(range(size))}
        foot = None if known is None else footer(1, size, groups=known)
        write_rank(folder, header(rank, size), [step(rank, size, overlap=HALF, collectives=rows)], foot)
    return aorta.analysis.collectives(folder)


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_kinds_that_a_rank_may_end_early_have_no_transfer(tmp_path: Path, kind: str) -> None:
    frame = run_of(tmp_path, [[collective(kind)]] * 2)
    assert frame[["transfer_ms", "wait_ms", "algbw_gb_per_s", "busbw_gb_per_s"]].isna().all(axis=None)
    assert frame["transfer_reason"].str.contains("end this kind early").all()


def test_a_killed_rank_that_peers_list_in_two_groups_of_one_name_stays_unknown(tmp_path: Path) -> None:
    members = [{"dp": [0, 2]}, {"dp": [1, 2]}, None]
    frame = run_of(tmp_path, [[collective(group="dp")]] * 3, members)
    assert frame["members"].tolist()[:2] == [(0, 2), (1, 2)]
    assert frame["members"].isna().tolist() == [False, False, True]
    assert frame["transfer_ms"].isna().all()


def test_a_number_that_begins_anew_in_each_step_is_matched_within_its_step(tmp_path: Path) -> None:
    for rank, lengths_ms in enumerate(((2, 7), (3, 5))):
        lines = [
            step(rank, 2, number, overlap=HALF, collectives=[collective(seq=0, end_ms=length_ms)])
            for number, length_ms in enumerate(lengths_ms)
        ]
        write_rank(tmp_path, header(rank, 2), lines)
    frame = aorta.analysis.collectives(tmp_path).sort_values(["rank", "global_step"])
    assert frame["transfer_ms"].tolist() == [2, 5, 2, 5]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([collective(seq=UNNUMBERED)], "does not number it"),
        ([collective(UNKNOWN_KIND)], "its kind is not known"),
    ],
)
def test_what_its_source_does_not_tell_is_not_matched(tmp_path: Path, rows: list[Collective], said: str) -> None:
    frame = run_of(tmp_path, [rows, rows])
    assert frame["transfer_ms"].isna().all()
    assert frame["transfer_reason"].str.contains(said).all()


def test_groups_count_rows_and_different_ranks() -> None:
    """Numbers 0 to 3: on ranks 0 and 1; twice on rank 0 and on rank 1; twice on rank 0 alone; on rank 1 alone."""
    number = np.array([0, 1, 1, 2, 2, 0, 1, 3])
    rank = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    by = Groups(number)
    assert (by.sizes.tolist(), by.distinct(rank).tolist()) == ([2, 3, 2, 1], [2, 2, 1, 1])
    assert [part.tolist() for part in by.parts(rank)] == [[0, 1], [0, 0, 1], [0, 0], [1]]


def test_without_any_footer_the_group_is_unknown_not_the_world(tmp_path: Path) -> None:
    frame = run_of(tmp_path, [[collective()]] * 2, [None, None])
    assert frame["members"].isna().all()
    assert frame["busbw_gb_per_s"].isna().all()
    assert frame["transfer_reason"].str.contains("no footer").all()


def test_a_run_without_collectives_gives_an_empty_table(tmp_path: Path) -> None:
    frame = run_of(tmp_path, [[], []])
    assert frame.empty
    assert {"transfer_ms", "wait_ms", "busbw_gb_per_s"} <= set(frame.columns)
