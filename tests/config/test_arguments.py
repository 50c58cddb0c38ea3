"""Words of the older command line, and what Hydra gets to see (D50-D55)."""

from __future__ import annotations

import pytest

from aorta.config.override_words import translate
from aorta.errors import ConfigError


@pytest.fixture
def places(tmp_path):
    """The caller's folder and the repository, each with configuration files."""
    caller, root = tmp_path / "caller", tmp_path / "repository"
    for path in (caller / "mine.yaml", caller / "deep/my.own.yml", caller / "old.json", root / "config/default.yaml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return caller, root


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
        (["--override=a=1", "b=2"], ["a=1", "b=2"]),
        (["--override", "a=1", "b=2", "--override", "c=3"], ["a=1", "b=2", "c=3"]),
        (["a=1", "--override", "b=2", "--cfg", "job", "c=3"], ["--cfg", "job", "a=1", "b=2", "c=3"]),
        (["label=x", "--override", "a=1", "--enable-rocm-metrics"], ["label=x", "a=1", "telemetry.rocm_smi=true"]),
        # Values that Hydra's grammar takes are left as they are ...
        (["--override", "a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"'], ["a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"']),
        (["--override", f"{DIR}=two words", "a=${oc.env:HOME}"], [f"{DIR}=two words", "a=${oc.env:HOME}"]),
        (["--override", "a=", "b=null"], ["a=", "b=null"]),
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
def test_words(words, hydra, places):
    assert translate(words, *places) == hydra


@pytest.mark.parametrize("spelling", [["--config", "{}"], ["--config={}"]], ids=["blank", "equals"])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mine.yaml", ["--config-dir={caller}", "--config-name={caller}/mine.yaml"]),
        ("./deep/../mine.yaml", ["--config-dir={caller}", "--config-name={caller}/mine.yaml"]),
        ("deep/my.own.yml", ["--config-dir={caller}/deep", "--config-name={caller}/deep/my.own.yml"]),
        ("{caller}/mine.yaml", ["--config-dir={caller}", "--config-name={caller}/mine.yaml"]),
        ("config/default.yaml", ["--config-name=default"]),
        ("../repository/config/default.yaml", ["--config-name=default"]),
    ],
)
def test_config_names_a_file_of_the_caller_first_then_of_the_repository(spelling, name, found, places):
    words = [part.format(name.format(caller=places[0])) for part in spelling]
    assert translate(words, *places) == [word.format(caller=places[0]) for word in found]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "gone.yaml"], r"gone\.yaml: no such file; looked at .*caller/gone\.yaml and .*repository/g"),
        (["--config", "deep"], r"--config deep: no such file"),
        (["--config="], r"--config : no such file"),
        (["--config", "/gone.yaml"], r"--config /gone\.yaml: no such file; looked at /gone\.yaml$"),
        (["--config", "old.json"], r"--config old\.json: only YAML is read \(\.yaml\), not \.json"),
        (["--config"], r"--config needs the path of a YAML file"),
        (["--override", "--cfg", "job"], r"--override needs at least one KEY=VALUE"),
        (["--override", "label"], r"--override label: expected KEY=VALUE"),
        # What Hydra's parser would take seconds for, or more than Python's stack
        (["+extra=1"] * 5_001, r"5001 arguments; at most 5000 are read"),
        (["--override=a=" + "1," * 5_000], r"an argument of 100\d\d characters; at most 10000 are read"),
        (["training.max_steps=" + "[" * 4_900 + "]" * 4_900], r"training\.max_steps: its value is nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.spec("D55")
def test_words_that_cannot_be_meant(words, message, places):
    with pytest.raises(ConfigError, match=message):
        translate(words, *places)
