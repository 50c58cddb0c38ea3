"""The environment that a launch starts from: the caller's, without its place in another launch.

Enters: variables. Leaves: variables. Must not: add any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

LAUNCHERS_OWN: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which torchrun tells a process its place; a launch of its own must not find those of another."""


def own_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's environment without what a torchrun round it left there."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHERS_OWN and not name.startswith("TORCHELASTIC_")
    }
