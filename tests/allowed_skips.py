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
from typing import Final

import pytest

VARIABLE: Final = "GATE_COMPLETE"
Report = pytest.TestReport | pytest.CollectReport
ALLOWED: Final = {
    r"(setpriv|unshare) .*: not permitted here": "a container may lack the right to give up rights, or to mount",
    r".*(the samples|the sample traces|real data lies?)\b.* beside (this|the) checkout( only)?": (
        "captures of other projects and machines, whose licences do not let them into this repository"
    ),
    r"\d+ collectives of one rank were over before they could be asked": (
        "the scheduler decides whether a collective is still under way when it is looked at"
    ),
}
"""What a skip says, as a regular expression -> why no machine of continuous integration can be expected to run it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Report, Report]:
    """Judge the skip of a test or, at the head of a file (`importorskip`), of the file."""
    report = yield
    if os.environ.get(VARIABLE) and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        said = str(reason).removeprefix("Skipped: ")
        if not any(re.fullmatch(allowed, said, re.DOTALL) for allowed in ALLOWED):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/allowed_skips.py does not list: {said}"
    return report


pytest_make_collect_report = pytest_runtest_makereport
