"""Dumps that were changed, lost, mixed with those of another job or left over from an earlier one: no healthy rank is
accused because of them, and nothing is said to be well.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy.evidence import Verdict
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from tests.autopsy.hangs import S
from tests.autopsy.test_flight_recorder import CREATED_NS, TIMES, apart, dump, entry

Row = dict[str, Any]
Dumps = dict[int, dict[str, Any]]
LATE = 2


def job(
    steps: int = 6,
    *,
    late: int | None = LATE,
    ranks: int = 4,
    at_s: int = 0,
    described: bool = True,
    timed: bool = True,
) -> Dumps:
    """Ranks that reduce over pairs and over all; `late` does not issue what is of the last step."""
    dumps = {}
    for rank in range(ranks):
        pair, name = (rank - rank % 2, rank - rank % 2 + 1), f"9{rank // 2}"
        groups = {"0": ("default_pg", range(ranks)), name: (f"pair{rank // 2}" if described else "undefined", pair)}
        config = {of: {"name": of, "desc": desc, "ranks": str([*members])} for of, (desc, members) in groups.items()}
        entries: list[dict[str, Any]] = []
        for step in range(steps):
            hangs = late is not None and step == steps - 1
            for pg_id, group in ((1, name), (0, "0")):
                if hangs and late in pair and (rank == late or pg_id == 0):
                    continue
                waits = hangs and (late in pair or pg_id == 0)
                state = ("started" if timed else "scheduled") if waits else "completed"
                of = {"pg_id": pg_id, "process_group": (group, groups[group][0]), "collective_seq_id": step + 1}
                one = entry(len(entries), state, **of)
                entries.append(one | {key: CREATED_NS + (at_s + step) * S + len(entries) for key in TIMES if one[key]})
        dumps[rank] = dump(apart(rank, entries), ranks, pg_config=config)
    return dumps


def judged(folder: Path, dumps: Dumps, form: str = "pickle", after_s: int = 60) -> Verdict:
    """Judge files with times so long after their newest entry."""
    newest_ns = max([row.get("time_created_ns", 0) for one in dumps.values() for row in one["entries"]])
    for rank, one in dumps.items():
        path = folder / f"comm_lib_trace_rank_{rank}"
        path.write_bytes(json.dumps(one).encode() if form == "json" else pickle.dumps(one))
        os.utime(path, ns=(0, newest_ns + after_s * S))
    return judge(read_dumps([folder]))


def some(*ranks: int, of: Dumps) -> Dumps:
    return {rank: one for rank, one in of.items() if rank in ranks}


def with_entries(dumps: Dumps, change: Callable[[int, list[Row]], list[Row]]) -> Dumps:
    return {rank: {**one, "entries": change(rank, one["entries"])} for rank, one in dumps.items()}


def with_each(dumps: Dumps, change: Callable[[int, Row], Row]) -> Dumps:
    """Every entry with what is changed of it."""
    return with_entries(dumps, lambda rank, rows: [row | change(rank, row) for row in rows])


def unfinished(dumps: Dumps) -> Dumps:
    return with_entries(dumps, lambda _, rows: [row for row in rows if row["state"] != "completed"])


def renamed(dumps: Dumps) -> Dumps:
    """Every rank calls its groups by names of its own (pytorch/pytorch#190396)."""
    return {
        rank: json.loads(json.dumps(one).replace('"90"', f'"{rank}x"').replace('"91"', f'"{rank}x"'))
        for rank, one in dumps.items()
    }


def by_gloo(dumps: Dumps) -> Dumps:
    """Gloo notes no times but that of issue, and its work stays scheduled."""
    noted = {"profiling_name": "gloo:all_reduce", "state": "scheduled", "time_discovered_completed_ns": None}
    return with_each(dumps, lambda *_: noted)


def shows_nothing(dumps: Dumps, rank: int, **other: Any) -> Dumps:
    return {**dumps, rank: {**dumps[rank], "entries": [], **other}}


def made_anew(dumps: Dumps, earlier: Dumps) -> Dumps:
    """Every rank destroyed its groups of `earlier`, and made others of the same names."""
    rows = {rank: earlier[rank]["entries"] + one["entries"] for rank, one in dumps.items()}
    return with_entries(dumps, lambda rank, _: [{**row, "record_id": at} for at, row in enumerate(rows[rank])])


def in_own_groups() -> Dumps:
    """Three collectives more of each rank than of the one before, in groups of its own, which torch gives no name."""
    alone = {"pg_id": 7, "process_group": ("", "")}
    return {rank: dump([entry(at, "completed", **alone) for at in range(3 * rank)]) for rank in range(4)}


HOUR = 3600
STALE: dict[str, Dumps] = {
    "a rank's dump of an attempt that got further": {**job(), **some(3, of=job(steps=40, at_s=-HOUR))},
    "a rank's dump of an attempt that got less far": {**job(), **some(3, of=job(steps=3, at_s=-HOUR))},
    "a rank's dump of an attempt that got as far": {**job(), **some(3, of=job(at_s=-HOUR))},
    "the late rank's dump is of an earlier attempt": {**job(), **some(LATE, of=job(steps=9, late=None, at_s=-HOUR))},
    "one rank's dump is newer than all others": {**job(at_s=-HOUR), **some(0, of=job())},
    "dumps of a larger, older job": {**job(ranks=8, at_s=-26 * HOUR), **job()},
    "dumps of a smaller, older job": {**job(), **some(0, 1, of=job(ranks=2, late=None, at_s=-HOUR))},
    "dumps of a larger, newer job": {**job(), **some(6, 7, of=job(ranks=8, late=None, at_s=HOUR))},
    "a dump of the same job, taken a little earlier": {**job(), **some(3, of=job(steps=4, late=None))},
    "a rank's dump of an earlier attempt, over gloo": {**by_gloo(job()), **some(3, of=by_gloo(job(9, at_s=-HOUR)))},
    "a rank's file holds another program's entries, over gloo": {
        **by_gloo(job()),
        **with_each(some(0, of=by_gloo(job())), lambda *_: {"profiling_name": "gloo:all_gather"}),
    },
    "a rank's dump of an attempt that began anew, over gloo": {
        **by_gloo(job()),
        **some(3, of=by_gloo(job(2, late=None, at_s=100))),
    },
    "files of two ranks under each other's names": {**job(), 1: job()[LATE], LATE: job()[1]},
    "the late rank's dump stands for another one": {**job(), 3: job()[LATE]},
    "a dump stands for another rank, over gloo": {**by_gloo(job()), 3: by_gloo(job())[LATE]},
    "a dump without what the rank completed with others": shows_nothing(job(), 0, pg_status={}),
    "a dump of another job of as many ranks": {
        **job(),
        **with_each(some(0, of=job()), lambda *_: {"profiling_name": "nccl:_all_gather_base"}),
    },
}


@pytest.mark.parametrize("name", STALE)
def test_dumps_of_another_time_or_job_are_left_out_and_said_to_be(name: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, STALE[name])
    assert {one.rank for one in verdict.culprits} <= {LATE}
    assert verdict.kind != "not_stuck"
    assert any("left out: " in note for note in verdict.notes)


CERTAIN: dict[str, Dumps] = {
    "nothing": job(),
    "groups of other names on every rank": renamed(job()),
    "groups without a description": job(described=False),
    "groups of other names, without a description": renamed(job(described=False)),
    "groups that each rank made by itself": made_anew(by_gloo(job()), by_gloo(in_own_groups())),
    "groups that were made anew": made_anew(job(), job(9, late=None)),
    "no rank notes starts": job(timed=False),
    "hosts whose clocks differ by half a minute": with_each(
        job(), lambda rank, row: {"time_created_ns": row["time_created_ns"] + 10 * rank * S}
    ),
    "ranks of two pairs issue in the same nanoseconds": with_entries(
        job(), lambda rank, rows: apart(rank % 2 - rank, rows)
    ),
    "times lost": with_entries(
        job(), lambda _, rows: [{key: row[key] for key in row if "time" not in key} for row in rows]
    ),
    "frames lost": with_each(job(), lambda *_: {"frames": []}),
    "a size lost": with_each(job(), lambda *_: {"input_sizes": []}),
    "a dump lost": some(0, 1, LATE, of=job()),
}
"""Changes and losses behind which the late rank is accused."""
DOUBTFUL: dict[str, Dumps] = {
    "older entries lost": with_entries(job(), lambda rank, rows: rows[2 * rank :]),
    "finished work left out": unfinished(job()),
    "the lists of groups lost": {rank: {**one, "pg_config": {}} for rank, one in job().items()},
    "the list of the default group lost": {
        rank: {**one, "pg_config": {name: each for name, each in one["pg_config"].items() if name != "0"}}
        for rank, one in job().items()
    },
    "the dump of the late rank lost": some(0, 1, 3, of=job()),
    "the newest entry of a rank lost": with_entries(job(), lambda rank, rows: rows[: -1 if rank == 0 else None]),
    "the newest entry of all ranks lost": with_entries(job(), lambda rank, rows: rows[:-1]),
    "every other entry of a rank lost": with_entries(job(), lambda rank, rows: rows[:: 1 + (rank == 0)]),
    "every other entry of a rank lost, over gloo": with_entries(
        by_gloo(job(late=None)), lambda rank, rows: rows[:: 1 + (rank == 0)]
    ),
    "entries of a group lost on a rank": with_entries(
        job(), lambda rank, rows: [row for row in rows if rank or row["process_group"][0] != "0"]
    ),
    "all entries of a rank lost, of unfinished work": shows_nothing(unfinished(job()), 0),
    "states that contradict their times": with_each(job(), lambda rank, _: {"state": "started"} if rank == 1 else {}),
    "a state that was not updated": with_each(
        job(),
        lambda rank, row: (
            {"state": "started", "time_discovered_completed_ns": None} if (rank, row["record_id"]) == (1, 7) else {}
        ),
    ),
    "collectives marked as messages": with_each(job(), lambda rank, _: {"is_p2p": rank == 1}),
}
"""Those behind which it may be accused, and nobody else."""


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("name", [*CERTAIN, *DOUBTFUL])
def test_evidence_that_is_changed_or_lost_accuses_no_healthy_rank(name: str, form: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, (CERTAIN | DOUBTFUL)[name], form)
    assert [one.rank for one in verdict.culprits] in ([LATE], [LATE] if name in CERTAIN else [])
    assert verdict.kind != "not_stuck"


def test_a_group_without_a_description_is_called_by_its_ranks(tmp_path: Path) -> None:
    """Members of it call it by different names; it does not complete, and the others wait for both."""
    dumps = renamed(job(described=False, late=None))
    for rank, one in dumps.items():
        one["entries"] = one["entries"][: -1 if rank >= 2 else None]
        one["pg_status"]["0"]["last_enqueued_collective"] -= rank >= 2
        one["entries"][-1] |= {"state": "started", "time_discovered_completed_ns": None}
    verdict = judged(tmp_path, dumps)
    assert (verdict.kind, verdict.culprits, verdict.suspects) == ("stuck_inside", [], [])
    assert "all_reduce 5 of the group of ranks 2-3" in verdict.summary


@pytest.mark.parametrize("after_s", [60, 24 * HOUR])
def test_the_time_of_a_copy_does_not_say_when_a_dump_of_gloo_was_taken(after_s: int, tmp_path: Path) -> None:
    """A rank that lacks what others issued is late, or was dumped before."""
    verdict = judged(tmp_path, by_gloo(job()), after_s=after_s)
    assert [one.rank for one in verdict.culprits] == ([LATE] if after_s == 60 else [])
    assert LATE in [*verdict.suspects, *(one.rank for one in verdict.culprits)]


def test_a_rank_that_alone_issued_what_its_past_does_not_have_does_not_accuse_all_others(tmp_path: Path) -> None:
    dumps = job(late=None)
    barrier = {"profiling_name": "nccl:all_reduce_barrier", "time_created_ns": CREATED_NS + 6 * S}
    dumps[0]["entries"].append(entry(len(dumps[0]["entries"]), "started", collective_seq_id=7, **barrier))
    verdict = judged(tmp_path, dumps)
    assert (verdict.kind, verdict.culprits) == ("cannot_decide", [])
