"""Presets of windows. `d9d`: every `period` steps, named by mesh coordinate, packed as they come; `composer` and
`tutorial`: templates, what is kept, memory and FLOPs; a rank filter and one late window.
"""

from __future__ import annotations

import re
import tarfile
from importlib.metadata import entry_points
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from aorta.config.profiling import FILE_FIELDS, fill, problem_of, profiling_notes, selected_ranks
from aorta.errors import ConfigError
from aorta.profiling import trace_saver
from aorta.profiling.profiler_plan import Counters, ProfilerPlan, TraceProcess, coordinate_of, placed
from aorta.profiling.window_recording import NullProfiler, open_profiler
from tests.profiling.windows import FLAGS, HERE, files_below, listening, loop, numbers, preset, read


def d9d(period=4, warmup=1, active=1, **settings):
    settings.setdefault("with_stack", False)  # it costs a second a window
    return preset("d9d", period=period, warmup=warmup, active=active, **settings)


@pytest.mark.spec("A2", "A4", "A6", "A8", "A10", "A18")
def test_a_folder_a_window_named_by_finished_steps_with_one_regular_member_of_shapes_and_stacks(tmp_path):
    with listening() as said:
        loop(tmp_path, d9d(with_stack=True), 8)
    assert files_below(tmp_path) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    trace, last = (read(tmp_path / f"step_{end}/trace.tar.gz") for end in (4, 8))
    assert [numbers(each) for each in (trace, last)] == [[3], [7]]
    with tarfile.open(tmp_path / "step_4/trace.tar.gz", "r:gz") as archive:
        assert [(member.name, member.isreg()) for member in archive.getmembers()] == [("trace.json", True)]
    assert (trace["record_shapes"], trace["with_stack"]) == (1, 1)
    assert not {"profile_memory", "with_flops", "with_modules"} & set(trace)
    (mm,) = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    assert mm["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert any(event.get("cat") == "python_function" for event in trace["traceEvents"])
    assert sum(bool(re.fullmatch(r"Finished dumping profiler traces in \d+\.\d\d seconds", line)) for line in said) == 2


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


@pytest.mark.spec("A5", "A7")
def test_coordinates_are_those_of_torch_s_mesh_and_a_rank_outside_of_it_is_told():
    sizes = (2, 1, 3, 2)
    ranks = torch.arange(12).reshape(sizes)
    assert [coordinate_of(rank, sizes, 12) for rank in range(12)] == [
        tuple((ranks == rank).nonzero()[0].tolist()) for rank in range(12)
    ]
    elsewhere = SimpleNamespace(shape=(2,), get_coordinate=lambda: None)  # as torch answers a rank not in the mesh
    with pytest.raises(ConfigError, match="rank 2 is not in the mesh"):
        placed(TraceProcess("run", 2, world_size=3), elsewhere)


@pytest.mark.spec("A9")
def test_a_trace_that_cannot_be_packed_stays_as_json_and_no_half_archive_stands_under_the_name(tmp_path, monkeypatch):
    fail = Mock(side_effect=OSError(5, "I/O error"))
    (tmp_path / "trace.json").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "replace", fail)
        with pytest.raises(OSError, match="I/O error"):
            trace_saver.pack(tmp_path / "trace.json", tmp_path / "trace.tar.gz")
    assert files_below(tmp_path) == ["trace.json"]
    monkeypatch.setattr(trace_saver.tarfile, "open", fail)
    loop(tmp_path, d9d(2, 0, 1), 2)
    assert files_below(tmp_path) == ["step_2/trace.json", "trace.json"]
    assert numbers(read(tmp_path / "step_2/trace.json")) == [1]


@pytest.mark.spec("A10", "A11")
def test_open_gives_torch_s_own_profiler_and_no_word_about_a_missing_device(tmp_path):
    with open_profiler(ProfilerPlan(d9d(), TraceProcess("run"), tmp_path), 6) as profiler:  # warnings are errors here
        assert [activity.name for activity in profiler.activities] == ["CPU"] + ["CUDA"] * torch.cuda.is_available()
        assert isinstance(profiler, torch.profiler.profile)
        assert profiler.step_num == 6
        profiler.step()
        assert profiler.step_num == 7


@pytest.mark.parametrize("start", range(5))
@pytest.mark.spec("A13", "A14")
def test_a_resume_loses_no_step_of_a_window(tmp_path, start):
    loop(tmp_path, d9d(4, 1, 2), 8, start)
    wanted = {end: [step for step in (end - 2, end - 1) if step >= start] for end in (4, 8)}
    wanted = {f"step_{end}/trace.tar.gz": kept for end, kept in wanted.items() if kept}
    assert files_below(tmp_path) == sorted(wanted)
    for name, kept in wanted.items():
        trace = read(tmp_path / name)
        assert numbers(trace, "iteration#") == kept
        facts = trace["first_step"], trace["last_step"], trace["step_base"], trace["partial"]
        assert facts == (kept[0], kept[-1], 0, len(kept) < 2)


# --- templates ----------------------------------------------------------------------------------------------------


def composer(**settings):
    settings.setdefault("folder", None)  # the loop's own
    return preset("composer", **settings)


@pytest.mark.spec("E2", "E3")
def test_folders_know_who_writes_and_files_all_sixteen(tmp_path):
    assert len(FILE_FIELDS) == 16
    template = "+".join(f"{{{name}}}" for name in FILE_FIELDS) + ".json"
    folder = tmp_path / "{run_name}_{rank}_{local_rank}_{world_size}_{local_world_size}_{node_rank}_{batch}"
    settings, place = composer(filename=template, wait=1, warmup=0, active=1), TraceProcess("named", 5, 1, 8, 4, 1)
    loop(folder, settings, 10, 6, place=place, counters=Counters(4, 3, 2))
    folder_name, _, name = files_below(tmp_path)[0].partition("/")
    assert folder_name == "named_5_1_8_4_1_{batch}"
    parts = name.removesuffix(".json").split("+")
    assert not set("{}") & set(name)
    # Resumed at step 6 = batch 2 of epoch 1: the cycle counts from there, so step 7 is kept.
    assert parts[:6] == ["named", "5", "1", "8", "4", "1"]
    assert list(map(int, parts[6:13])) == [1, 8, 4, 24, 12, 48, 24]
    total, epoch, batch = map(float, parts[13:])
    assert total >= epoch >= 0
    assert total >= batch >= 0


@pytest.mark.spec("E4", "E5")
def test_formats_are_kept_and_what_is_not_known_stays():
    known = {"batch": 7, "rank": 3, "total_wct": 1.234}
    for template, text in {
        "{batch:06d}.json": "000007.json",
        "{batch:>4}{{x}}": "   7{x}",
        "{total_wct:.1f}": "1.2",
        "{rank!r}": "3",
        "{}-{epoch}-{token:03d}": "{}-{epoch}-{token:03d}",
    }.items():
        assert fill(template, known) == text


@pytest.mark.spec("E4")
def test_a_misspelt_variable_is_answered_with_the_known_ones():
    for template, said in {
        "{bach}.json": r"\{bach\} is no variable; there are run_name, rank, .*batch_wct",
        "{rank.real}": r"\{rank.real\} is no variable",
        "{batch:q}": "not a template: ",
        "{batch": "not a template: ",
        "{0}": r"\{0\} is no variable",
    }.items():
        assert re.match(said, problem_of(template) or "")
    assert problem_of("{}{rank}") is None


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_gzip": True}, "rank0.1.pt.trace.json.gz"),
        ({"compression": "gz"}, "rank0.1.pt.trace.json.gz"),
        ({"filename": "a{rank}.json.gz"}, "a0.json.gz"),
        ({"compression": "tar.gz"}, "rank0.1.pt.trace.tar.gz"),
    ],
)
@pytest.mark.spec("E10")
def test_gz_is_added_once(tmp_path, settings, name):
    loop(tmp_path, composer(wait=0, warmup=0, active=1, **settings), 1)
    assert files_below(tmp_path) == [name]
    assert (tmp_path / name).read_bytes()[:2] == b"\x1f\x8b"
    assert numbers(read(tmp_path / name)) == [0]


@pytest.mark.spec("E15")
def test_the_newest_trace_is_kept_and_listed_and_the_memory_page_goes_with_its_own(tmp_path):
    cycle = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0}
    settings = composer(**cycle, num_traces_to_keep=1, memory_filename="m/{batch}.html", **FLAGS)
    profiler = loop(tmp_path, settings, 2)
    assert files_below(tmp_path) == ["m/2.html", "rank0.2.pt.trace.json"]
    assert [saved.window.moment.batch for saved in profiler.saver.kept()] == [2]
    assert "aten::" in (tmp_path / "m/2.html").read_text()


@pytest.mark.spec("E6", "E7", "E20", "E21", "E22", "E23", "E24")
def test_batch_counts_finished_steps_and_flags_show_in_the_trace_and_tables_are_logged_at_the_end(tmp_path):
    with listening() as said:
        loop(tmp_path, composer(), 7, counters=Counters(7, 4, 10))
    assert files_below(tmp_path) == ["rank0.5.pt.trace.json"]  # a window closes on its last step
    tables = [text for text in said if text.startswith("profiling: operators of the last window by ")]
    assert [table.splitlines()[0].rpartition(" ")[2] for table in tables] == ["cpu_time_total", "self_cpu_memory_usage"]
    assert all("aten::mm" in table and "FLOPs" in table for table in tables)
    assert "CPU Mem" in tables[1]
    trace = read(tmp_path / "rank0.5.pt.trace.json")
    assert numbers(trace) == [1, 2, 3, 4]
    assert (trace["profile_memory"], trace["with_flops"]) == (1, 1)
    assert "record_shapes" not in trace
    assert trace["global_rank"] == HERE.rank
    events = trace["traceEvents"]
    assert any(event.get("name") == "[memory]" for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events)  # with_flops records shapes
    loop(tmp_path, composer(wait=0, warmup=0, active=1, with_flops=False, profile_memory=False, with_stack=True), 1)
    events = read(tmp_path / "rank0.1.pt.trace.json")["traceEvents"]
    assert not any("Input Dims" in event.get("args", {}) for event in events)
    assert not any(event.get("name") == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


@pytest.mark.spec("E26", "D10")
def test_names_tensorboard_s_plugin_finds(tmp_path):
    loop(tmp_path, preset("aorta", wait=0, warmup=0, active=1, compression="gz", folder=None), 1)
    (name,) = files_below(tmp_path)
    assert re.fullmatch(r"rank0/node7_42\.\d+\.pt\.trace\.json\.gz", name)


@pytest.mark.spec("B1")
def test_ranks_that_are_profiled():
    assert selected_ranks("all") is selected_ranks(" All ") is None
    for asked in ("0,3", " 0, 3,", "0,0,3", [0, 3], ["0", " 3 "]):
        assert selected_ranks(asked) == {0, 3}, asked
    assert [selected_ranks(asked) for asked in ("", [], 0, "99")] == [set(), set(), {0}, {99}]
    for asked in ("a", "-1", "0;2", "1.5", [-1], [True], ["all"], None, 1.5, "0-3"):
        with pytest.raises(ValueError, match="is not a rank: give all, a list"):
            selected_ranks(asked)


@pytest.mark.spec("B1", "B4")
def test_a_rank_that_is_not_meant_gets_one_that_does_nothing_and_one_beyond_the_world_is_a_warning(tmp_path):
    profiling = preset("tutorial", ranks="1, 2, 5")
    assert list(profiling_notes(profiling, 200, 2)) == ["profiling.ranks: this run has no rank 2, 5; its last is 1"]
    assert list(profiling_notes(profiling, 200, 6)) == []
    profiler = open_profiler(ProfilerPlan(profiling, TraceProcess("run", 0, world_size=2), tmp_path / "none"), 0)
    assert isinstance(profiler, NullProfiler)
    assert profiler.step() is None
    with pytest.raises(ZeroDivisionError), profiler as same, same.iteration(3):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("F2", "B5", "B7")
def test_the_name_is_1_based_with_both_ends_and_the_trace_says_so(tmp_path):
    loop(tmp_path, preset("tutorial"), 20, place=TraceProcess("run", 0, world_size=4))
    assert files_below(tmp_path) == ["rank0_iter16_18.json"]
    trace = read(tmp_path / "rank0_iter16_18.json")
    assert numbers(trace) == [15, 16, 17]
    assert (trace["first_step"], trace["last_step"], trace["step_base"]) == (15, 17, 0)
    assert (trace["record_shapes"], trace["with_stack"]) == (1, 1)
    assert "profile_memory" not in trace


@pytest.mark.parametrize(
    ("cycle", "steps", "names"),
    [
        ((2, 1, 1, 1), 12, ["4_4"]),
        ((2, 1, 1, 2), 12, ["4_4", "8_8"]),
        ((2, 1, 1, 0), 12, ["12_12", "4_4", "8_8"]),
        ((1, 1, 4, 1), 4, ["3_4"]),  # a partial window has the iterations that it holds
    ],
)
@pytest.mark.spec("B5", "B6")
def test_a_window_a_cycle_and_none_after_the_last(tmp_path, cycle, steps, names):
    settings = dict(zip(("wait", "warmup", "active", "repeat"), cycle, strict=True))
    loop(tmp_path, preset("tutorial", **settings, with_stack=False), steps)
    assert files_below(tmp_path) == [f"rank0_iter{name}.json" for name in names]
    assert read(tmp_path / f"rank0_iter{names[0]}.json")["partial"] is (steps == 4)


@pytest.mark.spec("B14")
def test_torchrun_is_the_module_the_other_form_runs():
    (script,) = entry_points(group="console_scripts", name="torchrun")
    assert script.value == "torch.distributed.run:main"
