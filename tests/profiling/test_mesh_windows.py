"""`profiling=d9d`: windows every `period` steps, named by mesh coordinate, packed as they come."""

from __future__ import annotations

import json
import re
import tarfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from aorta.errors import ConfigError
from aorta.profiling import trace_saver
from aorta.profiling.profiler_plan import ProfilerPlan, TraceProcess, coordinate_of, placed
from aorta.profiling.window_recording import open_profiler
from tests.profiling.windows import files_below, listening, loop, numbers, preset, read


def d9d(period=4, warmup=1, active=1, **settings):
    settings.setdefault("with_stack", False)  # it costs a second a window
    return preset("d9d", period=period, warmup=warmup, active=active, **settings)


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    with listening() as said:
        loop(folder, d9d(with_stack=True), 8)
    return folder, said


@pytest.mark.spec("A2", "A4", "A6")
def test_a_folder_a_window_named_by_finished_steps(eight_steps):
    folder, _ = eight_steps
    assert files_below(folder) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    assert numbers(read(folder / "step_4/trace.tar.gz")) == [3]
    assert numbers(read(folder / "step_8/trace.tar.gz")) == [7]


@pytest.mark.parametrize(
    ("rank", "shape", "world", "name"),
    [
        (1, (1, 2, 1), 2, "rank-1-coord-0-1-0-trace.tar.gz"),
        (3, (1, 8, 1, 1, 1, 1), 8, "rank-3-coord-0-3-0-0-0-0-trace.tar.gz"),
        (5, (2, 4), 8, "rank-5-coord-1-1-trace.tar.gz"),
        (2, (), 3, "rank-2-coord-2-trace.tar.gz"),
        (0, (1, 1), 1, "trace.tar.gz"),
        (1, (1, 1), 2, "rank-1-coord-1-trace.tar.gz"),  # no parallelism, two processes: two names (B8)
    ],
)
@pytest.mark.spec("A5")
def test_names_have_global_rank_and_coordinate(tmp_path, rank, shape, world, name):
    place = TraceProcess("run", rank, world_size=world, coordinate=coordinate_of(rank, shape, world))
    loop(tmp_path, d9d(2, 0, 1), 2, place=place)
    assert files_below(tmp_path) == [f"step_2/{name}"]
    with tarfile.open(tmp_path / "step_2" / name) as archive:
        assert archive.getnames() == [name.replace(".tar.gz", ".json")]


@pytest.mark.spec("A5")
def test_coordinates_are_those_of_torch_s_mesh():
    sizes = (2, 1, 3, 2)
    ranks = torch.arange(12).reshape(sizes)
    for rank in range(12):
        assert coordinate_of(rank, sizes, 12) == tuple((ranks == rank).nonzero()[0].tolist())


@pytest.mark.spec("A6")
def test_a_mesh_of_one_needs_no_coordinate(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
        loop(tmp_path, d9d(2, 0, 1), 2, mesh=mesh)
    finally:
        dist.destroy_process_group()
    assert files_below(tmp_path) == ["step_2/trace.tar.gz"]


@pytest.mark.spec("A7")
def test_a_rank_outside_the_mesh_is_told_when_it_opens(tmp_path):
    class Elsewhere:
        shape = (2,)

        def get_coordinate(self):
            return None  # as torch answers a rank that is not in the mesh

    with pytest.raises(ConfigError, match="rank 2 is not in the mesh"):
        placed(TraceProcess("run", 2, world_size=3), Elsewhere())


@pytest.mark.spec("A8")
def test_one_regular_member_under_the_bare_name(eight_steps):
    folder, _ = eight_steps
    with tarfile.open(folder / "step_4/trace.tar.gz", "r:gz") as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.isreg()) == ("trace.json", True)
        assert json.load(archive.extractfile(member))["traceEvents"]
    assert not [name for name in files_below(folder) if not name.endswith(".tar.gz")]


@pytest.mark.spec("A9")
def test_a_trace_that_cannot_be_packed_stays_as_json(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_saver.tarfile, "open", fail)
    loop(tmp_path, d9d(2, 0, 1), 2)
    assert files_below(tmp_path) == ["step_2/trace.json"]
    assert numbers(read(tmp_path / "step_2/trace.json")) == [1]


@pytest.mark.spec("A9")
def test_a_half_written_archive_never_stands_under_the_name(tmp_path, monkeypatch):
    source = tmp_path / "trace.json"
    source.write_text("{}")
    target = tmp_path / "trace.tar.gz"

    def fail(*_):
        raise OSError(5, "I/O error")

    monkeypatch.setattr(type(target), "replace", fail)
    with pytest.raises(OSError, match="I/O error"):
        trace_saver.pack(source, target)
    assert files_below(tmp_path) == ["trace.json"]


@pytest.mark.spec("A10")
def test_shapes_and_stacks_and_no_word_about_a_missing_device(eight_steps, tmp_path):
    trace = read(eight_steps[0] / "step_4/trace.tar.gz")
    assert (trace["record_shapes"], trace["with_stack"]) == (1, 1)
    assert not {"profile_memory", "with_flops", "with_modules"} & set(trace)
    events = trace["traceEvents"]
    (mm,) = [event for event in events if event.get("name") == "aten::mm"]
    assert mm["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert any(event.get("cat") == "python_function" for event in events)
    with open_profiler(ProfilerPlan(d9d(), TraceProcess("run"), tmp_path), 0) as profiler:  # warnings are errors here
        assert [activity.name for activity in profiler.activities] == ["CPU"] + ["CUDA"] * torch.cuda.is_available()


@pytest.mark.spec("A11")
def test_it_is_torch_s_own_profiler_and_steps_are_global(tmp_path):
    with open_profiler(ProfilerPlan(d9d(), TraceProcess("run"), tmp_path), 6) as profiler:
        assert isinstance(profiler, torch.profiler.profile)
        assert profiler.step_num == 6
        profiler.step()
        assert profiler.step_num == 7


@pytest.mark.parametrize("start", range(5))
@pytest.mark.spec("A13", "A14")
def test_a_resume_loses_no_step_of_a_window(tmp_path, start):
    period, active = 4, 2
    loop(tmp_path, d9d(period, 1, active), 2 * period, start)
    wanted = {}
    for end in (period, 2 * period):
        kept = [step for step in range(end - active, end) if step >= start]
        if kept:
            wanted[f"step_{end}/trace.tar.gz"] = kept
    assert files_below(tmp_path) == sorted(wanted)
    for name, kept in wanted.items():
        trace = read(tmp_path / name)
        assert numbers(trace, "iteration#") == kept
        assert (trace["first_step"], trace["last_step"], trace["step_base"]) == (kept[0], kept[-1], 0)
        assert trace["partial"] is (len(kept) < active)


@pytest.mark.spec("A15")
def test_the_window_that_had_just_begun_is_kept_too_and_marked(tmp_path):
    loop(tmp_path, d9d(), 3)
    assert files_below(tmp_path) == ["step_3/trace.tar.gz"]
    trace = read(tmp_path / "step_3/trace.tar.gz")
    assert (trace["partial"], trace["first_step"]) == (True, None)


@pytest.mark.spec("A18")
def test_says_how_long_saving_took(eight_steps):
    lines = [
        line for line in eight_steps[1] if re.fullmatch(r"Finished dumping profiler traces in \d+\.\d\d seconds", line)
    ]
    assert len(lines) == 2
