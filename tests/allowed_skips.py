"""The skips that continuous integration accepts; there, any other skip is a failed test.

A skipped test proves nothing, and a machine that has lost its browser or its compiler would stay green for ever. So
`.ci/run` sets GATE_COMPLETE=1, and this plugin (`tests/conftest.py` loads it) turns each skip whose reason is not
in `ALLOWED` into a failure, also that of a whole file. Without the variable skips are only shown. Must not: decide what
is skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import pytest

VARIABLE: Final = "GATE_COMPLETE"


@dataclass(frozen=True)
class AllowedSkip:
    """A reason not to run a test that continuous integration accepts.

    Attributes:
        reason: a regular expression that matches the whole of what the skip says.
        why: why no machine of continuous integration can be expected to run the test.
    """

    reason: str
    why: str


ALLOWED: Final = (
    AllowedSkip("root may write into a read-only folder", "continuous integration runs as root in its container"),
    AllowedSkip(
        r".*(the samples|the sample traces|real data lies?)\b.* beside (this|the) checkout( only)?",
        "captures of other projects and machines, whose licences do not let them into this repository",
    ),
    AllowedSkip(
        r"\d+ collectives of one rank were over before they could be asked",
        "the scheduler decides whether a collective is still under way when it is looked at",
    ),
)


def unlisted(longrepr: object) -> str | None:
    """What a skip says, where continuous integration does not accept it.

    Args:
        longrepr: of a skipped report: file, line and reason.
    """
    said = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
    return None if any(re.fullmatch(allowed.reason, said, re.DOTALL) for allowed in ALLOWED) else said


def _fail_if_unlisted(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get(VARIABLE) or not report.skipped or hasattr(report, "wasxfail"):
        return
    said = unlisted(report.longrepr)
    if said is not None:
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/allowed_skips.py does not list: {said}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge the skip of a test."""
    report = yield
    _fail_if_unlisted(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge the skip of a file: `importorskip` at its head."""
    report = yield
    _fail_if_unlisted(report)
    return report
