"""`recording.range`: in the record, in tables, on the page and in merged traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import aorta
import aorta.analysis
from aorta.analysis.aggregate import LabelledRun
from aorta.errors import ConfigError
from aorta.merge.merge_traces import merge
from aorta.report.files import write_report
from aorta.report.page.timelines import NAMED, spans_of
from tests.runs import record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, of which 1 and 2 share a range; a failing range in step 2; profiled from step 1 on."""
    place = tmp_path_factory.mktemp("run")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with aorta.record(place, model=model, warmup_steps=1, devices="off") as recording:
        across = recording.range("across <b>")
        for step in range(4):
            if step == 1:
                profiler.start()
                across.__enter__()
            with recording.range("forward"), recording.range("inner"):
                loss = model(torch.ones(2, 4)).square().mean()
            if step == 2:
                across.__exit__(None, None, None)
                with pytest.raises(ValueError, match="bad"), recording.range("fails"):
                    raise ValueError("bad")
            loss.backward()
            recording.step()
        with recording.range("behind the last step"):
            pass
        profiler.stop()
    (place / "torch_profiler" / "rank0").mkdir(parents=True)
    profiler.export_chrome_trace(str(place / "torch_profiler" / "rank0" / "rank0.json"))
    return place


def test_a_range_stands_in_the_step_that_ends_first_after_it(folder: Path) -> None:
    steps = record(folder).steps
    assert [[row.name for row in step.ranges] for step in steps] == [
        ["forward", "inner"],
        ["forward", "inner"],
        ["across <b>", "forward", "inner", "fails"],
        ["forward", "inner"],
    ]
    across, forward, inner, fails = steps[2].ranges
    assert across.start_ns < 0 < across.end_ns  # it began in the step before
    assert across.start_ns + steps[2].start_mono_ns >= steps[1].start_mono_ns
    assert (across.depth, forward.depth, inner.depth) == (0, 1, 2)
    assert (across.error, fails.error) == (None, "ValueError")
    for step in steps:
        assert all(0 <= row.start_ns <= row.end_ns <= step.end_mono_ns - step.start_mono_ns for row in step.ranges[-2:])


def test_steps_without_any_have_no_such_field(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with aorta.record(tmp_path, model=model) as recording:
        with recording.range("dropped"):
            pass
        recording.restart()
        recording.step()
    line = (tmp_path / "rank_0_metrics.jsonl").read_text().splitlines()[1]
    assert "ranges" not in json.loads(line)
    with pytest.raises(ConfigError, match=r"recording\.range\(\): the recording has ended"):
        recording.range("late")
    assert aorta.analysis.user_ranges(tmp_path).empty


def test_frames(folder: Path) -> None:
    ranges = aorta.analysis.user_ranges(folder)
    assert ranges["name"].value_counts().to_dict() == {"forward": 4, "inner": 4, "across <b>": 1, "fails": 1}
    assert ranges.loc[ranges["name"] == "fails", "error"].tolist() == ["ValueError"]
    assert (ranges["duration_ms"] > 0).all()
    assert ranges["start_mono_ns"].is_monotonic_increasing
    assert (aorta.analysis.steps(folder)["aux_ms"] == 0).all()  # they change no metric


def test_the_page_has_a_lane(folder: Path, tmp_path: Path) -> None:
    dataset = LabelledRun("x", aorta.analysis.load_run(folder))
    spans = spans_of(dataset, 10_000, 8)
    assert spans.lanes[-3:] == [NAMED, f"{NAMED}, level 2", f"{NAMED}, level 3"]
    assert {"forward", "inner"} <= set(spans.whats)
    lengths = spans.columns["length"][spans.columns["lane"] >= len(spans.lanes) - 3]
    assert (lengths > 0).all()
    report = write_report({"x": folder}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert tmp_path / "report.html" in report.files
    assert "across <b>" not in page


def test_merged_traces_have_tracks(folder: Path, tmp_path: Path) -> None:
    merge([folder], tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"range forward", "range inner"} <= names  # torch's own
    begun = [event for event in events if event["ph"] == "B" and event["name"] == "forward"]
    own = [event for event in events if event["ph"] == "X" and event["name"] == "range forward"]
    # In us. Record and trace agree; of one pair this thread may be held up between the two looks at a clock.
    assert min(abs(each["ts"] - of_torch["ts"]) for each, of_torch in zip(begun, own, strict=True)) < 1000
    failed = next(event for event in events if event["ph"] == "B" and event["name"] == "fails")
    assert failed["args"] == {"error": "ValueError"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"ranges of thread 0", "ranges of thread 0, level 2"} <= tracks
