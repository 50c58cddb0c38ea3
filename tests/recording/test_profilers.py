"""`aorta.Profiler`, `aorta.TorchProfiler` and `aorta.record(profiling=...)`: loops that AORTA did not write.

On two ranks with a mesh: `docs/examples/profiled.py`, which `test_examples.py` runs.
"""

from __future__ import annotations

import inspect
import itertools
import json

import pytest
import torch
from torch import nn

import aorta
from aorta.errors import ConfigError, FolderNotEmpty, TracesIncomplete
from aorta.report.command import overlap_report
from tests.loop import resolved
from tests.profiling.windows import TWELVE, files_below, listening, numbers, read
from tests.runs import record


@pytest.mark.spec("A1", "E1", "F1")
def test_presets_of_train_py_are_the_same_objects_settings():
    parameters = inspect.signature(aorta.TorchProfiler).parameters.values()
    assert {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD} == TWELVE
    cycle = {"period": 7, "warmup": 1, "active": 2}
    words = [f"profiling.{key}={value}" for key, value in cycle.items()]
    config = resolved("profiling=d9d", "profiling.enabled=true", *words).config
    assert aorta.Profiler("x", 7, 1, 2, None).settings == config.profiling
    config = resolved("profiling=composer", "profiling.enabled=true").config
    assert aorta.TorchProfiler().settings == config.profiling


@pytest.mark.spec("A1", "A2", "A6")
def test_around_a_loop_without_a_process_group(tmp_path):
    profiler = aorta.Profiler(tmp_path / "traces", 4, 1, 1, None)
    with pytest.raises(ConfigError, match=r"aorta\.Profiler: it has not been started; call start\(\), or use `with`"):
        profiler.step()
    assert list(tmp_path.iterdir()) == []
    with profiler:
        for number in range(8):
            profiler(number, loss=0.0)  # as a callback
    traces = {number: tmp_path / f"traces/step_{number}/trace.tar.gz" for number in (4, 8)}
    assert {moment.batch: path for moment, (path,) in profiler.saved_traces} == traces
    assert [numbers(read(path)) for path in traces.values()] == [[3], [7]]


@pytest.mark.spec("E8")
def test_a_folder_in_use_is_refused_and_a_resumed_loop_goes_on_in_it(tmp_path):
    def trained(start=0):
        with aorta.TorchProfiler(str(tmp_path), wait=0, repeat=0, summary_rows=0).open(start) as torch_s:
            for _ in range(start, start + 5):
                torch_s.step()

    trained()
    with pytest.raises(FolderNotEmpty, match=r"is not empty; rank0\.5\.pt\.trace\.json exists.*overwrite=True"):
        trained()
    trained(5)
    assert files_below(tmp_path) == ["rank0.10.pt.trace.json", "rank0.5.pt.trace.json"]


# --- aorta.record ---------------------------------------------------------------------------------------------------


EVERY_FOUR = {"period": 4, "warmup": 1, "active": 1}


def recorded(folder, steps=8, start=0, fail_in=None, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with aorta.record(folder, model=model, start_step=start, **arguments) as recording:
        for number in range(start, start + steps):
            model(torch.ones(2, 4)).sum().backward()
            if number == fail_in:
                raise ZeroDivisionError
            recording.step()


@pytest.mark.parametrize(
    ("profiling", "names"),
    [
        (None, []),
        ("d9d", []),
        ({"preset": "d9d", **EVERY_FOUR}, ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]),
        ({"preset": "tutorial", "wait": 1, "warmup": 1, "active": 2}, ["rank0_iter3_4.json"]),
        ({"naming": "mesh", "repeat": 0}, ["step_4/trace.json", "step_8/trace.json"]),
    ],
    ids=["nothing", "name", "preset and keys", "tutorial", "keys"],
)
@pytest.mark.spec("A1")
def test_a_recorded_loop_takes_a_preset_or_its_keys(tmp_path, profiling, names):
    recorded(tmp_path, profiling=profiling)
    assert files_below(tmp_path / "torch_profiler") == names
    listed = json.loads((tmp_path / "run.json").read_text()).get("traces", {"saved_traces": []})["saved_traces"]
    assert [row["paths"] for row in listed] == [[f"torch_profiler/{name}"] for name in names]
    assert [line.global_step for line in record(tmp_path).steps] == list(range(8))


@pytest.mark.spec("A1", "D19", "D26", "E1")
def test_a_recorded_loop_takes_a_profiler_whose_steps_are_the_record_s(tmp_path):
    profiler = aorta.TorchProfiler(str(tmp_path / "traces"), wait=1, active=2, summary_rows=0)
    recorded(tmp_path / "run", profiling=profiler)
    ((moment, (path,)),) = profiler.saved_traces
    assert (moment.batch, path) == (4, tmp_path / "traces" / "rank0.4.pt.trace.json")
    trace = read(path)
    assert numbers(trace) == [2, 3]
    begin_us = {
        event["name"]: event["ts"] for event in trace["traceEvents"] if "ProfilerStep#" in event.get("name", "")
    }
    for before, line in itertools.pairwise(record(tmp_path / "run").steps[1:4]):
        start_ns = trace["baseTimeNanoseconds"] + begin_us[f"ProfilerStep#{line.global_step}"] * 1e3
        # On the same clock: torch's profiler begins a step when the record ends the one before.
        assert before.t_start_ns < start_ns < line.t_end_ns
        times = [line.t_start_ns + at for part in line.active_segments for at in (part.start_ns, part.end_ns)]
        assert [line.t_start_ns, *times, line.t_end_ns] == sorted([line.t_start_ns, *times, line.t_end_ns])


@pytest.mark.spec("E3", "E4")
def test_samples_and_tokens_of_an_own_loop_are_unknown_until_it_says_how_many_a_step_has(tmp_path, monkeypatch):
    def accelerator(check_available=False):  # of PyPI's torch for Linux, on a machine without a GPU
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    named = {"filename": "{batch}.{sample}.{token:04d}.json", "wait": 1, "active": 2, "summary_rows": 0}
    recorded(tmp_path / "a", profiling={"preset": "composer", **named})
    assert files_below(tmp_path / "a/cpu/torch_traces") == ["4.{sample}.{token:04d}.json"]
    (listed,) = json.loads((tmp_path / "a/run.json").read_text())["traces"]["saved_traces"]
    assert [listed[name] for name in ("sample", "sample_in_epoch", "token", "token_in_epoch")] == [None] * 4
    where = str(tmp_path / "traces")
    recorded(tmp_path / "b", profiling=aorta.TorchProfiler(where, samples_per_step=2, tokens_per_sample=4, **named))
    assert files_below(tmp_path / "traces") == ["4.8.0032.json"]


@pytest.mark.spec("A15")
def test_the_trace_of_a_window_without_a_finished_step_is_kept_and_called_so(tmp_path, capsys):
    with listening() as said:
        recorded(tmp_path, 3, profiling={"preset": "d9d", **EVERY_FOUR, "with_stack": False})
    assert files_below(tmp_path / "torch_profiler") == ["step_3/trace.tar.gz"]
    assert sum("holds no whole step" in text for text in said) == 1
    assert overlap_report([str(tmp_path / "torch_profiler/step_3/trace.tar.gz")]) == 2
    assert "partial: its loop ended before a step of this window was finished" in capsys.readouterr().err


@pytest.mark.spec("A12")
def test_a_resumed_recording_writes_beside_the_earlier_windows_and_a_new_one_does_not(tmp_path):
    for start, kept in ((0, [4]), (4, [4, 8]), (0, [4])):
        recorded(tmp_path, 4, start, profiling={"preset": "d9d", **EVERY_FOUR})
        assert files_below(tmp_path / "torch_profiler") == [f"step_{number}/trace.tar.gz" for number in kept]


@pytest.mark.spec("E9")
def test_a_refused_upload_is_raised_after_the_record_is_whole(tmp_path):
    (tmp_path / "r.json").write_text("somebody's")
    keys = {"remote_root": f"file://{tmp_path}", "remote_file_name": "r.json"}
    with pytest.raises(FileExistsError, match=r"r\.json already exists") as raised:
        recorded(tmp_path / "run", profiling=keys)
    assert isinstance(raised.value, TracesIncomplete)
    seen = record(tmp_path / "run")
    assert (len(seen.steps), seen.footer.reason, seen.footer.exit_code) == (8, "completed", 1)
    assert seen.footer.error.startswith("rank 0: TraceExists: profiling: rank 0: ")
    (window,) = json.loads((tmp_path / "run/run.json").read_text())["traces"]["ranks"]["0"]
    assert "already exists" in window["files"][0]["error"]


def test_a_recorded_loop_that_fails_keeps_its_traces_and_its_error(tmp_path):
    with listening() as said, pytest.raises(ZeroDivisionError):
        recorded(tmp_path, profiling={"naming": "mesh", "active": 5}, fail_in=3)
    folder = tmp_path / "torch_profiler/step_3"
    trace = read(folder / "trace.json")
    assert (trace["first_step"], trace["last_step"], trace["partial"]) == (2, 3, True)
    (missing,) = [text for text in said if "run.json" in text]
    assert missing == f"profiling: the run failed, and run.json does not list its 1 file(s) in {folder}"
