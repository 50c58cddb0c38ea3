"""The profiling group on the command line: presets, quoting, and what is refused before anything starts."""

from __future__ import annotations

import re

import pytest

import aorta
from aorta.config.profiling import profiling_notes, profiling_rules
from aorta.config.resolve import resolve
from aorta.config.schema import Naming
from aorta.errors import ConfigError
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
    assert (settings.tensorboard, settings.chrome_trace, settings.trace_filename) == (True, False, "trace.json")


@pytest.mark.spec("A3")
def test_a_period_that_does_not_fit_ends_before_step_0(door):
    for option in ("d9d", "aorta"):
        answer = door(f"profiling={option}", "profiling.period=2", "profiling.warmup=2", "profiling.active=1")
        assert (answer.code, answer.jobs) == (1, [])
        assert all(word in answer.err for word in ("profiling.period=2", "profiling.warmup=2", "profiling.active=1"))


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
def test_a_bare_list_has_to_be_quoted(door):
    answer = door("profiling.ranks=0,2")
    assert answer.code == 1
    assert "To use it as a list" in answer.err


TEMPLATE = {"option": "composer", "several": 2}
REFUSED = [
    ({"compression": "zip"}, "profiling.compression='zip': one of none, gz, tar.gz"),
    (
        {"period": 3, "wait": None, "warmup": 1, "active": 3},
        "profiling.period=3: must be at least profiling.warmup=1 + ",
    ),
    ({"period": 10}, "profiling.period=10: disagrees with profiling.wait=1 + "),
    ({"wait": None}, "profiling.period=None, profiling.wait=None: give one of them"),
    *(
        ({**TEMPLATE, "filename": name}, f"profiling.filename={name!r}: several ranks would write the same file")
        for name in ("x.json", "{local_rank}.json", "{batch}.json")
    ),
    ({**TEMPLATE, "remote_root": "memory://x", "remote_file_name": "x.json"}, "ranks would upload to the same name"),
    ({"num_traces_to_keep": -2}, "num_traces_to_keep=-2: must be -1 (all) or more"),
    ({"num_traces_to_keep": 0}, "num_traces_to_keep=0: every trace would be lost; set profiling.remote_root"),
    ({"num_traces_to_keep": 0, "remote_root": "s3://x", "remote_file_name": None}, "every trace would be lost"),
    (
        {"num_traces_to_keep": 0, "remote_root": "memory://x"},
        "num_traces_to_keep=0: profiling.remote_file_name goes to memory://x, which ends with this process",
    ),
    ({"num_traces_to_keep": 2, "remote_root": "simplecache::memory://x"}, "is the only copy that stays"),
    ({"num_traces_to_keep": 0, "remote_file_name": "memory://x/{rank}.json"}, "is the only copy that stays"),
    *(
        (
            {"memory_filename": "m{rank}.html", **FLAGS, off: False},
            "needs profiling.with_stack, profiling.record_shapes and profiling.profile_memory",
        )
        for off in FLAGS
    ),
    ({"memory_filename": "m.json", **FLAGS}, "must end in .html"),
    ({"option": "composer", "use_gzip": True, "compression": "tar.gz"}, "use_gzip=true: disagrees"),
    ({"option": "tutorial", "chrome_trace": True}, "naming=rank_iter writes one Chrome trace already"),
    *(
        ({"option": "composer", "filename": name}, f"profiling.filename={name!r}: must stay inside its folder")
        for name in ("/tmp/x{rank}.json", "../x{rank}.json")
    ),
    *(
        ({"memory_filename": name, **FLAGS}, f"profiling.memory_filename={name!r}: must stay inside its folder")
        for name in ("/tmp/x{rank}.html", "a/../../x{rank}.html")
    ),
    *(
        ({key: address + "{rank}"}, f"profiling.{key}: holds a password")
        for address in (
            "sftp://me:hunter2@host/x/",
            "simplecache::memory://me:hunter2@h/",
            "https://h/x?sig=hunter2&n=",
        )
        for key in ("remote_root", "remote_file_name")
    ),
    *(
        ({key: address + "{rank}.html", **FLAGS, "memory_filename": "m.html"}, f"profiling.{key}={address}")
        for address in ("reference::memory://x/", "zip://x::s3://b/", "github://x/")
        for key in ("remote_root", "remote_file_name", "memory_remote_file_name")
    ),
]
ALLOWED = [
    *({"naming": naming, "compression": packed} for naming in Naming for packed in ("none", "gz", "tar.gz")),
    {"period": 4, "wait": None, "warmup": 1, "active": 3},
    *({"period": 4}, {"period": 10, "wait": 7}, {"period": 10, "wait": None}),
    {**TEMPLATE, "filename": "x.json", "ranks": "0"},
    {"option": "composer", "filename": "x.json"},
    {**TEMPLATE, "filename": "{local_rank}.json", "folder": "{node_rank}"},
    {"several": 2, "remote_root": "memory://x"},
    {"num_traces_to_keep": 0, "remote_root": "s3://x"},
    {"num_traces_to_keep": -1, "remote_root": "memory://x"},
    {"memory_filename": "m{rank}.html", **FLAGS},
    {"option": "composer", "use_gzip": True},
    {"option": "composer", "filename": "a/x{rank}.json", "folder": "/scratch/{run_name}"},
    {"remote_root": "s3://b", "remote_file_name": "/x{rank}.json"},  # an address, not a file
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
@pytest.mark.spec("D12", "E10", "E11", "E14", "E15", "E17", "F1", "F3")
def test_what_cannot_be_profiled_so_is_refused(settings, said):
    (rule,) = rules(**settings)
    assert said in rule
    assert "hunter2" not in rule


@pytest.mark.parametrize("settings", ALLOWED)
@pytest.mark.spec("E10", "E14", "E15", "E17", "F1", "F3")
def test_what_can_be_profiled_so_is_allowed(settings):
    assert rules(**settings) == []


def test_removed_keys_say_what_does_it_now(door, tmp_path):
    said = "oom_snapshot: use torch.cuda.memory._record_memory_history()"
    answer = door("profiling.oom_snapshot=true")
    assert (answer.code, said in answer.err) == (1, True)
    with pytest.raises(ConfigError, match=re.escape(said)):
        aorta.Profiler(tmp_path, 4, 1, 1, None, oom_snapshot=True)
