"""Finds copies that are communication.

Collectives whose data is moved by copy engines launch no kernel (NCCL with zero-CTA collectives, torch's symmetric
memory), so their rows are copies between devices. Takes the copies of a trace with their own arguments and those of the
host's operators, and returns the copies that a collective launched. Must not: call a copy communication without
evidence in the trace; copies that may be either make communication unobserved, with this reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from aorta.analysis.load.kineto.event_structs import Arguments

SYMMETRIC: Final = "symm_mem::"
"""Operators of torch's symmetric memory (torch/csrc/distributed/c10d/symm_mem); they do not go through a `c10d::`
operator.
"""
_WITH_HOST: Final = re.compile(r"HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|HostToHost|Pageable|Pinned|Host\b")


def between_devices(name: str) -> bool:
    """Whether a copy of that name may have moved data between devices ("Memcpy PtoP (Device -> Device)"). Fills, and
    copies to or from the host, do not. CUPTI also calls a copy to another device's mapped memory `DtoD`.
    """
    return "memset" not in name.lower() and _WITH_HOST.search(name) is None


def launched_by_collectives(
    copies: Mapping[int, Arguments | int], parameters: Mapping[int, Arguments]
) -> dict[int, Arguments]:
    """The copies that a collective launched, with that collective's arguments.

    Args:
        copies: row -> its own arguments where they name a collective, else the id of its host operator.
        parameters: that id -> the arguments of `record_param_comms`.
    """
    found = {}
    for row, known in copies.items():
        arguments = known if isinstance(known, Arguments) else parameters.get(known)
        if arguments is not None:
            found[row] = arguments
    return found


def unknown(count: int, symmetric: bool) -> str | None:
    """Why communication was not fully observed, or None. `count`: copies between devices without a known collective."""
    if not symmetric or not count:
        return None
    return (
        f"symmetric memory was used, and of {count} copies between devices the trace does not say whether they are "
        "communication: copy engines move the data of such collectives, without a kernel"
    )
