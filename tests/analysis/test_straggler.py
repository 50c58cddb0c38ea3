"""Who is named a straggler, from arrivals written down by hand: a collective ends 10 ms after its last rank came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.collective_metrics import NO_SLOWER_RANKS, lateness, straggler_sentences
from aorta.documents.dataset import GainEntry, WhatIf
from aorta.read.record import load_run
from aorta.records.clocks import CLOCK_SYNC_FILE, ClockSync, OffsetSample, RankClock, encode
from aorta.report.files import write_report
from tests.analysis.builders import CLOCK, MS, collective, footer, header, metrics, step, write_rank
from tests.analysis.by_json import aggregate
from tests.analysis.by_json import straggler as judge

TRANSFER_MS = 10.0


def test_one_late_rank_of_four_is_named_with_its_lateness(tmp_path: Path) -> None:
    """Rank 2 comes 5 ms late, the others within 0.3 ms of each other."""

    def arrival_ms(rank: int, number: int) -> float:
        return 5.0 if rank == 2 else 0.1 * ((rank + number) % 4)

    for rank in range(4):
        rows = [collective("allreduce", n, arrival_ms(rank, n), 5.0 + TRANSFER_MS, group="g") for n in range(20)]
        lines = [step(rank, 4, n, overlap=metrics(100, 50, 20, 10), collectives=[row]) for n, row in enumerate(rows)]
        write_rank(tmp_path, header(rank, 4), lines, footer(20, 4, groups={"g": [0, 1, 2, 3]}))
    (entry,) = aggregate(LabelledRun("x", load_run(tmp_path)))["stragglers"]
    assert (entry["rank"], entry["group_ranks"], entry["collectives"]) == (2, [0, 1, 2, 3], 20)
    assert entry["late_ms"] == pytest.approx(5.0, abs=0.3)
    assert entry["last_share"] == 1.0
    assert entry["wait_ms_median_per_rank"]["2"] == 0.0
    text = write_report({"x": tmp_path}, tmp_path / "out", html=False).text
    said = f"rank 2 is a straggler of group g: {lateness(entry['late_ms'], 'waits')}; last in 100 % of 20 collectives"
    assert said in " ".join(text.split())


def ruled(waits: Sequence[float], last: int, collectives: int = 20, transfer_ms: float = 0.0) -> dict[str, Any]:
    """The rule alone: rank 0 was the last in `last` collectives."""
    return judge(collectives, dict(enumerate(waits)), {0: last}, transfer_ms)


@pytest.mark.parametrize(
    ("waits", "last", "collectives", "transfer_ms", "named"),
    [
        pytest.param((0, 5), 16, 16, 0, True, id="16 collectives are enough"),
        pytest.param((0, 5), 15, 15, 0, False, id="15 are not"),
        pytest.param((0, 5), 16, 20, 0, True, id="the last in four fifths"),
        pytest.param((0, 5), 15, 20, 0, False, id="the last in three quarters"),
        pytest.param((0, 0.21), 20, 20, 0, True, id="more than 0.2 ms"),
        pytest.param((0, 0.2), 20, 20, 0, False, id="0.2 ms"),
        pytest.param((0, 1.01), 20, 20, 10, True, id="more than a tenth of the transfer"),
        pytest.param((0, 1.0), 20, 20, 10, False, id="a tenth of the transfer"),
        pytest.param((0, 0.1, 5, 5), 20, 20, 0, False, id="one peer waits as little"),
        pytest.param((0, 0.3, 5, 5), 20, 20, 0, True, id="every peer waits longer"),
    ],
)
def test_the_edges_of_the_rule(
    waits: Sequence[float], last: int, collectives: int, transfer_ms: float, named: bool
) -> None:
    found = ruled(waits, last, collectives, transfer_ms)
    assert found["rank"] == (0 if named else None)
    assert (found["reason"] is None) == named


PER_STEP = 4
RANKS = 3


def queued(
    folder: Path,
    late_ms: Callable[[int, int], float],
    clocks: dict[int, tuple[int, int]] | None,
    steps: int = 16,
) -> dict[str, Any]:
    """Collectives of 10 ms behind each other on a link that is always busy: all ranks begin and end them together.

    Args:
        late_ms: of rank and step: when it issues, from when it could first.
        clocks: rank -> by how much its clock is ahead and the bound, in ns; None: nothing was measured.
    """
    for rank in range(RANKS):
        ahead_ns = 0 if clocks is None else clocks[rank][0]
        lines = []
        for number in range(steps):
            rows = [
                collective(
                    "allreduce",
                    PER_STEP * number + n,
                    20 + 10 * n,
                    30 + 10 * n,
                    group="g",
                    issue_ns=round((n + late_ms(rank, number)) * MS),
                )
                for n in range(PER_STEP)
            ]
            line = step(rank, RANKS, number, overlap=metrics(300, 250, 200, 100), collectives=rows)
            times = {"t_start_ns": line.t_start_ns + ahead_ns, "t_end_ns": line.t_end_ns + ahead_ns}
            lines.append(msgspec.structs.replace(line, **times))
        write_rank(folder, header(rank, RANKS), lines, footer(steps, RANKS, groups={"g": list(range(RANKS))}))
    if clocks is not None:
        at_ns = CLOCK.realtime_ns
        measured = [
            RankClock(
                rank,
                "node0",
                "boot",
                OffsetSample(at_ns + ahead_ns, ahead_ns, 2 * bound_ns, bound_ns, 32),
                OffsetSample(at_ns + ahead_ns + 10**11, ahead_ns, 2 * bound_ns, bound_ns, 32),
            )
            for rank, (ahead_ns, bound_ns) in clocks.items()
        ]
        sync = ClockSync(1, "run-1", 0, 0, "CLOCK_REALTIME", "gloo", True, measured)
        (folder / CLOCK_SYNC_FILE).write_bytes(encode(sync))
    (entry,) = aggregate(LabelledRun("x", load_run(folder)))["stragglers"]
    found: dict[str, Any] = entry
    return found


def three_late(rank: int, _number: int) -> float:
    return 3.0 if rank == 1 else 0.0


ALIGNED = {0: (0, 0), 1: (7_000_000_000, 50_000), 2: (-2_000_000, 60_000)}
"""Rank 1's clock is 7 s ahead, which would pass for its lateness or hide it."""


def test_behind_a_queue_the_late_rank_is_named_by_its_issue_times_with_the_bound(tmp_path: Path) -> None:
    entry = queued(tmp_path, three_late, ALIGNED)
    assert entry["wait_ms_median_per_rank"] == {"0": 0.0, "1": 0.0, "2": 0.0}
    assert (entry["rank"], entry["basis"], entry["queued_share"]) == (1, "issue times", 1.0)
    assert entry["late_ms"] == pytest.approx(3.0, abs=1e-5)
    assert entry["clock_bound_ms"] == pytest.approx(0.11)
    assert entry["issue_late_ms_median_per_rank"] == pytest.approx({"0": 0.0, "1": 3.0, "2": 0.0}, abs=1e-5)
    made = write_report({"x": tmp_path}, tmp_path / "out")
    said = (
        "rank 1 is a straggler of group g: 3 ms late at the last collective of a step (median); queueing masks it "
        "in wait_ms; last in 100 % of the steps, clocks known to 0.11 ms"
    )
    page = unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert said in " ".join(made.text.split())
    assert said in " ".join(page.split())
    bound = GainEntry("bound", NO_SLOWER_RANKS, "stragglers=none", 0.0, 0.0, 0.0, 0.0, False, [], "")
    replayed = WhatIf(reason=None, bounds=[bound])
    (sentence,) = straggler_sentences(msgspec.structs.replace(made.content.datasets["x"], what_if=replayed))
    assert sentence == f"{said}; with {NO_SLOWER_RANKS} a step would gain 0 ms"
    assert lateness(entry["late_ms"], entry["basis"]) in sentence


def test_without_aligned_clocks_it_says_that_a_late_rank_cannot_be_told(tmp_path: Path) -> None:
    entry = queued(tmp_path, three_late, None)
    assert (entry["rank"], entry["issue_late_ms_median_per_rank"]) == (None, None)
    assert entry["reason"] == (
        "100 % of the collectives were queued, which hides waits, and issue times cannot be compared: there is no "
        "clock_sync.json"
    )
    made = write_report({"x": tmp_path}, tmp_path / "out")
    page = unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    for shown in (made.text, page):
        assert f"Group g: {entry['reason']}." in " ".join(shown.split())
    assert "blocked, ms" in made.text


FEW = "issue times are known in 15 steps, 16 needed. In these rank 1 issues 3 ms later than any other (median)"


@pytest.mark.parametrize(
    ("late_ms", "changes", "steps", "reason"),
    [
        pytest.param(
            three_late,
            {2: (0, 2_000_000)},
            16,
            "rank 1 issues 3 ms later than the others, but clocks are known to 2.05 ms only",
            id="clocks with a wide bound",
        ),
        pytest.param(three_late, {}, 15, FEW, id="few steps"),
        pytest.param(
            lambda rank, n: 3.0 if n % 3 == rank else 0.0,
            {},
            16,
            "rank 2 in 31 % of the steps, 80 % needed",
            id="ranks in turns",
        ),
        pytest.param(
            lambda rank, _n: 0.9 if rank == 1 else 0.0,
            {},
            16,
            "rank 1 issues 0.9 ms later than the others, more than 1 ms needed",
            id="hardly later",
        ),
    ],
)
def test_issue_times_that_are_no_evidence_name_nobody(
    tmp_path: Path,
    late_ms: Callable[[int, int], float],
    changes: dict[int, tuple[int, int]],
    steps: int,
    reason: str,
) -> None:
    entry = queued(tmp_path, late_ms, ALIGNED | changes, steps)
    assert (entry["rank"], entry["collectives"]) == (None, PER_STEP * steps)
    assert entry["reason"].endswith(reason)


def test_clocks_of_another_run_are_not_used(tmp_path: Path) -> None:
    queued(tmp_path, three_late, ALIGNED)
    file = tmp_path / CLOCK_SYNC_FILE
    file.write_text(file.read_text().replace("run-1", "run-2"))
    (entry,) = aggregate(LabelledRun("x", load_run(tmp_path)))["stragglers"]
    assert entry["rank"] is None
    assert entry["reason"].endswith("clock_sync.json is of run 'run-2', attempt 0")
    file.write_text("{")
    (entry,) = aggregate(LabelledRun("x", load_run(tmp_path)))["stragglers"]
    assert "not a clock_sync.json of an AORTA run" in entry["reason"]
