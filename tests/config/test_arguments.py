"""Words of the older command line, and what Hydra gets to see (D50-D55)."""

from __future__ import annotations

import pytest

from aorta.config.override_words import translate
from aorta.errors import ConfigError


@pytest.fixture
def places(tmp_path):
    """The caller's folder and the repository, each with configuration files."""
    caller, root = tmp_path / "caller", tmp_path / "repository"
    for path in (
        caller / "mine.yaml",
        caller / "deep" / "my.own.yml",
        caller / "old.json",
        root / "config/default.yaml",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return caller, root


def quoted(key, value):
    return f"{key}='{value}'"


DIR, NAME = "training.output_dir", "profiling.trace_filename"


@pytest.mark.parametrize(
    ("words", "hydra"),
    [
        ([], []),
        (["profiling.enabled=true"], ["profiling.enabled=true"]),
        (["--help"], ["--help"]),
        (["--cfg", "job", "-m", "~x", "+a=1"], ["--cfg", "job", "-m", "~x", "+a=1"]),
        (["--enable-rocm-metrics"], ["telemetry.rocm_smi=true"]),
        # A section switched on by its own name; the section as a whole is Hydra's.
        (["baseline=true"], ["baseline.enabled=true"]),
        (["--override", "baseline=false"], ["baseline.enabled=false"]),
        (["-m", "baseline=true,false"], ["-m", "baseline.enabled=true,false"]),
        (["baseline.steps=5", "baseline={enabled: true}"], ["baseline.steps=5", "baseline={enabled: true}"]),
        (
            ["workload.batch_size=4", "--override", "workload.batch_size=2"],
            ["training.batch_size=4", "training.batch_size=2"],
        ),
        (["--override", "a=1"], ["a=1"]),
        (["--override=a=1"], ["a=1"]),
        (["--override=a=1", "b=2"], ["a=1", "b=2"]),
        (["--override", "a=1", "b=2", "--override", "c=3"], ["a=1", "b=2", "c=3"]),
        (["--override", "a=1", "--cfg", "job"], ["--cfg", "job", "a=1"]),
        (["a=1", "--override", "b=2", "--cfg", "job", "c=3"], ["--cfg", "job", "a=1", "b=2", "c=3"]),
        (["--override", "a=1", "-m"], ["-m", "a=1"]),
        (["label=x", "--override", "a=1", "--enable-rocm-metrics"], ["label=x", "a=1", "telemetry.rocm_smi=true"]),
        # Values that Hydra's grammar takes are left as they are ...
        (["--override", "a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"'], ["a=[1, 2]", "b={c: 1}", "c='x=y'", 'd="x=y"']),
        (["--override", f"{DIR}=two words", "a=${oc.env:HOME}"], [f"{DIR}=two words", "a=${oc.env:HOME}"]),
        (["--override", "a=", "b=null"], ["a=", "b=null"]),
        # ... the others are quoted (D54)
        (["--override", f"{DIR}=a=b"], [quoted(DIR, "a=b")]),
        ([f"--override={DIR}=a=b=c"], [quoted(DIR, "a=b=c")]),
        (["--override", f"{NAME}=rank{{rank}}.json"], [quoted(NAME, "rank{rank}.json")]),
        (["--override", f"{NAME}={{rank}}.json"], [quoted(NAME, "{rank}.json")]),
        (["--override", f"{DIR}=it's"], [quoted(DIR, r"it\'s")]),
        (["--override", f"{DIR}=a=\\"], [quoted(DIR, "a=\\\\")]),
        # ... but a slip in quotes or in a list is not hidden
        (["--override", "a='x", "b=[1"], ["a='x", "b=[1"]),
        (["-m", "a=choice(1,2", "~b"], ["-m", "a=choice(1,2", "~b"]),
        # native words, too
        ([f"{DIR}=a=b", f"+{NAME}={{rank}}.json"], [quoted(DIR, "a=b"), quoted(f"+{NAME}", "{rank}.json")]),
    ],
)
def test_words(words, hydra, places):
    assert translate(words, *places) == hydra


@pytest.mark.parametrize("spelling", [["--config", "{}"], ["--config={}"]], ids=["blank", "equals"])
def test_config_names_a_file_of_the_caller_first_then_of_the_repository(spelling, places):
    caller, root = places

    def translated(name):
        return translate([part.format(name) for part in spelling], caller, root)

    assert translated("mine.yaml") == [f"--config-dir={caller}", f"--config-name={caller}/mine.yaml"]
    assert translated("./deep/../mine.yaml") == translated("mine.yaml")
    assert translated("deep/my.own.yml") == [f"--config-dir={caller}/deep", f"--config-name={caller}/deep/my.own.yml"]
    assert translated(f"{caller}/mine.yaml") == translated("mine.yaml")
    assert translated("config/default.yaml") == ["--config-name=default"]
    assert translated(f"{root}/config/default.yaml") == ["--config-name=default"]
    assert translated("../repository/config/default.yaml") == ["--config-name=default"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--config", "gone.yaml"],
            r"--config gone\.yaml: no such file; looked at .*caller/gone\.yaml and .*repository/g",
        ),
        (["--config", "deep"], r"--config deep: no such file"),
        (["--config="], r"--config : no such file"),
        (["--config", "/gone.yaml"], r"--config /gone\.yaml: no such file; looked at /gone\.yaml$"),
        (["--config", "old.json"], r"--config old\.json: only YAML is read \(\.yaml\), not \.json"),
        (["--config"], r"--config needs the path of a YAML file"),
        (["--override"], r"--override needs at least one KEY=VALUE"),
        (["--override", "--cfg", "job"], r"--override needs at least one KEY=VALUE"),
        (["--override", "label"], r"--override label: expected KEY=VALUE"),
    ],
)
@pytest.mark.spec("D55")
def test_words_that_cannot_be_meant(words, message, places):
    with pytest.raises(ConfigError, match=message):
        translate(words, *places)


def test_more_arguments_than_anybody_means_are_refused(places):
    with pytest.raises(ConfigError, match=r"5001 arguments; at most 5000 are read"):
        translate(["+extra=1"] * 5_001, *places)


@pytest.mark.parametrize("word", ["training.max_steps=" + "[" * 10_000, "--override=a=" + "1," * 5_000])
def test_what_the_parser_would_take_seconds_for_is_refused(word, places):
    with pytest.raises(ConfigError, match=r"an argument of 100\d\d characters; at most 10000 are read"):
        translate([word], *places)


def test_a_value_that_nests_too_deeply_is_refused(places):
    with pytest.raises(ConfigError, match=r"training\.max_steps: its value is nested too deeply"):
        translate(["--override", "training.max_steps=" + "[" * 4_900 + "]" * 4_900], *places)
