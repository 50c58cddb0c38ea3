"""`aorta.Profiler`, `aorta.TorchProfiler` and `aorta.record(profiling=...)`: loops that AORTA did not write."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import aorta
from aorta.errors import ConfigError, FolderNotEmpty, TracesIncomplete
from aorta.report.command import overlap_report
from tests.loop import resolved
from tests.profiling.windows import TWELVE, files_below, listening, numbers, read
from tests.runs import program, record, succeeded


def step() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


@pytest.mark.spec("A1")
def test_the_five_arguments_of_the_periodic_profiler_have_no_defaults(tmp_path):
    parameters = inspect.signature(aorta.Profiler).parameters.values()
    five = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    assert five == ["save_dir", "period_steps", "warmup_steps", "active_steps", "dist_context"]
    assert all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters if one.name not in five)
    aorta.Profiler(tmp_path / "none" / "yet", 4, 1, 1, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("E1")
def test_the_twelve_defaults_of_the_templated_profiler():
    parameters = inspect.signature(aorta.TorchProfiler).parameters.values()
    assert {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD} == TWELVE


@pytest.mark.spec("A1", "E1", "F1")
def test_presets_of_train_py_are_the_same_objects_settings():
    cycle = {"period": 7, "warmup": 1, "active": 2}
    words = [f"profiling.{key}={value}" for key, value in cycle.items()]
    config = resolved("profiling=d9d", "profiling.enabled=true", *words).config
    assert aorta.Profiler("x", 7, 1, 2, None).settings == config.profiling
    config = resolved("profiling=composer", "profiling.enabled=true").config
    assert aorta.TorchProfiler().settings == config.profiling


@pytest.mark.spec("A1", "A2", "A6")
def test_around_a_loop_without_a_process_group(tmp_path):
    with aorta.Profiler(tmp_path, 4, 1, 1, None) as profiler:
        for _ in range(8):
            step()
            profiler.step()
    assert files_below(tmp_path) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    assert numbers(read(tmp_path / "step_8/trace.tar.gz")) == [7]
    assert [(moment.batch, paths) for moment, paths in profiler.saved_traces] == [
        (number, [tmp_path / f"step_{number}/trace.tar.gz"]) for number in (4, 8)
    ]


def test_steps_of_a_profiler_that_was_not_started_are_refused(tmp_path):
    profiler = aorta.Profiler(tmp_path, 4, 1, 1, None)
    with pytest.raises(ConfigError, match=r"aorta\.Profiler: it has not been started; call start\(\), or use `with`"):
        profiler.step()


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


def test_processes_without_a_group_are_refused_because_their_names_would_collide(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match=r"aorta\.Profiler: WORLD_SIZE=2, but torch\.distributed is not initialised"),
        aorta.Profiler(tmp_path, 4, 1, 1, None),
    ):
        pass


def ranks(folder: Path, how: str) -> list[dict]:
    succeeded(program("tests.recording.own_loop", str(folder), how))
    return [json.loads((folder / f"saved_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.dist
@pytest.mark.spec("A5", "E16")
def test_ranks_know_each_other_s_traces_after_the_loop_and_their_own_in_it(tmp_path):
    found = ranks(tmp_path, "mesh")
    names = [f"rank-{rank}-coord-0-{rank}-0-trace.tar.gz" for rank in (0, 1)]
    assert files_below(tmp_path / "traces") == [f"step_{number}/{name}" for number in (4, 8) for name in names]
    paths = [[str(tmp_path / "traces" / f"step_{number}" / name) for name in names] for number in (4, 8)]
    for rank, saved in enumerate(found):
        assert saved["after it"] == paths
        assert saved["in the loop"] == [[row[one] if one == rank else None for one in (0, 1)] for row in paths]


@pytest.mark.dist
@pytest.mark.spec("A7")
def test_a_rank_outside_the_mesh_ends_the_start_on_every_rank(tmp_path):
    for saved in ranks(tmp_path, "outside"):
        assert saved["error"].startswith("ConfigError 1: rank 1: not in the mesh DeviceMesh")
    assert not (tmp_path / "traces").exists()


@pytest.mark.dist
@pytest.mark.spec("E9")
def test_an_upload_that_is_refused_is_raised_at_the_end_with_what_is_where(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "r1.json").write_text("somebody's")
    for saved in ranks(tmp_path, "upload"):
        assert saved["error"] == (
            f"TraceExists 5: profiling: rank 1: {tmp_path}/traces/rank1.6.pt.trace.json (still on disk): "
            f"FileExistsError: file://{tmp_path}/remote/r1.json already exists, and profiling.overwrite is false; "
            "the other 1 file(s) are complete"
        )
    assert (tmp_path / "remote" / "r1.json").read_text() == "somebody's"
    assert (tmp_path / "remote" / "r0.json").read_bytes() == (tmp_path / "traces/rank0.6.pt.trace.json").read_bytes()


# --- aorta.record ---------------------------------------------------------------------------------------------------


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
        ("d9d", []),
        ({"preset": "d9d", "period": 4, "warmup": 1, "active": 1}, ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]),
        ({"preset": "tutorial", "wait": 1, "warmup": 1, "active": 2}, ["rank0_iter3_4.json"]),
        ({"naming": "mesh", "repeat": 0}, ["step_4/trace.json", "step_8/trace.json"]),
        (None, []),
    ],
    ids=["name", "preset and keys", "tutorial", "keys", "nothing"],
)
@pytest.mark.spec("A1")
def test_a_recorded_loop_takes_a_preset_or_its_keys(tmp_path, profiling, names):
    recorded(tmp_path, profiling=profiling)
    assert files_below(tmp_path / "torch_profiler") == names
    listed = json.loads((tmp_path / "run.json").read_text()).get("traces", {"saved_traces": []})["saved_traces"]
    assert [row["paths"] for row in listed] == [[f"torch_profiler/{name}"] for name in names]
    assert [line.global_step for line in record(tmp_path).steps] == list(range(8))


@pytest.mark.spec("A1", "E1")
def test_a_recorded_loop_takes_a_profiler_whose_steps_are_the_record_s(tmp_path):
    profiler = aorta.TorchProfiler(str(tmp_path / "traces"), wait=1, active=2, summary_rows=0)
    recorded(tmp_path / "run", profiling=profiler)
    (name,) = files_below(tmp_path / "traces")
    assert name == "rank0.4.pt.trace.json"
    trace = read(tmp_path / "traces" / name)
    assert numbers(trace) == [2, 3]
    ((moment, paths),) = profiler.saved_traces
    assert (moment.batch, paths) == (4, [tmp_path / "traces" / name])
    begin = {
        event["name"]: event for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")
    }
    for before, line in itertools.pairwise(record(tmp_path / "run").steps[1:4]):
        seen = begin[f"ProfilerStep#{line.global_step}"]
        start_ns = trace["baseTimeNanoseconds"] + seen["ts"] * 1e3
        # On the same clock: torch's profiler begins a step when the record ends the one before.
        assert before.t_start_ns < start_ns < line.t_end_ns


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
        recorded(tmp_path, 3, profiling={"preset": "d9d", "period": 4, "warmup": 1, "active": 1, "with_stack": False})
    assert files_below(tmp_path / "torch_profiler") == ["step_3/trace.tar.gz"]
    assert sum("holds no whole step" in text for text in said) == 1
    assert overlap_report([str(tmp_path / "torch_profiler/step_3/trace.tar.gz")]) == 2
    assert "partial: its loop ended before a step of this window was finished" in capsys.readouterr().err


@pytest.mark.spec("A12")
def test_a_resumed_recording_writes_beside_the_earlier_windows(tmp_path):
    keys = {"preset": "d9d", "period": 4, "warmup": 1, "active": 1}
    recorded(tmp_path, 4, profiling=keys)
    recorded(tmp_path, 4, 4, profiling=keys)
    assert files_below(tmp_path / "torch_profiler") == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    recorded(tmp_path, 4, profiling=keys)  # a new run, not a resumed one
    assert files_below(tmp_path / "torch_profiler") == ["step_4/trace.tar.gz"]
    assert len(files_below(tmp_path / "history")) > 3


@pytest.mark.parametrize(
    ("profiling", "said"),
    [
        ("d9", r"there is no preset 'd9'; there are aorta, d9d, tutorial, composer"),
        ({"perod": 4}, r"Key 'perod' not in"),
        (7, r"profiling=7: give a preset \(aorta, d9d, tutorial, composer\)"),
        ({"preset": "d9d", "period": 2}, "period=2, warmup=5, active=3"),
    ],
)
def test_what_is_no_profiling_is_refused_before_anything_is_written(tmp_path, profiling, said):
    with pytest.raises(ConfigError, match=said):
        recorded(tmp_path / "run", profiling=profiling)
    assert not (tmp_path / "run").exists()


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
