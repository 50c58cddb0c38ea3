"""`profiling=tutorial`: a rank filter, and one late window named by rank and iterations."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from aorta.config.profiling import profiling_notes, selected_ranks
from aorta.profiling.profiler_plan import ProfilerPlan, TracePlace
from aorta.profiling.window_recording import NullProfiler, open_profiler
from tests.profiling.windows import files_below, loop, numbers, preset, read


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twenty")
    loop(folder, preset("tutorial"), 20, place=TracePlace("run", 0, world_size=4))
    return folder


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ("all", None),
        (" All ", None),
        ("0", {0}),
        ("0,3", {0, 3}),
        ("0, 2, 4", {0, 2, 4}),
        ("0,", {0}),
        ("0, ", {0}),
        ("0,0", {0}),
        ("", set()),
        ("99", {99}),
        ([0, 2], {0, 2}),
        (["0", " 2 "], {0, 2}),
        ([], set()),
        (0, {0}),
    ],
)
@pytest.mark.spec("B1")
def test_ranks_that_are_profiled(asked, ranks):
    assert selected_ranks(asked) == (None if ranks is None else frozenset(ranks))


@pytest.mark.parametrize("asked", ["a", "-1", "0;2", "1.5", [-1], [True], ["all"], None, 1.5, "0-3"])
@pytest.mark.spec("B1")
def test_what_is_no_rank_is_named(asked):
    with pytest.raises(ValueError, match="is not a rank: give all, a list"):
        selected_ranks(asked)


@pytest.mark.spec("B1")
def test_a_rank_beyond_the_world_is_one_warning():
    profiling = preset("tutorial", ranks="0, 2, 5")
    assert list(profiling_notes(profiling, 200, 2)) == ["profiling.ranks: this run has no rank 2, 5; its last is 1"]
    assert list(profiling_notes(profiling, 200, 6)) == []


@pytest.mark.spec("B4")
def test_a_rank_that_is_not_meant_gets_one_that_does_nothing(tmp_path):
    profiler = open_profiler(
        ProfilerPlan(preset("tutorial", ranks="1"), TracePlace("run", 0, world_size=2), tmp_path / "none"), 0
    )
    assert isinstance(profiler, NullProfiler)
    with profiler as same:
        assert same is profiler
        assert same.step() is None
        with same.iteration(3):
            pass
    with pytest.raises(ZeroDivisionError), profiler:
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("F2", "B5", "B7")
def test_the_name_is_1_based_with_both_ends_and_the_trace_says_so(twenty_steps):
    assert files_below(twenty_steps) == ["rank0_iter16_18.json"]
    trace = read(twenty_steps / "rank0_iter16_18.json")
    assert numbers(trace) == [15, 16, 17]
    assert (trace["first_step"], trace["last_step"], trace["step_base"]) == (15, 17, 0)
    assert (trace["record_shapes"], trace["with_stack"]) == (1, 1)
    assert "profile_memory" not in trace


@pytest.mark.spec("B5")
def test_a_partial_window_has_the_iterations_it_holds(tmp_path):
    loop(tmp_path, preset("tutorial", wait=1, warmup=1, active=4, with_stack=False), 4)
    assert files_below(tmp_path) == ["rank0_iter3_4.json"]
    assert read(tmp_path / "rank0_iter3_4.json")["partial"] is True


@pytest.mark.parametrize(("repeat", "names"), [(1, 1), (2, 2), (0, 3)])
@pytest.mark.spec("B6")
def test_a_window_a_cycle_and_none_after_the_last(tmp_path, repeat, names):
    loop(tmp_path, preset("tutorial", wait=2, warmup=1, active=1, repeat=repeat, with_stack=False), 12)
    assert files_below(tmp_path) == sorted(f"rank0_iter{end}_{end}.json" for end in (4, 8, 12)[:names])


@pytest.mark.spec("B7", "B8")
def test_only_profiled_ranks_make_the_folder_and_no_two_share_a_file(tmp_path):
    settings = preset("tutorial", wait=0, warmup=0, active=1, ranks=[0, 2], with_stack=False)
    for rank in range(4):
        loop(tmp_path / "traces", settings, 1, place=TracePlace("run", rank, world_size=4))
        assert (tmp_path / "traces").exists()
    assert files_below(tmp_path / "traces") == ["rank0_iter1_1.json", "rank2_iter1_1.json"]
    assert [read(tmp_path / f"traces/rank{rank}_iter1_1.json")["global_rank"] for rank in (0, 2)] == [0, 2]


@pytest.mark.spec("B14")
def test_torchrun_is_the_module_the_other_form_runs():
    (script,) = entry_points(group="console_scripts", name="torchrun")
    assert script.value == "torch.distributed.run:main"
