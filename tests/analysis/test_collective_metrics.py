"""Collectives across ranks, held to plain loops over what was written, and what is not matched."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import aorta.analysis
from aorta.analysis import dataframes
from aorta.analysis.collective_metrics import behind_others, collective_metrics
from aorta.documents import as_json
from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, busbw_factor
from aorta.errors import InputError
from aorta.read.frames import UNNUMBERED
from aorta.read.record import load_run
from aorta.records.schema import Coverage, Step
from aorta.timeline.classes import LOCKSTEP, UNKNOWN_KIND
from tests.analysis.builders import collective, footer, header, metrics, step, write_rank
from tests.analysis.run_builders import recorded

HALF = metrics(10, 8, 4, 2)
NO_SHRINKING = (
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
)  # an example writes and reads a run: shrinking takes minutes
WORLD, PAIRS = "world", "pair"


@st.composite
def runs(draw: st.DrawFn) -> list[list[list[tuple[str, str, int, int, int | None]]]]:
    """Per rank, per step, rows of (kind, group, bytes, start, length). All ranks issue one schedule, as they do in
    training; starts and lengths are each rank's own, and now and then a rank lacks a collective, an end, or a whole
    step.
    """
    size = draw(st.integers(2, 4))
    schedule = draw(
        st.lists(
            st.lists(
                st.tuples(
                    st.sampled_from(["allreduce", "allreduce", "allgather", "broadcast", "barrier"]),
                    st.sampled_from([WORLD, WORLD, PAIRS]),
                    st.sampled_from([0, 8, 1000]),
                ),
                max_size=4,
            ),
            min_size=2,
            max_size=4,
        )
    )
    slow = draw(st.integers(-1, size - 1))  # waits least in every collective
    odd = draw(st.integers(0, 3))  # 0: some rank lacks something
    plan = []
    for rank in range(size):
        steps = []
        for rows in schedule:
            mine = []
            for kind, group, count in rows:
                length: int | None = 1 if rank == slow else draw(st.integers(2 if slow >= 0 else 0, 9))
                if odd == 0 and draw(st.integers(0, 9)) == 0:
                    length = None
                if odd != 0 or draw(st.integers(0, 9)):
                    mine.append((kind, group, count, draw(st.integers(0, 9)), length))
            steps.append(mine)
        plan.append(steps[: draw(st.integers(1, len(steps))) if odd == 0 else None])
    return plan


def written(folder: Path, plan: Any, *, missed: bool = False, killed: bool = False) -> Path:
    """A run of `plan`: per rank, per step, rows of (kind, group, bytes, start, length). Step 0 is warm-up. Pairs of
    neighbours form groups of one name; the last rank may have missed a collective in its last step, or been killed.
    """
    size = len(plan)
    for rank, steps in enumerate(plan):
        pair = [other for other in range(size) if other // 2 == rank // 2]
        seq: defaultdict[str, int] = defaultdict(int)
        lines = []
        for number, row in enumerate(steps):
            issued = []
            for kind, group, count, start, length in row:
                end = None if length is None else start + length
                times = {"start_ms": start, "end_ms": end, "issue_ns": 0}
                issued.append(collective(kind, seq[group], group=group, bytes=count, **times))
                seq[group] += 1
            hole = missed and rank == size - 1 and number == len(steps) - 1
            coverage = Coverage(0, 1, False) if hole else Coverage(0, 0, True)
            at = {"warmup": number == 0, "coverage": coverage, "collectives": issued}
            lines.append(step(rank, size, number, overlap=HALF, **at))
        foot = footer(len(lines), size, groups={WORLD: list(range(size)), PAIRS: pair})
        write_rank(folder, header(rank, size), lines, None if killed and rank == size - 1 else foot)
    return folder


def matched(plan: Any, *, killed: bool = False) -> dict[Any, dict[int, Any]]:
    """Collectives across ranks, by plain loops: (kind, group, members, step, number in the group, bytes) -> start and
    length of each rank.
    """
    size = len(plan)
    seen: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
    for rank, steps in enumerate(plan):
        seq: defaultdict[str, int] = defaultdict(int)
        for number, row in enumerate(steps):
            for kind, group, count, start, length in row:
                pair = tuple(other for other in range(size) if other // 2 == rank // 2)
                members = tuple(range(size)) if group == WORLD else pair
                # Of a rank without a footer a peer tells; the last of an odd number of ranks has none in its pair.
                if killed and rank == size - 1 and len(members) == 1:
                    members = ()
                seen[kind, group, members, number, seq[group], count][rank] = start, length
                seq[group] += 1
    return seen


def by_hand(plan: Any, *, missed: bool, killed: bool) -> dict[Any, dict[str, Any]]:
    """The entries, by plain loops: (kind, group, group size, bytes) -> collectives, rows, and the values of metrics."""
    size = len(plan)
    hole = len(plan[-1]) - 1 if missed else None
    entries: dict[Any, dict[str, Any]] = {}
    for (kind, group, members, number, _, count), rows in matched(plan, killed=killed).items():
        if number == 0:
            continue
        entry = entries.setdefault(
            (kind, group, len(members) or None, count),
            {"collectives": 0, "rows": 0, **{name: [] for name in COLLECTIVE_METRIC_NAMES}},
        )
        entry["collectives"] += 1
        entry["rows"] += len(rows)
        entry["duration_ms"] += [length for _, length in rows.values() if length is not None]
        entry["queued_ms"] += [start for start, _ in rows.values()]
        lengths = [length for _, length in rows.values()]
        if kind not in LOCKSTEP or set(rows) != set(members) or None in lengths:
            continue
        if hole is not None and size - 1 in rows and number >= hole:
            continue
        shortest, longest = min(lengths), max(lengths)
        entry["transfer_ms"].append(shortest)
        entry["wait_ms"] += [length - shortest for length in lengths]
        entry["arrival_skew_ms"].append(longest - shortest)
        entry["arrival_skew_bound_ms"].append(longest)
        if count and shortest and len(members) > 1:
            entry["algbw_gb_per_s"].append(count / (shortest * 1e6))
            factor = busbw_factor(kind, len(members))
            if factor is not None:
                entry["busbw_gb_per_s"].append(count / (shortest * 1e6) * factor)
    return entries


@settings(phases=NO_SHRINKING)
@given(runs(), st.booleans(), st.booleans(), st.sampled_from([1, 3, 1 << 18]))
def test_metrics_across_ranks_are_those_of_plain_loops(plan, missed, killed, piece):
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(written(Path(folder), plan, missed=missed, killed=killed))
        found = as_json(collective_metrics(run, piece).collectives)
        frame = aorta.analysis.collectives(run)
    expected = by_hand(plan, missed=missed, killed=killed)
    keys = [(entry["kind"], entry["group"], entry["group_size"], entry["bytes"]) for entry in found]
    assert set(keys) == expected.keys()
    assert len(keys) == len(set(keys))
    for key, entry in zip(keys, found, strict=True):
        told = expected[key]
        assert (entry["collectives"], entry["rows"]) == (told["collectives"], told["rows"])
        for name in COLLECTIVE_METRIC_NAMES:
            values = sorted(told[name])
            assert entry[name]["count"] == len(values), (key, name)
            if values:
                event(f"{name} known")
                assert [entry[name]["min"], entry[name]["max"]] == pytest.approx([values[0], values[-1]], rel=1e-12)
                assert entry[name]["median"] == pytest.approx(median(values), rel=1e-12), (key, name)
    of_table = frame[~frame["warmup"]].groupby(["kind", "group", "group_size", "bytes"], dropna=False)
    for name in ("duration_ms", "queued_ms", "wait_ms"):  # the table has them a row
        values = {tuple(None if pd.isna(item) else item for item in key): part[name].dropna() for key, part in of_table}
        for key, told in expected.items():
            assert sorted(values[key]) == pytest.approx(sorted(told[name])), (key, name)


@settings(phases=NO_SHRINKING)
@given(runs(), st.sampled_from([1, 1 << 18]))
def test_lateness_at_the_first_wait_agrees_with_plain_loops(plan, piece):
    with tempfile.TemporaryDirectory() as folder:
        found = collective_metrics(load_run(written(Path(folder), plan)), piece).first_waits
    firsts: defaultdict[int, list[tuple[float, dict[int, float]]]] = defaultdict(list)
    for (kind, _, members, number, *_), of_rank in matched(plan).items():
        lengths = {rank: length for rank, (_, length) in of_rank.items()}
        whole = number and len(members) > 1 and kind in LOCKSTEP and set(of_rank) == set(members)
        if whole and None not in lengths.values():
            waits = {rank: length - min(lengths.values()) for rank, length in lengths.items()}
            if max(waits.values()) > 0.2:  # ms: the stall cut-off of a record that states none
                firsts[number].append((min(start for start, _ in of_rank.values()), waits))
    for at, number in enumerate(found.steps.tolist()):
        late = {rank: value for rank, value in enumerate(found.late_ms[at].tolist()) if value == value}
        earliest = min((start for start, _ in firsts[number]), default=None)
        allowed = [
            {rank: median([w for other, w in waits.items() if other != rank]) - wait for rank, wait in waits.items()}
            for start, waits in firsts[number]
            if start == earliest
        ]
        assert any(late == pytest.approx(each) for each in allowed) or not (late or allowed)


@pytest.mark.parametrize(
    ("ranks", "kind", "count", "busbw"),
    [
        (4, "allreduce", 8_000_000, 6.0),
        (4, "reducescatter", 8_000_000, 3.0),
        (4, "allgather", 8_000_000, 3.0),
        (4, "alltoall", 8_000_000, 3.0),
        (2, "allreduce", 8_000_000, 4.0),
        (4, "barrier", 0, None),
        (1, "allreduce", 8_000_000, None),
    ],
)
def test_bandwidths_by_hand(tmp_path, ranks, kind, count, busbw):
    """8 MB in 2 ms are 4 GB/s. Of that a bus of n ranks carries 2 (n - 1) / n in an all-reduce, else (n - 1) / n."""

    def of_rank(rank: int) -> list[Step]:
        rows = [collective(kind, end_ms=2 + rank, bytes=count)]
        return [step(rank, ranks, overlap=HALF, collectives=rows)]

    (entry,) = as_json(recorded(tmp_path, of_rank, ranks).collectives.collectives)
    assert entry["transfer_ms"]["median"] == 2.0
    assert entry["algbw_gb_per_s"]["median"] == (None if busbw is None else pytest.approx(4.0))
    assert entry["busbw_gb_per_s"]["median"] == (None if busbw is None else pytest.approx(busbw))
    assert (entry["busbw_gb_per_s"]["reason"] is None) == (busbw is not None)


def test_warm_up_is_left_out_unless_a_rank_of_the_match_used_the_step(tmp_path):
    """Rank 0 warms up for two steps, rank 1 for one: of three collectives of one size two count, one not whole."""

    def of_rank(rank: int) -> Iterator[Step]:
        for number in range(3):
            rows = [collective(seq=number, end_ms=10 + number + rank)]
            yield step(rank, 2, number, overlap=HALF, warmup=number < 2 - rank, collectives=rows)

    found = recorded(tmp_path, of_rank, 2).collectives
    (entry,) = as_json(found.collectives)
    assert (entry["collectives"], entry["rows"]) == (2, 3)
    assert [entry["transfer_ms"][name] for name in ("count", "min", "max")] == [2, 11, 12]
    # Only the last step is used by both.
    assert np.isnan(found.first_waits.late_ms[:2]).all()
    assert found.first_waits.late_ms[2].tolist() == [1.0, -1.0]


def test_nanoseconds_of_our_days_are_not_rounded_before_a_difference_is_formed(tmp_path):
    base = 1_800_000_000_000_000_001  # as a float64 it is 128 ns wide (W14)
    rows = [collective(issue_ns=base, start_ns=base, end_ns=base + length) for length in (3, 10)]
    made = recorded(tmp_path, lambda rank: [step(rank, 2, overlap=HALF, collectives=[rows[rank]])], 2)
    (entry,) = as_json(made.collectives.collectives)
    assert (entry["transfer_ms"]["median"], entry["wait_ms"]["max"]) == (3e-6, 7e-6)


def test_collectives_come_by_filter_or_in_pieces_that_add_up(tmp_path, monkeypatch):
    plan = [[[("allreduce", WORLD, 8, rank, 5), ("allgather", WORLD, 8, 0, 5)]] * 6 for rank in range(3)]
    run = aorta.analysis.load_run(written(tmp_path, plan))
    whole = aorta.analysis.collectives(run)
    assert len(whole) == 36
    some = aorta.analysis.collectives(run, ranks=[1], steps=(2, 4), kinds=["allgather"])
    assert some[["rank", "global_step", "kind"]].drop_duplicates().values.tolist() == [
        [1, 2, "allgather"],
        [1, 3, "allgather"],
    ]
    assert some["transfer_ms"].tolist() == [5, 5]  # matched with ranks that the filter leaves out
    assert len(aorta.analysis.collectives(run, ranks=[0], kinds=["broadcast"])) == 0
    for filters, said in (
        ({"kinds": ["all_reduce"]}, r"kinds: 'all_reduce': no kind of collectives; did you mean allreduce\?"),
        ({"ranks": [0, 3]}, "ranks: 3: not in the run; its ranks: 0 to 2"),
        ({"steps": (6, 9)}, r"steps: \(6, 9\): holds none of the run's steps, 0 to 5"),
    ):
        with pytest.raises(InputError, match=said):
            aorta.analysis.collectives(run, **filters)
    with pytest.raises(InputError, match="holds none of"):
        list(aorta.analysis.iter_collectives(run, steps=(3, 3)))
    parts = list(dataframes.iter_collectives(run, rows=7))
    assert len(parts) == 6
    assert all(part["global_step"].nunique() == 1 for part in parts)
    joined = pd.concat(parts)
    assert joined["instance"].nunique() == whole["instance"].nunique() == 12
    same = ["rank", "global_step", "seq"]
    pd.testing.assert_frame_equal(
        joined.drop(columns="instance").sort_values(same, ignore_index=True),
        whole.drop(columns="instance").sort_values(same, ignore_index=True),
    )
    monkeypatch.setattr(dataframes, "ROW_LIMIT", 20)
    with pytest.raises(InputError, match=r"more than 20 collectives are left, of 36 .*iter_collectives"):
        aorta.analysis.collectives(run)
    assert len(aorta.analysis.collectives(run, kinds=["allreduce"])) == 18
    assert sum(map(len, aorta.analysis.iter_collectives(tmp_path))) == 36


WHOLE = {"world": [0, 1, 2]}


def test_a_number_that_begins_anew_in_each_step_is_matched_within_its_step(tmp_path):
    def of_rank(rank: int) -> Iterator[Step]:
        for number, length_ms in enumerate(((2, 7), (3, 5))[rank]):
            yield step(rank, 2, number, overlap=HALF, collectives=[collective(seq=0, end_ms=length_ms)])

    frame = aorta.analysis.collectives(recorded(tmp_path, of_rank, 2).run).sort_values(["rank", "global_step"])
    assert frame["transfer_ms"].tolist() == [2, 5, 2, 5]


@pytest.mark.parametrize(
    ("row", "groups", "members", "said"),
    [
        (collective(seq=UNNUMBERED), [WHOLE] * 3, [(0, 1, 2)] * 3, "does not number it"),
        (collective(UNKNOWN_KIND), [WHOLE] * 3, [(0, 1, 2)] * 3, "its kind is not known"),
        # Without any footer a group is unknown, not the world; nor is it known of a killed rank that peers list in
        # two groups of one name.
        (collective(), [None] * 3, [None] * 3, "no footer"),
        (collective(group="dp"), [{"dp": [0, 2]}, {"dp": [1, 2]}, None], [(0, 2), (1, 2), None], ""),
    ],
)
def test_what_its_source_does_not_tell_is_not_matched(tmp_path, row, groups, members, said):
    made = recorded(tmp_path, lambda rank: [step(rank, 3, overlap=HALF, collectives=[row])], 3, groups=groups)
    frame = aorta.analysis.collectives(made.run)
    assert [None if found is None or found is pd.NA else found for found in frame["members"].tolist()] == members
    assert frame["transfer_ms"].isna().all()
    assert frame["busbw_gb_per_s"].isna().all()
    assert frame["transfer_reason"].str.contains(said).all()


def test_a_run_without_collectives_gives_an_empty_table(tmp_path):
    made = recorded(tmp_path, lambda rank: [step(rank, 2, overlap=HALF)], 2)
    frame = aorta.analysis.collectives(made.run)
    assert frame.empty
    assert {"transfer_ms", "wait_ms", "busbw_gb_per_s"} <= set(frame.columns)


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_behind_others_is_the_median_of_the_others_less_the_own(ranks, seed):
    values = np.random.default_rng(seed).integers(0, 5, (6, ranks)).astype(float)
    expected = [[np.median(np.delete(row, at)) - row[at] for at in range(ranks)] for row in values]
    assert behind_others(values).tolist() == expected
