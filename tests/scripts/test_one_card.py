"""one_card.sh: every part has a limit, a log and a line of the table, whatever became of those before it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

CHECKS = ["check_one_rank", "check_two_ranks"]
PARTS = ["facts", "tests", *CHECKS, "values", "cost", "host_bound", "captures", "hang"]
PYTHON = """
printf 'ran %s\\n\\n' "$*"
for last; do :; done
case "$*" in
    *check-gpu*) printf 'a check failed\\n'; exit 7 ;;
    *autopsy*) exit 3 ;;
    *stuck*) : >"$last/settled_0"; : >"$last/settled_1"; printf '%s' $$ >"$last/pid"; exec sleep 300 ;;
esac
"""


@pytest.fixture
def card(sh):
    """A machine with the programs that it needs more, and a Python that fails the checks."""
    for name in ("tail", "tee", "timeout", "cut"):
        (sh.bin / name).symlink_to(shutil.which(name))
    sh.program("python3", PYTHON)
    return sh


def test_without_a_device_no_part_runs(card) -> None:
    card.program("python3", f'case "$1" in -c) exit 1 ;; esac{PYTHON}')
    done = card("one_card.sh", "out")
    assert (done.code, done.out) == (1, "")
    assert "there is no card to look at" in done.err


def results(table: str) -> dict[str, str]:
    """What became of each part."""
    found = re.findall(r"^\d  (\w+) +(ok|failed \d+|> \d+ s|no time) +\d+  ", table, re.MULTILINE)
    return dict(found)


def test_a_part_that_fails_leaves_the_others_and_the_table_is_last(card) -> None:
    done = card("one_card.sh", "out", "training.batch_size=3")
    out = card.home / "out"
    assert results(done.out) == dict.fromkeys(PARTS, "ok") | dict.fromkeys(CHECKS, "failed 7"), done.err
    assert done.code == 1
    assert (out / "summary.txt").read_text() == done.out
    assert sorted(path.stem for path in out.glob("*.log")) == sorted(PARTS)
    assert done.out.count(" a check failed\n") == 2, "the last words of a part"
    # Those that train get the words; NCCL's two ranks share the card.
    words = {name: (out / f"{name}.log").read_text() for name in PARTS}
    assert all("training.batch_size=3" in words[name] for name in PARTS[2:8])
    assert "training.ranks_per_device=2" in words["check_two_ranks"]
    stuck = int((out / "hang/pid").read_text())
    assert not _runs(stuck), "its ranks are ended"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_is_ended_at_its_limit_and_what_has_no_time_left_is_said(card) -> None:
    card.program("python3", 'case "$1" in -c) exit 0 ;; esac; exec sleep 300')
    done = card("one_card.sh", "out", "--only", "1,2", LIMIT_S="8")
    assert results(done.out) == {"facts": "no time", "tests": "> 1 s"}
    assert done.code == 1


def test_without_a_place_it_says_how_it_is_called(card) -> None:
    done = card("one_card.sh", "--only", "1")
    assert (done.code, done.out) == (1, "")
    assert "where to? bash scripts/one_card.sh OUT [--only 3,4] [OVERRIDE...]" in done.err
