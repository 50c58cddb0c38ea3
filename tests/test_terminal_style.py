"""Colour: where there is any, and that it changes no word."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

import pytest

from aorta.terminal_style import Style, mark_of, style_of, table
from tests.analysis.compare.builders import launch_set
from tests.runs import environment

ESCAPE = re.compile(r"\033\[[0-9;]*m")


def on_terminal(words: list[str], folder: Path, columns: int = 120, **extra: str) -> str:
    """What a program writes to a pseudo-terminal of so many columns."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    own = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(words, cwd=folder, stdout=its, stderr=its, env=own | {"TERM": "xterm"} | extra)
    os.close(its)
    said = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # EIO: the program has closed the terminal
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert process.wait() == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"CLICOLOR_FORCE": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
    ],
)
def test_a_pipe_has_colour_only_where_it_is_forced(words: Mapping[str, str], coloured: bool) -> None:
    assert style_of(io.StringIO(), words).enabled is coloured


@pytest.mark.parametrize(
    ("words", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"CLICOLOR": "0"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_a_terminal_has_colour_unless_it_is_refused(words: Mapping[str, str], coloured: bool) -> None:
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as terminal, os.fdopen(ours):
        ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        assert style_of(terminal, words) == Style(coloured, 80, 80)


def test_verdicts_are_told_apart_without_colour() -> None:
    verdicts = ("regression", "improvement", "equivalent", "inconclusive", "shifted", "not tested")
    assert len({mark_of(verdict) for verdict in verdicts}) == len(verdicts)
    assert Style().verdict("regression", "x regression") == "x regression"
    assert Style(enabled=True).verdict("regression", "x") != Style(enabled=True).verdict("improvement", "x")


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [80, 120])
def test_a_report_says_the_same_on_a_terminal_and_in_a_pipe(tmp_path: Path, columns: int) -> None:
    launch_set(tmp_path / "plan" / "reference", (0.8, 0.81, 0.82, 0.83))
    launch_set(tmp_path / "plan" / "candidate", (0.6, 0.61, 0.62, 0.63))
    words = [sys.executable, "-m", "aorta", "report", "plan/reference", "plan/candidate", "--no-html"]
    seen = on_terminal(words, tmp_path, columns)
    plain = ESCAPE.sub("", seen)
    assert "\033[1;31m[x] More exposed communication\033[0m" in seen
    assert max(map(len, plain.splitlines()[:-2])) <= min(columns, 100)  # without the commands to be copied
    assert on_terminal(words, tmp_path, columns, NO_COLOR="1") == plain
    piped = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment(), check=True).stdout
    assert "\033" not in piped
    if columns >= 100:
        assert piped == plain


def test_the_words_of_a_last_column_go_on_below_and_no_first_cell_is_broken_for_them() -> None:
    rows = [["part", "ms", "of it"], ["forward", "6.9", ""], ["idle", "45.2", "unexplained, most of it between data"]]
    assert table(rows, right=[1], width=45) == [
        "part       ms  of it",
        "forward   6.9",
        "idle     45.2  unexplained, most of it\n               between data",
    ]
