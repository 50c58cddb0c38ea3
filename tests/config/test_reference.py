"""`docs/configuration.md` says what the schema says, and the files in `config/` hold what the schema holds."""

from __future__ import annotations

import dataclasses
import re
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from aorta.config.reference import entries, reference
from aorta.config.schema import GROUPS, NAMES, Config
from tests.config.conftest import ROOT

SECTIONS = {name: node for name, node in get_type_hints(Config).items() if dataclasses.is_dataclass(node)}
OPTIONS = [(f"{group}={option}", group, node) for group, options in GROUPS.items() for option, node in options.items()]
NODES = [
    ("root", Config),
    *((name, node) for name, node in SECTIONS.items() if name not in GROUPS),
    *((word, node) for word, _, node in OPTIONS),
]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m aorta.config.reference > docs/configuration.md"


@pytest.mark.parametrize(("where", "node"), NODES, ids=[where for where, _ in NODES])
def test_every_key_has_a_comment(where, node):
    silent = [entry.name for entry in entries(node) if entry.kind and not entry.meaning]
    assert silent == [], f"{node.__name__} in {node.__module__}: a comment above the field is its documentation"


def test_every_key_is_on_the_page():
    page = (ROOT / "docs/configuration.md").read_text()
    for name in SECTIONS:
        for node in GROUPS.get(name, {"": SECTIONS[name]}).values():
            for key in (f"{name}.{field.name}" for field in dataclasses.fields(node)):
                assert (f"| `{key}` |" in page) is (key not in NAMES), key


def plain(node):
    return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)


def test_an_option_s_file_holds_the_schema_s_values(composed):
    differing = {
        word: (found, plain(node))
        for word, group, node in OPTIONS
        if group != "profiling"
        and (found := OmegaConf.to_container(composed(word)[group], enum_to_str=True)) != plain(node)
    }
    assert differing == {}


def test_a_profiling_preset_states_what_differs_from_the_schema_and_nothing_else(composed):
    for option, node in GROUPS["profiling"].items():
        stated = OmegaConf.to_container(OmegaConf.load(ROOT / f"config/profiling/{option}.yaml"))
        assert stated.pop("defaults") == [f"base_{option}", "_self_"]
        repeated = {key: value for key, value in stated.items() if plain(node)[key] == value}
        assert repeated == {}, f"config/profiling/{option}.yaml: the schema has these values"
        found = OmegaConf.to_container(composed(f"profiling={option}").profiling, enum_to_str=True)
        assert found == plain(node) | stated


def test_the_root_file_holds_the_schema_s_values(composed):
    own = OmegaConf.to_container(composed(), enum_to_str=True)
    expected = plain(Config)
    for group in GROUPS:
        del own[group], expected[group]
    assert own == expected


def test_the_root_file_spells_every_value_out():
    spelt = OmegaConf.load(ROOT / "config/default.yaml")
    for name, node in SECTIONS.items():
        if name not in GROUPS:
            assert set(spelt[name]) == {entry.name for entry in entries(node)}


def test_a_key_is_explained_once():
    page = (ROOT / "docs/configuration.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| `\w+\.\w+` \|", line)]
    told = [(key, kind, meaning) for key, kind, _, meaning in (row for row in rows if len(row) == 4)]
    assert len(told) > 100
    assert len(told) == len(set(told))
