"""Records whose difference has one cause, known by construction: it is named, and everything adds up. That of no record
a nanosecond is lost, `tests/read/test_exposed.py` shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution import COMPUTING, NO_ROW, SHOWN_ROWS, Totals, break_down, totals_of
from aorta.documents.explanations import ExposedBreakdown
from aorta.errors import InputError
from tests.analysis.builders import metrics, step
from tests.analysis.run_builders import block, comm, dataset, made_step


def attributed(reference: LabelledRun, candidate: LabelledRun) -> ExposedBreakdown:
    """Where the exposed communication of two runs differs; every way of breaking it down adds up to the whole."""
    found = break_down([totals_of(candidate)], [totals_of(reference)])
    exact(found)
    return found


def exact(found: ExposedBreakdown) -> None:
    """Every way of breaking down adds up to the whole."""
    for name, rows in found.dimensions.items():
        if name == COMPUTING:
            continue
        for of_row, whole in (("ms", "exposed_ms"), ("reference_ms", "reference_ms"), ("difference_ms",) * 2):
            total = sum(getattr(row, of_row) for row in rows)
            assert total == pytest.approx(getattr(found, whole), abs=1e-9), name
        if found.difference_ms:
            assert sum(row.share or 0 for row in rows) == pytest.approx(1)


BLOCKS = [
    block("layers.0", "forward", 10, 20),
    block("layers.1", "forward", 20, 30),
    block("layers.1", "backward", 30, 50),
    block("layers.0", "backward", 50, 70),
]
SHARD = 25_000_000


def sharded(rank: int, number: int, slow: float = 1.0, warmup: bool = False) -> Any:
    """A gather before forward, a reduce-scatter of 8 and one of 5 ms behind each backward, on one link."""
    first, second = 8 * slow, 5 * slow
    begin = max(70.0, 50 + first)
    rows = [
        comm("allgather", 4, 10, SHARD, 3 * number),
        comm("reducescatter", 50, 50 + first, SHARD, 3 * number + 1),
        comm("reducescatter", begin, begin + second, SHARD, 3 * number + 2),
    ]
    return made_step(rank, 2, number, 120, BLOCKS, rows, aux=[("optimizer", 100, 110)], warmup=warmup)


def two_ranks(folder: Path, label: str, slow: float = 1.0, steps: int = 3) -> LabelledRun:
    ranks = [[sharded(rank, number, slow, warmup=number == 0) for number in range(steps)] for rank in (0, 1)]
    return dataset(folder, label, ranks)


def test_a_slow_kind_is_the_largest_row_with_size_group_part_and_place(tmp_path):
    sides = two_ranks(tmp_path / "a", "base"), two_ranks(tmp_path / "b", "new", slow=3)
    found, back = attributed(*sides), attributed(*sides[::-1])
    assert back.difference_ms == pytest.approx(-14)
    assert (found.reference_ms, found.exposed_ms) == pytest.approx((6 + 5, 6 + 4 + 15))
    assert found.rank_steps == 2 * 4  # two of three steps of two ranks: the first is warm-up
    cause = found.dimensions["collective"][0]
    assert cause.what == "reducescatter of 25 MB on default group (2 ranks)"
    assert (cause.reference_ms, cause.ms, cause.share) == pytest.approx((5, 19, 1))
    orders = {row.what: row.difference_ms for row in found.dimensions["order"] if "allgather" not in row.what}
    assert orders == pytest.approx({f"{cause.what}, number {n} of its kind in the step": 6 * n + 4 for n in (0, 1)})
    places = {row.what: row.reference_ms for row in found.dimensions["region"]}
    assert places == pytest.approx({"forward of layers.0": 6, "backward of layers.0": 5})


def computing(folder: Path, label: str, last_ms: float, at_ms: float = 50) -> LabelledRun:
    """One all-reduce of 18 ms that the backward of block `b`, which begins at 50, is to hide."""
    blocks = [block("a", "backward", 30, 50), block("b", "backward", 50, 50 + last_ms)]
    rows = [[comm("allreduce", at_ms, at_ms + 18, 8_000, number)] for number in range(3)]
    ranks = [[made_step(rank, 2, number, 120, blocks, rows[number]) for number in range(3)] for rank in (0, 1)]
    return dataset(folder, label, ranks, parallel="ddp")


def test_less_computing_to_hide_behind_is_on_both_sides_and_in_its_block(tmp_path):
    found = attributed(computing(tmp_path / "a", "base", 20), computing(tmp_path / "b", "new", 8))
    assert found.difference_ms == pytest.approx(10)
    most = found.dimensions["computing"][0]
    assert (most.what, most.difference_ms, most.share) == ("backward of b", pytest.approx(-12), None)


def test_what_is_beyond_the_rows_that_are_shown_is_summed_up_in_the_last(tmp_path):
    many = SHOWN_ROWS + 6
    sides = []
    for label, each_ms in (("a", 1.0), ("b", 2.0)):
        rows = [comm("allreduce", 3 * k, 3 * k + each_ms, 1000 + k, k) for k in range(many)]
        sides.append(dataset(tmp_path / label, label, [[made_step(0, 1, 0, 3 * many, [], rows)]]))
    found = attributed(*sides)
    shown = found.dimensions["collective"]
    assert (len(shown), shown[-1].what, shown[-1].difference_ms) == (SHOWN_ROWS + 1, "6 others", pytest.approx(6))


def test_exposed_time_is_what_the_record_counts_and_steps_in_which_it_is_null_are_left_out(tmp_path):
    known = step(0, 1, 0, overlap=metrics(100, 50, 12, 0), collectives=[comm("allreduce", 50, 70)])
    unknown = step(0, 1, 1, overlap={**metrics(100, 50, 30, 10), "exposed_comm_ms": None})
    found = break_down([totals_of(dataset(tmp_path / "a", "a", [[known, unknown]]))])
    assert (found.exposed_ms, found.rank_steps, found.rank_steps_left_out) == (12, 1, 1)
    assert {row.what: row.ms for row in found.dimensions["collective"]}[NO_ROW] == 12 - 20, "the rows expose 20 ms"
    nothing = totals_of(dataset(tmp_path / "b", "b", [[unknown]]))
    assert break_down([nothing], [nothing]).reason.startswith("reference: no step after warm-up")


def test_launches_are_pooled(tmp_path):
    def launches(name: str, slow: tuple[float, ...]) -> list[Totals | str]:
        made = (two_ranks(tmp_path / f"{name}{at}", name, each, steps=3 + at) for at, each in enumerate(slow))
        return [*map(totals_of, made)]

    found = break_down(launches("b", (1, 3)), launches("a", (1, 1)))
    exact(found)
    assert found.rank_steps == 2 * (4 + 6)
    assert found.difference_ms == pytest.approx(14 * 6 / 10)


@pytest.mark.parametrize("since", [lambda record: b"\n" + record, lambda record: b""])
def test_a_record_that_was_written_over_since_is_an_error(tmp_path, since):
    read = two_ranks(tmp_path, "a")
    path = tmp_path / "rank_1_metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(since(content))
    with pytest.raises(InputError, match=r"rank_1_metrics\.jsonl: cannot be read again"):
        totals_of(read)


def test_one_run_s_exposed_time_is_broken_down_without_a_second(tmp_path):
    found = break_down([totals_of(two_ranks(tmp_path / "a", "base", slow=3))])
    assert (found.reason, found.rank_steps, found.exposed_ms) == (None, 4, pytest.approx(6 + 4 + 15))
    for rows in found.dimensions.values():
        assert sum(row.ms for row in rows) == pytest.approx(found.exposed_ms)
        assert sum(row.share or 0 for row in rows) == pytest.approx(1)
        assert rows == sorted(rows, key=lambda row: -row.ms)
    places = [(row.what, row.ms) for row in found.dimensions["region"]]
    assert places == [("backward of layers.0", pytest.approx(19)), ("forward of layers.0", pytest.approx(6))]
    assert [row.what for row in found.dimensions["group"]] == ["default group (2 ranks)"]
    hidden = dataset(tmp_path / "b", "none", [[made_step(0, 1, 0, 120, BLOCKS, [])]])
    assert break_down([totals_of(hidden)]).exposed_ms == 0


@pytest.mark.parametrize(
    ("transfer_ms", "late_ms", "transfer", "waiting"),
    [(60, 0, 40, 0), (20, 50, 10, 20)],
    ids=["a longer transfer", "a later peer"],
)
def test_a_longer_transfer_is_told_from_a_later_peer(tmp_path, transfer_ms, late_ms, transfer, waiting):
    """Compute from 10 to 40, an all-reduce from 30 on, for which rank 1 comes late: it waits for nobody."""

    def run(name: str, length_ms: float, late_ms: float) -> LabelledRun:
        end_ms = 30 + late_ms + length_ms
        rows = [[comm("allreduce", begin, end_ms, 4000)] for begin in (30, 30 + late_ms)]
        computed = [block("a", "forward", 10, 40)]
        return dataset(tmp_path / name, name, [[made_step(rank, 2, 0, 200, computed, rows[rank])] for rank in (0, 1)])

    found = attributed(run("base", 20, 0), run("other", transfer_ms, late_ms))
    assert found.reference_ms == pytest.approx(10)
    parts = {row.what: row.difference_ms for row in found.dimensions["part"]}
    assert (parts["transfer"], parts.get("waiting for peers", 0)) == pytest.approx((transfer, waiting))
