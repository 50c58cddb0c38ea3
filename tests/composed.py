"""The configuration of some arguments of `train.py`, composed by Hydra once for each choice of options.

Composing takes Hydra 0.15 s, and tests ask for many configurations of few choices. What sets a key is then set as Hydra
sets it. Must not: import torch.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from aorta.config import CONFIG_DIR
from aorta.config.schema import GROUPS, register


@cache
def _chosen(*choices: str) -> DictConfig:
    """The default configuration with these options of groups."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("default", list(choices))


def composed(*words: str) -> DictConfig:
    """The default configuration with these arguments: options of groups and values of keys, without `+` or `~`."""
    choices = [word for word in words if word.partition("=")[0] in {*GROUPS, "experiment"}]
    config = deepcopy(_chosen(*choices))
    for word in OverridesParser.create().parse_overrides([word for word in words if word not in choices]):
        OmegaConf.update(config, word.key_or_group, word.value())
    return config
