"""Classes of ours as plugins of Hydra, without a package that Hydra would have to find.

Enters: a launcher or sweeper, the group and name that choose it, the schema of its settings. Must not: know any.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

PLUGIN_MODULE: Final = "hydra_plugins.aorta"
"""Hydra takes plugins from below `hydra_plugins` only; `register_plugin` makes this module in memory."""


def register_plugin(group: str, name: str, plugin: type[Any], schema: type[Any]) -> None:
    """Make `GROUP=NAME` choose a plugin of ours, whose `__module__` is `PLUGIN_MODULE`."""
    plugins = Plugins.instance()  # finds what is installed, before there is a module of ours to be found
    above, _, last = PLUGIN_MODULE.rpartition(".")
    try:
        parent = importlib.import_module(above)
    except ImportError:
        parent = sys.modules[above] = ModuleType(above)
        parent.__path__ = []
    module = sys.modules.setdefault(PLUGIN_MODULE, ModuleType(PLUGIN_MODULE))
    setattr(parent, last, module)
    setattr(module, plugin.__name__, plugin)
    plugins.register(plugin)
    ConfigStore.instance().store(group=group, name=name, node=schema, provider="aorta")
