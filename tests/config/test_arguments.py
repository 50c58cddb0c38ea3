"""Words of the older command line, and what Hydra gets to see (D50-D54). Files: `command_lines.json`."""

from __future__ import annotations

import pytest

from aorta.config.override_words import translate
from aorta.errors import ConfigError
from tests.config.conftest import ROOT

DIR, NAME = "training.output_dir", "profiling.trace_filename"


@pytest.mark.parametrize(
    ("words", "hydra"),
    [
        ([], []),
        (["--cfg", "job", "-m", "~x", "+a=1"], ["--cfg", "job", "-m", "~x", "+a=1"]),
        (["--enable-rocm-metrics"], ["telemetry.rocm_smi=true"]),
        # A section switched on by its own name; the section as a whole is Hydra's.
        (["-m", "baseline=true,false"], ["-m", "baseline.enabled=true,false"]),
        (["baseline.steps=5", "baseline={enabled: true}"], ["baseline.steps=5", "baseline={enabled: true}"]),
        (
            ["workload.batch_size=4", "--override", "baseline=false"],
            ["training.batch_size=4", "baseline.enabled=false"],
        ),
        (["--override", "a=1", "b=", "--override=c=3"], ["a=1", "b=", "c=3"]),
        (["a=1", "--override", "b=2", "--cfg", "job", "c=3"], ["--cfg", "job", "a=1", "b=2", "c=3"]),
        (["label=x", "--override", "a=1", "--enable-rocm-metrics"], ["label=x", "a=1", "telemetry.rocm_smi=true"]),
        # Values that Hydra's grammar takes are left as they are ...
        (["--override", "a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"'], ["a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"']),
        (["--override", f"{DIR}=two words", "a=${oc.env:HOME}"], [f"{DIR}=two words", "a=${oc.env:HOME}"]),
        # ... the others are quoted (D54)
        ([f"--override={DIR}=a=b=c"], [f"{DIR}='a=b=c'"]),
        (["--override", f"{NAME}={{rank}}.json", f"{DIR}=it's"], [f"{NAME}='{{rank}}.json'", rf"{DIR}='it\'s'"]),
        (["--override", f"{DIR}=a=\\"], [f"{DIR}='a=\\\\'"]),
        # ... but a slip in quotes or in a list is not hidden
        (["--override", "a='x", "b=[1"], ["a='x", "b=[1"]),
        (["-m", "a=choice(1,2", "~b"], ["-m", "a=choice(1,2", "~b"]),
        # native words, too
        ([f"{DIR}=a=b", f"+{NAME}={{rank}}.json"], [f"{DIR}='a=b'", f"+{NAME}='{{rank}}.json'"]),
    ],
)
def test_words(words, hydra, tmp_path):
    assert translate(words, tmp_path, ROOT) == hydra


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # What Hydra's parser would take seconds for, or more than Python's stack
        (["+extra=1"] * 5_001, r"5001 arguments; at most 5000 are read"),
        (["--override=a=" + "1," * 5_000], r"an argument of 100\d\d characters; at most 10000 are read"),
        (["training.max_steps=" + "[" * 4_900 + "]" * 4_900], r"training\.max_steps: its value is nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_much_is_not_read(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        translate(words, tmp_path, ROOT)
