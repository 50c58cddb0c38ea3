"""The profiling group on the command line: presets, quoting, and what is refused before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import aorta
from aorta.config.profiling import profiling_notes, profiling_rules
from aorta.config.resolve import resolve
from aorta.config.schema import Naming
from aorta.errors import ConfigError
from tests.profiling.windows import preset

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


SETTINGS = json.loads((Path(__file__).parent / "profiling_settings.json").read_text())
"""Settings of the profiling group (`option` of it, `several` ranks), and what is said where they are refused."""


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: str(case["settings"]))
@pytest.mark.spec("D12", "E10", "E11", "E14", "E15", "E17", "F1", "F3")
def test_what_cannot_be_profiled_so_is_refused(case):
    broken = rules(**case["settings"])
    assert len(broken) == ("says" in case)
    assert case.get("says", "") in "".join(broken)
    assert "hunter2" not in "".join(broken)


@pytest.mark.parametrize("compression", ["none", "gz", "tar.gz"])
@pytest.mark.parametrize("naming", Naming)
@pytest.mark.spec("F3")
def test_every_naming_goes_with_every_packing(naming, compression):
    assert rules(naming=naming, compression=compression) == []


def test_removed_keys_say_what_does_it_now(door, tmp_path):
    said = "oom_snapshot: use torch.cuda.memory._record_memory_history()"
    answer = door("profiling.oom_snapshot=true")
    assert (answer.code, said in answer.err) == (1, True)
    with pytest.raises(ConfigError, match=re.escape(said)):
        aorta.Profiler(tmp_path, 4, 1, 1, None, oom_snapshot=True)
