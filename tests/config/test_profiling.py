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

PACKINGS = ("none", "gz", "tar.gz")
SETTINGS = json.loads((Path(__file__).parent / "profiling_settings.json").read_text())
"""Settings of the profiling group (`option` of it, `several` ranks), and what is said where they are refused."""
SETTINGS += [{"settings": {"naming": naming, "compression": packing}} for naming in Naming for packing in PACKINGS]


@pytest.mark.parametrize(
    ("option", "naming", "compression", "schedule", "flags"),
    [
        ("aorta", "tensorboard", "none", (1, 1, 2, 1), (True, True, False, False)),
        ("d9d", "mesh", "tar.gz", (None, 5, 3, 0), (True, False, True, False)),
        ("tutorial", "rank_iter", "none", (10, 5, 3, 1), (True, False, True, False)),
        ("composer", "template", "none", (0, 1, 4, 1), (False, True, False, True)),
    ],
)
@pytest.mark.spec("D9", "F1", "F4")
def test_presets_carry_names_schedule_and_flags(composed, option, naming, compression, schedule, flags):
    settings = resolve(composed(f"profiling={option}")).config.profiling
    assert (settings.enabled, settings.naming, settings.compression) == (False, Naming[naming], compression)
    assert (settings.wait, settings.warmup, settings.active, settings.repeat) == schedule
    assert (settings.record_shapes, settings.profile_memory, settings.with_stack, settings.with_flops) == flags
    assert (settings.tensorboard, settings.chrome_trace, settings.trace_filename) == (True, False, "trace.json")


@pytest.mark.spec("F5")
def test_a_run_shorter_than_a_cycle_is_told(composed):
    words = ("profiling.enabled=true", "profiling=tutorial")
    (note,) = resolve(composed(*words, "training.max_steps=17")).notes
    assert "a cycle takes 18 steps (wait 10 + warmup 5 + active 3)" in note
    assert resolve(composed(*words, "training.max_steps=18")).notes == ()
    assert "skip_first=4" in next(profiling_notes(preset("tutorial", skip_first=4), 20, 1))


@pytest.mark.parametrize(
    ("word", "ranks"), [('profiling.ranks="0, 2"', "0, 2"), ("profiling.ranks=[0,2]", [0, 2]), ("profiling.ranks=0", 0)]
)
@pytest.mark.spec("B2")
def test_ranks_on_the_command_line(door, word, ranks):
    assert door(word).job.config.profiling.ranks == ranks


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: str(case["settings"]))
@pytest.mark.spec("D12", "E10", "E11", "E14", "E15", "E17", "F1", "F3")
def test_what_cannot_be_profiled_so_is_refused(case):
    settings = {"option": "aorta", "several": 1} | case["settings"]
    option, several = settings.pop("option"), settings.pop("several")
    broken = list(profiling_rules(preset(option, **settings), several))
    assert len(broken) == ("says" in case)
    assert case.get("says", "") in "".join(broken)
    assert "hunter2" not in "".join(broken)


def test_removed_keys_say_what_does_it_now(door, tmp_path):
    said = "oom_snapshot: use torch.cuda.memory._record_memory_history()"
    answer = door("profiling.oom_snapshot=true")
    assert (answer.code, said in answer.err) == (1, True)
    with pytest.raises(ConfigError, match=re.escape(said)):
        aorta.Profiler(tmp_path, 4, 1, 1, None, oom_snapshot=True)
