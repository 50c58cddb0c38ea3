"""Identifies the physical device a rank computes on, as the tools that read its sensors name it.

torch counts visible devices; management libraries count all of them. The PCI address is the same in both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from aorta.distributed.topology import platform_of
from aorta.records.device_values import pci_key
from aorta.records.schema import Platform

_VISIBLE: dict[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # ROCR_VISIBLE_DEVICES hides devices from HIP, which then counts what is left.
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceIdentity:
    """One device. `pci` as 0000:83:00.0, `uuid` without prefix, `index` among all devices; None: not known."""

    platform: Platform
    pci: str | None = None
    uuid: str | None = None
    index: int | None = None


def identify(device: torch.device, environment: Mapping[str, str] = os.environ) -> DeviceIdentity:
    """Return the identity of torch's `device`."""
    platform = platform_of(device)
    if platform not in _VISIBLE:
        return DeviceIdentity(platform)
    ordinal = device.index or 0
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return DeviceIdentity(
        platform, _pci(properties), str(uuid) if uuid else None, physical_index(platform, ordinal, environment)
    )


def physical_index(platform: Platform, ordinal: int, environment: Mapping[str, str]) -> int | None:
    """Return the index of the `ordinal`-th visible device among all; None where variables do not list it by number."""
    if environment.get("ROCR_VISIBLE_DEVICES") and platform == "rocm":
        return None
    for name in _VISIBLE[platform]:
        if name in environment:
            shown = environment[name].split(",")
            return int(shown[ordinal]) if ordinal < len(shown) and shown[ordinal].strip().isdigit() else None
    return ordinal


def match(identity: DeviceIdentity, entries: Sequence[tuple[str | None, T]]) -> T | None:
    """Return the entry of `entries` (PCI address, thing; in the tool's order) that is this device; None where that is
    ambiguous.
    """
    wanted = pci_key(identity.pci)
    if wanted is not None:
        keys = [(pci_key(pci), thing) for pci, thing in entries]
        for length in (4, 3):  # partitions of one card differ only in their function, which torch does not report
            same = [thing for key, thing in keys if key is not None and key[:length] == wanted[:length]]
            if len(same) == 1:
                return same[0]
        if any(key is not None for key, _ in keys):
            return None
    if len(entries) == 1:
        return entries[0][1]
    if identity.index is not None and identity.index < len(entries):
        return entries[identity.index][1]
    return None


def _pci(properties: object) -> str | None:
    """Return the PCI address, where torch reports it; older versions allow identification only by uuid."""
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(part, int) for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
