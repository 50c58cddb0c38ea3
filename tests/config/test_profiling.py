"""The profiling group on the command line: presets, quoting, and what is refused before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import aorta
from aorta.config.profiling import profiling_rules
from aorta.config.schema import Naming
from aorta.errors import ConfigError
from tests.profiling.windows import preset

PACKINGS = ("none", "gz", "tar.gz")
SETTINGS = json.loads((Path(__file__).parent / "profiling_settings.json").read_text())
"""Settings of the profiling group (`option` of it, `several` ranks), and what is said where they are refused."""
SETTINGS += [{"settings": {"naming": naming, "compression": packing}} for naming in Naming for packing in PACKINGS]


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
