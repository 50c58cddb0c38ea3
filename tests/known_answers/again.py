"""A measurement of real time, on a machine that others use too: a disturbed one may be taken again, once.

pytest's summary counts what was taken again and says what was wrong the first time: a measurement that needs it often
is wrong, not disturbed. What has to come out in any case, and what a wrong measurement must not pass (a negative
control), is asked of the result, outside of here. Nothing in virtual time needs this.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
C = TypeVar("C", bound=Hashable)
_retakes: list[str] = []
"""Since the last report of this process."""


def undisturbed(
    paths: pytest.TempPathFactory, name: str, measure: Callable[[Path], T], holds: Callable[[T], None]
) -> T:
    """Measure into a new folder; once more where `holds` raises an `AssertionError`. The second one is given as it is,
    and the tests that look at it fail.
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
    found = measure(paths.mktemp(name), cases)
    disturbed = []
    for case in cases:
        try:
            holds(case, found[case])
        except AssertionError as error:
            _note(name if case == name else f"{name}, {case}", error)
            disturbed.append(case)
    return found | measure(paths.mktemp(name), disturbed) if disturbed else found


def attempted(name: str, body: Callable[[], T]) -> T:
    """What `body` gives, the second time at the latest, for a test that looks at what it measures itself."""
    try:
        return body()
    except AssertionError as error:
        _note(name, error)
    return body()


def _note(what: str, error: AssertionError) -> None:
    _retakes.append(f"{what}: {(str(error).splitlines() or ['an assertion failed'])[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send along what was taken again, also to the process that sums up."""
    report = yield
    if _retakes:
        report.retakes = list(_retakes)
        _retakes.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was taken again."""
    told = [
        retake
        for reports in terminalreporter.stats.values()
        for report in reports
        for retake in getattr(report, "retakes", ())
    ]
    if told:
        terminalreporter.section(f"{len(told)} measurement(s) taken again")
        for retake in told:
            terminalreporter.write_line(retake)
