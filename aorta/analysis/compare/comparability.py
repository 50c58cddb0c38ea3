"""Refuses to compare launches that did not do the same work.

A difference in the work is an error that names the key and both values, unless the caller allowed it; then it is
listed. Must not: let one side mix configurations, which would pass for noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from aorta.analysis.compare.launch_set import Launch, LaunchSet
from aorta.analysis.compare.run_comparison import changes_the_work, differing
from aorta.analysis.compare.verdict_rules import Rules
from aorta.errors import InputError

_ONE_SIDE: Final = ("header.", "config.parallel.", "config.fabric.", "config.instrument.")
"""Keys that may differ between the sides, where they are what is being compared, but not within one side."""
_VARIES: Final = ".seed"
"""Independent launches may well draw their own jitter, so seeds may differ within a side."""


def refuse_unlike(reference: LaunchSet, candidate: LaunchSet, rules: Rules) -> list[dict[str, Any]]:
    """Check that all launches did the same work.

    Returns:
        The differences that would have been refused had the caller not allowed them: `where` (`reference` or
            `candidate` for a difference within that side, else `between`), `key`, the values and the folders of both
            launches.

    Raises:
        InputError: launches differ in workload, shapes, world size or dtype; or, within a side, in how they ran.
    """
    allowed: list[dict[str, Any]] = []
    for where, left, right, difference in _found(reference, candidate):
        key = difference["key"]
        values = [difference["reference"], difference["candidate"]]
        if not rules.allows(key):
            place = "the two sides" if where == "between" else f"launches of the {where}"
            raise InputError(
                f"NOT COMPARABLE: {key} is {values[0]!r} in {left.path}, {values[1]!r} in {right.path}: {place} did "
                f"not do the same work. Compare launches that did, or allow it with --allow-unlike {key}"
            )
        paths = [str(left.path), str(right.path)]
        entry = {"where": where, "key": key, "values": values, "paths": paths}
        if (where, key) not in [(other["where"], other["key"]) for other in allowed]:
            allowed.append(entry)
    return allowed


def _found(reference: LaunchSet, candidate: LaunchSet) -> Iterator[tuple[str, Launch, Launch, Mapping[str, Any]]]:
    for where, side in (("reference", reference), ("candidate", candidate)):
        first = _yardstick(side)
        for other in side.launches:
            for difference in differing(first.facts, other.facts):
                key = difference["key"]
                if changes_the_work(difference) or (key.startswith(_ONE_SIDE) and not key.endswith(_VARIES)):
                    yield where, first, other, difference
    left, right = _yardstick(reference), _yardstick(candidate)
    for difference in differing(left.facts, right.facts):
        if changes_the_work(difference):
            yield "between", left, right, difference


def _yardstick(side: LaunchSet) -> Launch:
    """The launch that the others of a side are compared with: the first whose configuration is known, or else the
    first.
    """
    return next((launch for launch in side.launches if launch.tells_configuration), side.launches[0])
