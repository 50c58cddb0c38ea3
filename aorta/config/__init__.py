"""Configuration: typed schema, command-line overrides, rules between fields. No torch, no pandas."""

from pathlib import Path
from typing import Final

CONFIG_DIR: Final = (Path(__file__).parent / "yaml").resolve()
"""The YAML files. In a checkout `yaml` is a link to its `config/`, in an installed package a copy."""
