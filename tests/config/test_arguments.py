"""Words of the older command line, and what Hydra gets to see (D50-D55)."""

from __future__ import annotations

import pytest

from aorta.config.override_words import DEAD, REFUSED_VALUES, RENAMED, RETRANSLATED, translate
from aorta.config.schema import GROUPS
from aorta.errors import ConfigError


@pytest.fixture
def places(tmp_path):
    """The caller's folder and the repository, each with configuration files."""
    caller, root = tmp_path / "caller", tmp_path / "repository"
    for path in (
        caller / "mine.yaml",
        caller / "deep" / "my.own.yml",
        caller / "old.toml",
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
        (["--config", "old.toml"], r"--config old\.toml: only YAML is read \(\.yaml\), not \.toml"),
        (["--config"], r"--config needs the path of a YAML file"),
        (["--override"], r"--override needs at least one KEY=VALUE"),
        (["--override", "--cfg", "job"], r"--override needs at least one KEY=VALUE"),
        (["--override", "label"], r"--override label: expected KEY=VALUE"),
    ],
)
def test_words_that_cannot_be_meant(words, message, places):
    with pytest.raises(ConfigError, match=message):
        translate(words, *places)


def spellings(word):
    return [[word], ["--override", word], [f"--override={word}"], [f"+{word}"]]


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=RENAMED)
def test_a_renamed_key(old, new, places):
    for words in spellings(f"{old}=7"):
        assert translate(words, *places) == [f"{new}=7"]
    group, _, name = new.partition(".")
    assert not name or any(name in node.__dataclass_fields__ for node in GROUPS[group].values())


RESPELT = [(key, old, new) for key, values in RETRANSLATED.items() for old, new in values.items()]


@pytest.mark.parametrize(("key", "old", "new"), RESPELT, ids=[f"{key}={old}" for key, old, _ in RESPELT])
def test_a_key_whose_values_are_spelt_differently_today(key, old, new, places):
    for word in (f"{key}={old}", f"{key}={old.upper()}", f"{key}='{old}'"):
        for words in spellings(word):
            assert translate(words, *places) == [new]


@pytest.mark.parametrize("word", REFUSED_VALUES)
def test_a_value_that_is_offered_no_more_is_refused_with_what_to_do(word, places):
    for words in spellings(word):
        with pytest.raises(ConfigError) as refused:
            translate(words, *places)
        assert REFUSED_VALUES[word] in str(refused.value)
        assert word in str(refused.value)


def test_an_unknown_value_of_an_older_key_lists_the_known_ones(places):
    with pytest.raises(ConfigError, match=r"fsdp\.forward_prefetch=7: '7' is not one of true, false"):
        translate(["fsdp.forward_prefetch=7"], *places)


@pytest.mark.parametrize("key", DEAD)
def test_a_key_without_a_meaning_is_refused_by_name_with_the_reason(key, places):
    for words in [*spellings(f"{key}=1"), [f"~{key}"]]:
        with pytest.raises(ConfigError) as refused:
            translate(words, *places)
        assert f"{key} is a key of the older configuration" in str(refused.value)
        assert DEAD[key] in str(refused.value)


@pytest.mark.parametrize("word", ["training.max_steps=" + "[" * 10_000, "--override=a=" + "1," * 5_000])
def test_what_the_parser_would_take_seconds_for_is_refused(word, places):
    with pytest.raises(ConfigError, match=r"an argument of 100\d\d characters; at most 10000 are read"):
        translate([word], *places)


def test_a_value_that_nests_too_deeply_is_refused(places):
    with pytest.raises(ConfigError, match=r"training\.max_steps: its value is nested too deeply"):
        translate(["--override", "training.max_steps=" + "[" * 4_900 + "]" * 4_900], *places)
