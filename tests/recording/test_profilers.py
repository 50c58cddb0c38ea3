"""`aorta.Profiler`, `aorta.TorchProfiler` and `aorta.record(profiling=...)`: loops that AORTA did not write.

Run on every rank it profiles such loops. Argument: a folder with one for each way to profile: `mesh`, `outside` (a mesh
without the last rank), `upload`. There each rank writes `saved_<rank>.json`: `saved_traces` while the loop ran and
after it, or the error that ended it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import aorta
from aorta.errors import AortaError, ConfigError, FolderNotEmpty, TracesIncomplete
from aorta.report.command import overlap_report
from tests.loop import resolved
from tests.profiling.windows import TWELVE, files_below, listening, numbers, read
from tests.runs import once, program, record, succeeded


@pytest.mark.spec("A1", "E1")
def test_the_five_arguments_of_the_periodic_profiler_have_no_defaults_and_the_twelve_of_the_templated_have(tmp_path):
    parameters = inspect.signature(aorta.Profiler).parameters.values()
    five = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    assert five == ["save_dir", "period_steps", "warmup_steps", "active_steps", "dist_context"]
    assert all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters if one.name not in five)
    aorta.Profiler(tmp_path / "none" / "yet", 4, 1, 1, None)
    assert list(tmp_path.iterdir()) == []
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
def test_around_a_loop_without_a_process_group(tmp_path, monkeypatch):
    profiler = aorta.Profiler(tmp_path, 4, 1, 1, None)
    with pytest.raises(ConfigError, match=r"aorta\.Profiler: it has not been started; call start\(\), or use `with`"):
        profiler.step()
    with monkeypatch.context() as several:  # whose names would collide
        several.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"Profiler: WORLD_SIZE=2, but torch\.distributed is not initialised"):
            profiler.start()
    with aorta.Profiler(tmp_path, 4, 1, 1, None) as profiler:
        for _ in range(8):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    assert files_below(tmp_path) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    assert numbers(read(tmp_path / "step_8/trace.tar.gz")) == [7]
    assert [(moment.batch, paths) for moment, paths in profiler.saved_traces] == [
        (number, [tmp_path / f"step_{number}/trace.tar.gz"]) for number in (4, 8)
    ]


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


@pytest.fixture
def two_ranks(tmp_path_factory):
    """The folder of two ranks that profiled in every way here, and what each rank saw in one of them."""

    def launch(folder):
        for name in ("mesh", "outside", "upload/remote"):
            (folder / name).mkdir(parents=True)
        (folder / "upload" / "remote" / "r1.json").write_text("somebody's")
        succeeded(program("tests.recording.test_profilers", str(folder)))

    folder = once(tmp_path_factory, "own-loops", launch)
    return lambda how: (
        folder / how,
        [json.loads((folder / how / f"saved_{rank}.json").read_text()) for rank in (0, 1)],
    )


@pytest.mark.dist
@pytest.mark.spec("A5", "E16")
def test_ranks_know_each_other_s_traces_after_the_loop_and_their_own_in_it(two_ranks):
    folder, found = two_ranks("mesh")
    names = [f"rank-{rank}-coord-0-{rank}-0-trace.tar.gz" for rank in (0, 1)]
    assert files_below(folder / "traces") == [f"step_{number}/{name}" for number in (4, 8) for name in names]
    paths = [[str(folder / "traces" / f"step_{number}" / name) for name in names] for number in (4, 8)]
    for rank, saved in enumerate(found):
        assert saved["after it"] == paths
        assert saved["in the loop"] == [[row[one] if one == rank else None for one in (0, 1)] for row in paths]


@pytest.mark.dist
@pytest.mark.spec("A7")
def test_a_rank_outside_the_mesh_ends_the_start_on_every_rank(two_ranks):
    folder, found = two_ranks("outside")
    for saved in found:
        assert saved["error"].startswith("ConfigError 1: rank 1: not in the mesh DeviceMesh")
    assert not (folder / "traces").exists()


@pytest.mark.dist
@pytest.mark.spec("E9")
def test_an_upload_that_is_refused_is_raised_at_the_end_with_what_is_where(two_ranks):
    folder, found = two_ranks("upload")
    for saved in found:
        assert saved["error"] == (
            f"TraceExists 5: profiling: rank 1: {folder}/traces/rank1.6.pt.trace.json (still on disk): "
            f"FileExistsError: file://{folder}/remote/r1.json already exists, and profiling.overwrite is false; "
            "the other 1 file(s) are complete"
        )
    assert (folder / "remote" / "r1.json").read_text() == "somebody's"
    assert (folder / "remote" / "r0.json").read_bytes() == (folder / "traces/rank0.6.pt.trace.json").read_bytes()


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


@pytest.mark.spec("A1", "E1")
def test_a_recorded_loop_takes_a_profiler_whose_steps_are_the_record_s(tmp_path):
    profiler = aorta.TorchProfiler(str(tmp_path / "traces"), wait=1, active=2, summary_rows=0)
    recorded(tmp_path / "run", profiling=profiler)
    assert files_below(tmp_path / "traces") == ["rank0.4.pt.trace.json"]
    trace = read(tmp_path / "traces" / "rank0.4.pt.trace.json")
    assert numbers(trace) == [2, 3]
    ((moment, paths),) = profiler.saved_traces
    assert (moment.batch, paths) == (4, [tmp_path / "traces" / "rank0.4.pt.trace.json"])
    begin_us = {
        event["name"]: event["ts"] for event in trace["traceEvents"] if "ProfilerStep#" in event.get("name", "")
    }
    for before, line in itertools.pairwise(record(tmp_path / "run").steps[1:4]):
        start_ns = trace["baseTimeNanoseconds"] + begin_us[f"ProfilerStep#{line.global_step}"] * 1e3
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
    keys = {"preset": "d9d", **EVERY_FOUR}
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


STEPS = 8


def step() -> None:
    """One step of anything."""
    torch.ones(8, 8) @ torch.ones(8, 8)


def shown(profiler: aorta.Profiler | aorta.TorchProfiler) -> list[list[str | None]]:
    return [[path and str(path) for path in paths] for _, paths in profiler.saved_traces]


def main(folder: Path) -> None:
    """Profile loops in each way, one after another."""
    dist.init_process_group("gloo")
    for name, profiled in {"mesh": mesh, "outside": outside, "upload": upload}.items():
        found: dict[str, object] = {}
        try:
            profiled(folder / name, found)
        except AortaError as error:
            found["error"] = f"{type(error).__name__} {error.exit_code}: {error}"
        (folder / name / f"saved_{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def mesh(folder: Path, found: dict[str, object]) -> None:
    dims = init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("pp", "dp", "tp"))
    with aorta.Profiler(folder / "traces", 4, 1, 1, dims, with_stack=False) as profiler:
        for _ in range(STEPS):
            step()
            profiler.step()
        while len(profiler.saved_traces) < STEPS // 4:  # they are written beside the loop
            time.sleep(0.01)
        found["in the loop"] = shown(profiler)
    found["after it"] = shown(profiler)


def outside(folder: Path, _found: dict[str, object]) -> None:
    part = DeviceMesh("cpu", list(range(dist.get_world_size() - 1)))
    with aorta.Profiler(folder / "traces", 4, 1, 1, part, timeout_s=60):
        pass


def upload(folder: Path, _found: dict[str, object]) -> None:
    remote = f"file://{folder}/remote"
    wanted = aorta.TorchProfiler(str(folder / "traces"), remote_root=remote, remote_file_name="r{rank}.json", wait=1)
    wanted.start()
    for number in range(STEPS):
        step()
        wanted(number, loss=0.0)
    wanted.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
