"""`profiling=composer`: templates, gzip, how many are kept, memory and FLOPs, tables at the end."""

from __future__ import annotations

import re

import pytest

from aorta.config.profiling import FILE_FIELDS, fill, problem_of
from aorta.profiling.profiler_plan import Counters, TracePlace
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
    place = TracePlace("named", 5, 1, 8, 4, 1)
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
