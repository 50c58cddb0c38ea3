"""`docs/configuration.md` says what the schema says, and the files in `config/` hold what differs from the schema."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from aorta.config.schema import GROUPS, NAMES, Config
from scripts.config_reference import entries, reference
from tests.config.conftest import ROOT

SECTIONS = {name: node for name, node in get_type_hints(Config).items() if dataclasses.is_dataclass(node)}
OPTIONS = [(f"{group}={option}", group, node) for group, options in GROUPS.items() for option, node in options.items()]
DEFAULTS = {"workload": "ranking", "parallel": "ddp", "profiling": "aorta", "fabric": "none", "telemetry": "default"}
NODES = [
    ("root", Config),
    *((name, node) for name, node in SECTIONS.items() if name not in GROUPS),
    *((word, node) for word, _, node in OPTIONS),
]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m scripts.config_reference > docs/configuration.md"


@pytest.mark.parametrize(("where", "node"), NODES, ids=[where for where, _ in NODES])
def test_every_key_has_a_comment(where, node):
    silent = [entry.name for entry in entries(node) if entry.kind and not entry.meaning]
    assert silent == [], f"{node.__name__} in {node.__module__}: a comment above the field is its documentation"


def test_every_key_has_one_row_of_the_page():
    page = (ROOT / "docs/configuration.md").read_text()
    for name in SECTIONS:
        for node in GROUPS.get(name, {"": SECTIONS[name]}).values():
            for key in (f"{name}.{field.name}" for field in dataclasses.fields(node)):
                assert page.count(f"| `{key}` |") == (key not in NAMES), key


def plain(node):
    return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)


def test_options_and_sections_have_the_schema_s_values(composed):
    own = OmegaConf.to_container(composed(), enum_to_str=True)
    assert own == plain(Config) | {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}
    differing = {
        word: found
        for word, group, node in OPTIONS
        if (found := OmegaConf.to_container(composed(word)[group], enum_to_str=True)) != plain(node)
    }
    assert differing == {}


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_states_only_what_differs_from_the_schema(path):
    def leaves(node, above=""):
        for name, value in node.items():
            yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]

    stated = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    values = OmegaConf.create(
        plain(Config) | {group: plain(GROUPS[group][option]) for group, option in DEFAULTS.items()}
    )
    given = {key: value for key, value in leaves(stated) if not key.startswith(("defaults", "hydra"))}
    assert [key for key, value in given.items() if OmegaConf.select(values, key) == value] == []
