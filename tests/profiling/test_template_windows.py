"""`profiling=composer` and `tutorial`: templates, what is kept, memory and FLOPs; a rank filter and one late window."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import pytest

from aorta.config.profiling import FILE_FIELDS, fill, problem_of, profiling_notes, selected_ranks
from aorta.profiling.profiler_plan import Counters, ProfilerPlan, TraceProcess
from aorta.profiling.window_recording import NullProfiler, open_profiler
from tests.profiling.windows import FLAGS, HERE, files_below, listening, loop, numbers, preset, read


def composer(**settings):
    settings.setdefault("folder", None)  # the loop's own
    return preset("composer", **settings)


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    """The preset as it is, over an epoch of seven steps; its folder and what it logged."""
    folder = tmp_path_factory.mktemp("epoch")
    with listening() as said:
        profiler = loop(folder, composer(), 7, counters=Counters(7, 4, 10))
    return folder, said, profiler


@pytest.mark.spec("E2")
def test_folders_know_who_writes(tmp_path):
    place = TraceProcess("named", 5, 1, 8, 4, 1)
    folder = tmp_path / "{run_name}_{rank}_{local_rank}_{world_size}_{local_world_size}_{node_rank}_{batch}"
    settings = composer(wait=0, warmup=0, active=1)
    loop(folder, settings, 1, place=place)
    assert files_below(tmp_path) == ["named_5_1_8_4_1_{batch}/rank5.1.pt.trace.json"]


@pytest.mark.spec("E3")
def test_files_know_all_sixteen(tmp_path):
    assert len(FILE_FIELDS) == 16
    template = "+".join(f"{{{name}}}" for name in FILE_FIELDS) + ".json"
    loop(tmp_path, composer(filename=template, wait=1, warmup=0, active=1), 10, 6, counters=Counters(4, 3, 2))
    name, *_ = files_below(tmp_path)
    parts = name.removesuffix(".json").split("+")
    assert not set("{}") & set(name)
    # Resumed at step 6 = batch 2 of epoch 1: the cycle counts from there, so step 7 is kept.
    assert parts[:6] == ["run", "0", "0", "1", "1", "0"]
    assert list(map(int, parts[6:13])) == [1, 8, 4, 24, 12, 48, 24]
    total, epoch, batch = map(float, parts[13:])
    assert total >= epoch >= 0
    assert total >= batch >= 0


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{batch:06d}.json", "000007.json"),
        ("{batch:>4}{{x}}", "   7{x}"),
        ("{total_wct:.1f}", "1.2"),
        ("{rank!r}", "3"),
        ("{}-{epoch}-{token:03d}", "{}-{epoch}-{token:03d}"),
    ],
)
@pytest.mark.spec("E4", "E5")
def test_formats_are_kept_and_what_is_not_known_stays(template, text):
    assert fill(template, {"batch": 7, "rank": 3, "total_wct": 1.234}) == text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{bach}.json", r"\{bach\} is no variable; there are run_name, rank, .*batch_wct"),
        ("{rank.real}", r"\{rank.real\} is no variable"),
        ("{batch:q}", "not a template: "),
        ("{batch", "not a template: "),
        ("{0}", r"\{0\} is no variable"),
    ],
)
@pytest.mark.spec("E4")
def test_a_misspelt_variable_is_answered_with_the_known_ones(template, said):
    assert re.match(said, problem_of(template))
    assert problem_of("{}" + template.replace(template, "{rank}")) is None


@pytest.mark.spec("E6", "E7")
def test_batch_counts_finished_steps_and_a_window_closes_on_its_last(one_epoch):
    folder, _, _ = one_epoch
    assert files_below(folder) == ["rank0.5.pt.trace.json"]
    assert numbers(read(folder / "rank0.5.pt.trace.json")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_gzip": True}, "rank0.1.pt.trace.json.gz"),
        ({"compression": "gz"}, "rank0.1.pt.trace.json.gz"),
        ({"use_gzip": True, "filename": "a{rank}.json.gz"}, "a0.json.gz"),
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


@pytest.mark.parametrize(("keep", "kept"), [(-1, [1, 2, 3, 4, 5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
@pytest.mark.spec("E15", "E16")
def test_the_newest_are_kept_and_listed(tmp_path, keep, kept):
    settings = composer(wait=0, warmup=0, active=1, repeat=0, num_traces_to_keep=keep)
    profiler = loop(tmp_path, settings, 5)
    assert files_below(tmp_path) == [f"rank0.{batch}.pt.trace.json" for batch in kept]
    assert [
        (saved.window.moment.batch, [file.path.name for file in saved.files]) for saved in profiler.saver.kept()
    ] == [(batch, [f"rank0.{batch}.pt.trace.json"]) for batch in kept]


@pytest.mark.spec("E15")
def test_the_memory_page_goes_with_its_trace(tmp_path):
    settings = composer(
        wait=0, warmup=0, active=1, repeat=0, num_traces_to_keep=1, memory_filename="m/{batch}.html", **FLAGS
    )
    loop(tmp_path, settings, 2)
    assert files_below(tmp_path) == ["m/2.html", "rank0.2.pt.trace.json"]
    page = (tmp_path / "m/2.html").read_text()
    assert len(page) > 1024
    assert "http" not in page
    assert "aten::" in page


@pytest.mark.spec("E20", "E21", "E22", "E24")
def test_flags_show_in_the_trace(one_epoch, tmp_path):
    trace = read(one_epoch[0] / "rank0.5.pt.trace.json")
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


@pytest.mark.spec("E20", "E23")
def test_tables_are_logged_at_the_end(one_epoch):
    tables = [text for text in one_epoch[1] if text.startswith("profiling: operators of the last window by ")]
    assert [table.splitlines()[0].rpartition(" ")[2] for table in tables] == ["cpu_time_total", "self_cpu_memory_usage"]
    assert all("aten::mm" in table for table in tables)
    assert all("FLOPs" in table for table in tables)
    assert "CPU Mem" in tables[1]


@pytest.mark.parametrize("option", ["composer", "aorta"])
@pytest.mark.spec("E26", "D10")
def test_names_tensorboard_s_plugin_finds(tmp_path, option):
    settings = preset(option, wait=0, warmup=0, active=1, compression="gz", folder=None)
    loop(tmp_path, settings, 1)
    (name,) = files_below(tmp_path)
    assert re.search(r"\.pt\.trace\.json(\.gz)?$", name)
    if option == "aorta":
        assert re.fullmatch(r"rank0/node7_42\.\d+\.pt\.trace\.json\.gz", name)


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twenty")
    loop(folder, preset("tutorial"), 20, place=TraceProcess("run", 0, world_size=4))
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
        ProfilerPlan(preset("tutorial", ranks="1"), TraceProcess("run", 0, world_size=2), tmp_path / "none"), 0
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
        loop(tmp_path / "traces", settings, 1, place=TraceProcess("run", rank, world_size=4))
        assert (tmp_path / "traces").exists()
    assert files_below(tmp_path / "traces") == ["rank0_iter1_1.json", "rank2_iter1_1.json"]
    assert [read(tmp_path / f"traces/rank{rank}_iter1_1.json")["global_rank"] for rank in (0, 2)] == [0, 2]


@pytest.mark.spec("B14")
def test_torchrun_is_the_module_the_other_form_runs():
    (script,) = entry_points(group="console_scripts", name="torchrun")
    assert script.value == "torch.distributed.run:main"
