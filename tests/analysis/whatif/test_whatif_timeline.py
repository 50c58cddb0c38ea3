"""The timeline of a what-if: what is recorded and what is replayed, beside each other."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.load.chrome_json import RawEvents
from aorta.analysis.load.records import load_run
from aorta.analysis.whatif import program_of
from aorta.analysis.whatif.replay import replay
from aorta.analysis.whatif.whatif_command import main
from aorta.analysis.whatif.whatif_timeline import Slice, measured, replayed
from tests.analysis.whatif.hand_made import compute, issue, program, wait
from tests.analysis.whatif.simulated_job import Job
from tests.analysis.whatif.simulated_record import record

JOBS = {"ddp": Job("ddp"), "held": Job("ddp", overlap=False), "fsdp": Job("fsdp", ranks=4), "tp": Job("tp")}
Event = dict[str, Any]


@pytest.fixture(scope="module", params=JOBS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / request.param
    record(JOBS[request.param], made)
    return made


def test_a_program_written_by_hand_is_drawn_as_it_must_run() -> None:
    first = [compute("a", 10), issue(), compute("b", 20), wait(0, 1), 5]
    second = [compute("a", 12), issue(), compute("b", 20), wait(0, 1), 5]
    made = program([first, second], cost_ns=[30])
    drawn = [(each.track, each.name, each.begin_ns, each.end_ns) for each in replayed(made, replay(made, {0}), 0, 0)]
    assert drawn == [
        ("steps", "step 0", 0, 48),
        ("compute", "a forward", 0, 10),
        ("collectives 0", "allreduce #0", 10, 42),
        ("compute", "b forward", 10, 30),
        ("waits", "wait for allreduce #0", 30, 43),
    ]


def test_the_unchanged_replay_is_drawn_as_the_record_is(folder: Path) -> None:
    run = load_run(folder)
    made = program_of(run)
    times, numbers = replay(made, range(len(made.steps))), [step.global_step for step in made.steps]
    tracks = set()
    for index, number in enumerate(numbers):
        for column, rank in enumerate(made.ranks):
            steps = run.ranks[rank].steps
            begin = int(steps.start_mono_ns[steps.global_step.tolist().index(number)])
            was = [each for each in measured(run.ranks[rank], numbers, index, begin) if _known(each, index)]
            would = replayed(made, times, index, column)
            assert was == would
            tracks |= {each.track.split()[0] for each in would}
    assert {"steps", "compute", "waits", "collectives"} <= tracks


def _known(each: Slice, index: int) -> bool:
    """Waits in the first steps may be for collectives that were issued before them, which the replay does not have."""
    return each.about.get("issued_steps_ago", 0) <= index


def _events(path: Path) -> list[Event]:
    """The events of a file, as the repository's own reader sees them."""
    with io.BufferedReader(path.open("rb", buffering=0)) as file:  # type: ignore[arg-type]
        found = RawEvents(file, str(path)).events()
        return [{key: json.loads(bytes(value)) for key, value in event.items()} for event in found]


def _drawn(folder: Path, path: Path, *words: str) -> list[Event]:
    assert main([str(folder), "--timeline", str(path), "--overwrite", *words]) == 0
    return _events(path)


def _ns(event: Event) -> tuple[int, int]:
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def _side(events: list[Event], rank: int, which: int) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == (rank + 1) * 1000 + which]


def test_both_begin_the_chosen_step_together_and_only_the_replay_is_changed(folder: Path, tmp_path: Path) -> None:
    path, ranks = tmp_path / "timeline.json", JOBS[folder.name].ranks
    unchanged = _drawn(folder, path, "--step", "4")
    changed = _drawn(folder, path, "--step", "4", "--set", "comm=free", "--set", "compute=x2")
    again = _drawn(folder, tmp_path / "again.json", "--step", "4", "--set", "comm=free")
    steps = defaultdict(list)
    for rank in range(ranks):
        was, same, would = _side(unchanged, rank, 0), _side(unchanged, rank, 1), _side(changed, rank, 1)
        origin = _begin_of(changed, ranks, 0) - _begin_of(unchanged, ranks, 0)
        assert [(*_ns(each), each["name"]) for each in was] == [
            (begin - origin, end - origin, each["name"])
            for each in _side(changed, rank, 0)
            for begin, end in [_ns(each)]
        ]
        assert [(each["name"], *_ns(each)) for each in was if each["name"].startswith("step ")] == [
            (each["name"], *_ns(each)) for each in same if each["name"].startswith("step ")
        ]
        assert [each["name"] for each in would if each["name"].startswith("step ")] == ["step 3", "step 4", "step 5"]
        for which, side in enumerate((was, would)):
            begin, end = next(_ns(each) for each in side if each["name"] == "step 4")
            steps[which].append(end - begin)
    assert _begin_of(changed, ranks, 0) == _begin_of(changed, ranks, 1)
    assert max(steps[1]) < 0.8 * max(steps[0])
    ids = [
        {each["pid"]: each["args"]["name"] for each in one if each["name"] == "process_name"}
        for one in (changed, again)
    ]
    assert ids[0].keys() == ids[1].keys()
    assert ids[0][1000] == ids[1][1000] == "rank 0"
    assert ids[0][1001] == "rank 0, what if: compute=x2, comm=free"


def _begin_of(events: list[Event], ranks: int, which: int) -> int:
    """When the chosen step begins on the first rank that begins it."""
    return min(_ns(each)[0] for rank in range(ranks) for each in _side(events, rank, which) if each["name"] == "step 4")


def test_slices_of_a_thread_lie_side_by_side_or_within_each_other(folder: Path, tmp_path: Path) -> None:
    threads = defaultdict(list)
    events = _drawn(folder, tmp_path / "timeline.json", "--set", "comm=x0.2")
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append((_ns(event), event["pid"]))
    assert set(threads) == {event["tid"] for event in events if event["name"] == "thread_name"}
    for slices in threads.values():
        assert len({pid for _, pid in slices}) == 1
        ends: list[int] = []
        for (begin, end), _ in slices:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


def test_collectives_that_overlap_have_threads_of_their_own(tmp_path: Path) -> None:
    """Those of a real network wait for no other, so one of a group may begin before the one before it has ended."""
    job = Job("ddp")
    record(replace(job, late_ns=0), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    config["config"]["fabric"] = {"kind": "none"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(config))
    events = _drawn(tmp_path / "run", tmp_path / "timeline.json", "--set", "compute=x50")
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any(name.startswith("collectives") and name.endswith("(2)") for name in names)


def test_the_file_is_named_and_nothing_is_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(JOBS["ddp"], tmp_path / "run")
    path = tmp_path / "timeline.json.gz"
    words = [str(tmp_path / "run"), "--timeline", str(path), "--set", "comm=x2"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "events, global steps" in said
    assert "aligned where step" in said
    assert main(words) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main([*words[:-2], "--overwrite", "--step", "999"]) == 2
    assert "are replayed" in capsys.readouterr().err
