"""Registers classes of AORTA as Hydra plugins, without a package that Hydra would have to discover.

Must not know any particular launcher or sweeper.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

PLUGIN_MODULE: Final = "hydra_plugins.aorta"
"""Hydra accepts plugins only below `hydra_plugins`; `register_plugin` creates this module in memory."""


def register_plugin(group: str, name: str, plugin: type[Any], schema: type[Any]) -> None:
    """Make `GROUP=NAME` select a plugin, whose `__module__` must be `PLUGIN_MODULE`.

    Args:
        group, name: of Hydra's configuration, e.g. `hydra/launcher` and `torchrun`.
        plugin: a launcher or sweeper class.
        schema: the dataclass of its settings.
    """
    plugins = Plugins.instance()  # scans installed plugins before our module exists
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
