"""Configuration: typed schema, command-line overrides, rules between fields. No torch, no pandas."""

from pathlib import Path
from typing import Final

CONFIG_DIR: Final = (Path(__file__).parent / "yaml").resolve()
"""The YAML files: `config/` of a checkout, to which `yaml` is a link there, and a copy of it in an installed package."""
