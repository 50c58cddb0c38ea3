"""A measurement on a machine that others use too: a disturbed one is taken again, a wrong one is wrong each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

ATTEMPTS = 3
T = TypeVar("T")
C = TypeVar("C", bound=Hashable)


def undisturbed(
    paths: pytest.TempPathFactory, name: str, measure: Callable[[Path], T], holds: Callable[[T], None]
) -> T:
    """Measure into a new folder until `holds` raises no `AssertionError`; the last of `ATTEMPTS` is given as it is, and
    the tests that look at it fail.
    """
    found = each_undisturbed(
        paths, name, [name], lambda folder, _: {name: measure(folder)}, lambda _, taken: holds(taken)
    )
    return found[name]


def each_undisturbed(
    paths: pytest.TempPathFactory,
    name: str,
    cases: Sequence[C],
    measure: Callable[[Path, Sequence[C]], dict[C, T]],
    holds: Callable[[C, T], None],
) -> dict[C, T]:
    """The same for several cases of one measurement, which are disturbed one by one: only those are taken again."""
    found: dict[C, T] = {}
    left = list(cases)
    for _ in range(ATTEMPTS):
        taken = measure(paths.mktemp(name), left)
        found |= taken
        left = [case for case in left if not _is_so(holds, case, taken[case])]
        if not left:
            break
    return found


def attempted(body: Callable[[], T]) -> T:
    """What `body` gives, or raises at the last of `ATTEMPTS`, for a test that looks at what it measures itself."""
    for _ in range(ATTEMPTS - 1):
        with suppress(AssertionError):
            return body()
    return body()


def _is_so(holds: Callable[[C, T], None], case: C, found: T) -> bool:
    try:
        holds(case, found)
    except AssertionError:
        return False  # disturbed, or wrong
    return True
