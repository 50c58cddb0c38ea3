"""What a network charges for a collective, and what another network would charge.

The emulated network of a run is known down to its law (`aorta.config.groups.fabric`), so any other can be
asked. Of a real network only the recorded costs are known. Must not change what was recorded but by these laws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import msgspec

from aorta.analysis.whatif.program import Issued
from aorta.config.groups.fabric import emulated_rules, network_cost_ns
from aorta.config.schema import Algorithm, EmulatedFabric, Sharing

_ENUMS = {"algorithm": Algorithm, "sharing": Sharing}


def network_of(fabric: Mapping[str, object] | None, world_size: int) -> EmulatedFabric | None:
    """The settings of an emulated network as a manifest states them; None: the network was real.

    Raises:
        ValueError: they are not settings of an emulated network.
    """
    if fabric is None:
        return None
    known = {each.name for each in fields(EmulatedFabric)}
    values = {name: value for name, value in fabric.items() if name in known}
    for name, kind in _ENUMS.items():
        if name in values:
            values[name] = kind(str(values[name]))
    try:
        settings = msgspec.convert(values, EmulatedFabric)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    problems = list(emulated_rules(settings, world_size))
    if problems:
        raise ValueError("; ".join(problems))
    return settings


def charge_ns(issued: Issued, world_size: int, network: EmulatedFabric) -> float:
    """What a network charges for a collective; jitter left out."""
    return network_cost_ns(issued.kind, issued.bytes, issued.ranks, world_size, network)
