"""The profiling group on the command line: presets, quoting, and what is refused before anything starts."""

from __future__ import annotations

import re

import pytest

from aorta.config.profiling import profiling_notes, profiling_rules
from aorta.config.resolve import resolve
from aorta.config.schema import Naming, Profiling
from tests.profiling.windows import FLAGS, preset

STATED = {
    "aorta": ("tensorboard", "none", (1, 1, 2, 1), (True, True, False, False)),
    "d9d": ("mesh", "tar.gz", (None, 5, 3, 0), (True, False, True, False)),
    "tutorial": ("rank_iter", "none", (10, 5, 3, 1), (True, False, True, False)),
    "composer": ("template", "none", (0, 1, 4, 1), (False, True, False, True)),
}


def rules(several=1, **settings):
    option = settings.pop("option", "aorta")
    return list(profiling_rules(preset(option, **settings), several))


@pytest.mark.parametrize("option", STATED)
@pytest.mark.spec("D9", "F1", "F4")
def test_presets_carry_names_schedule_and_flags(composed, option):
    settings = resolve(composed(f"profiling={option}")).config.profiling
    naming, compression, schedule, flags = STATED[option]
    assert (settings.enabled, settings.naming, settings.compression) == (False, Naming[naming], compression)
    assert (settings.wait, settings.warmup, settings.active, settings.repeat) == schedule
    assert (settings.record_shapes, settings.profile_memory, settings.with_stack, settings.with_flops) == flags


@pytest.mark.spec("D9")
def test_the_older_keys_have_their_defaults():
    base = Profiling()
    assert (base.tensorboard, base.chrome_trace, base.trace_filename) == (True, False, "trace.json")


@pytest.mark.spec("F1")
def test_naming_and_compression_are_independent():
    for naming in Naming:
        for compression in ("none", "gz", "tar.gz"):
            assert rules(naming=naming, compression=compression) == []
    assert rules(compression="zip") == ["profiling.compression='zip': one of none, gz, tar.gz"]


@pytest.mark.spec("A3")
def test_a_period_that_does_not_fit_ends_before_step_0(door):
    for option in ("d9d", "aorta"):
        answer = door(f"profiling={option}", "profiling.period=2", "profiling.warmup=2", "profiling.active=1")
        assert (answer.code, answer.jobs) == (1, [])
        assert all(word in answer.err for word in ("profiling.period=2", "profiling.warmup=2", "profiling.active=1"))


def test_a_period_as_long_as_its_cycle_has_no_step_to_wait():
    assert rules(period=4, wait=None, warmup=1, active=3) == []
    assert rules(period=3, wait=None, warmup=1, active=3) != []


@pytest.mark.spec("F3")
def test_period_and_wait_that_disagree_are_an_error():
    (rule,) = rules(period=10)
    assert rule.startswith("profiling.period=10: disagrees with profiling.wait=1 + ")
    assert rules(period=4) == rules(period=10, wait=7) == rules(period=10, wait=None) == []
    assert rules(wait=None) == ["profiling.period=None, profiling.wait=None: give one of them"]


@pytest.mark.spec("F5")
def test_a_run_shorter_than_a_cycle_is_told(composed):
    words = ("profiling.enabled=true", "profiling=tutorial")
    (note,) = resolve(composed(*words, "training.max_steps=17")).notes
    assert "a cycle takes 18 steps (wait 10 + warmup 5 + active 3)" in note
    assert resolve(composed(*words, "training.max_steps=18")).notes == ()
    profiling = preset("tutorial", skip_first=4)
    assert "skip_first=4" in next(profiling_notes(profiling, 20, 1))


@pytest.mark.parametrize(
    ("word", "ranks"),
    [('profiling.ranks="0, 2"', "0, 2"), ("profiling.ranks=[0,2]", [0, 2]), ("profiling.ranks=0", 0)],
)
@pytest.mark.spec("B2")
def test_ranks_on_the_command_line(door, word, ranks):
    assert door(word).job.config.profiling.ranks == ranks


@pytest.mark.spec("B2")
def test_a_bare_list_is_hydra_s_sweep(door):
    answer = door("profiling.ranks=0,2")
    assert answer.code == 1
    assert "multirun" in answer.err


@pytest.mark.spec("E14")
def test_names_that_ranks_would_share_are_refused():
    template = {"option": "composer", "several": 2}
    for filename in ("x.json", "{local_rank}.json", "{batch}.json"):
        (rule,) = rules(**template, filename=filename)
        assert rule.startswith(f"profiling.filename={filename!r}: several ranks would write the same file")
    assert rules(**template, filename="x.json", ranks="0") == []
    assert rules(option="composer", filename="x.json") == []
    assert rules(**template, filename="{local_rank}.json", folder="{node_rank}") == []
    (rule,) = rules(**template, remote_root="memory://x", remote_file_name="x.json")
    assert "several ranks would upload to the same name" in rule
    assert rules(several=2, remote_root="memory://x") == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_traces_to_keep": -2}, r"num_traces_to_keep=-2: must be -1 \(all\) or more"),
        ({"num_traces_to_keep": 0}, "num_traces_to_keep=0: every trace would be lost; set profiling.remote_root"),
        ({"num_traces_to_keep": 0, "remote_root": "s3://x", "remote_file_name": None}, "every trace would be lost"),
        (
            {"num_traces_to_keep": 0, "remote_root": "memory://x"},
            "num_traces_to_keep=0: profiling.remote_file_name goes to memory://x, which ends with this process",
        ),
        ({"num_traces_to_keep": 2, "remote_root": "simplecache::memory://x"}, "is the only copy that stays"),
        ({"num_traces_to_keep": 0, "remote_file_name": "memory://x/{rank}.json"}, "is the only copy that stays"),
    ],
)
@pytest.mark.spec("E15")
def test_keeping_nothing_needs_an_upload(settings, said):
    (rule,) = rules(**settings)
    assert re.search(said, rule)
    assert rules(num_traces_to_keep=0, remote_root="s3://x") == []
    assert rules(num_traces_to_keep=-1, remote_root="memory://x") == []


@pytest.mark.parametrize("off", ["with_stack", "record_shapes", "profile_memory"])
@pytest.mark.spec("E17")
def test_a_memory_timeline_needs_three_flags_and_html(off):
    (rule,) = rules(memory_filename="m{rank}.html", **FLAGS | {off: False})
    assert all(f"profiling.{name}" in rule for name in FLAGS)
    assert rules(memory_filename="m{rank}.html", **FLAGS) == []
    (rule,) = rules(memory_filename="m.json", **FLAGS)
    assert "must end in .html" in rule


@pytest.mark.spec("E10")
def test_gzip_and_tar_disagree():
    assert rules(option="composer", use_gzip=True) == []
    (rule,) = rules(option="composer", use_gzip=True, compression="tar.gz")
    assert "use_gzip=true: disagrees" in rule


@pytest.mark.spec("D12")
def test_a_chrome_trace_of_its_own_belongs_to_tensorboard_names():
    (rule,) = rules(option="tutorial", chrome_trace=True)
    assert "naming=rank_iter writes one Chrome trace already" in rule


@pytest.mark.spec("E11")
def test_an_address_with_a_password_is_refused_without_showing_it():
    for address in ("sftp://me:hunter2@host/x/", "simplecache::memory://me:hunter2@h/", "https://h/x?sig=hunter2&n="):
        for key in ("remote_root", "remote_file_name"):
            (rule,) = rules(**{key: address + "{rank}"})
            assert rule.startswith(f"profiling.{key}: holds a password")
            assert "hunter2" not in rule


def test_files_stay_in_the_trace_folder():
    for name in ("/tmp/x{rank}.json", "../x{rank}.json"):
        assert rules(option="composer", filename=name) == [f"profiling.filename={name!r}: must stay inside its folder"]
    for name in ("/tmp/x{rank}.html", "a/../../x{rank}.html"):
        assert rules(memory_filename=name, **FLAGS) == [
            f"profiling.memory_filename={name!r}: must stay inside its folder"
        ]
    assert rules(option="composer", filename="a/x{rank}.json", folder="/scratch/{run_name}") == []
    assert rules(remote_root="s3://b", remote_file_name="/x{rank}.json") == []  # an address, not a file
